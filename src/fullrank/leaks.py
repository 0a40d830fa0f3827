"""Whether a training run sees what it is measured by: texts of the golden sets among the training texts.

Promise: exact but for case and white space, in one pass over the training texts, which are not kept. Texts that are
nearly the same are found by `fullrank.checks.check_golden`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from fullrank._errors import DataError
from fullrank.checks import EXAMPLES, normalise
from fullrank.data import GoldenSet
from fullrank.result import Finding
from fullrank.sources import PROGRESS_AFTER_SECONDS

__all__ = ["dataset_texts", "flat_texts", "leaks"]

logger = logging.getLogger(__name__)

ROWS = 10_000
"""Rows of a dataset that are read at a time."""
HEAD = 80
"""Characters in which the first two words of a text usually end."""
REMEDY = {
    "query": "Remove them from the training data: this set is not held out",
    "relevant document": "Fine where training may know the index; elsewhere the numbers do not carry over to new "
    "documents",
}


def leaks(
    sets: Sequence[GoldenSet], texts: Iterable[str], *, strict: bool = False, quiet: bool = True
) -> list[Finding]:
    """Returns a Finding for each set whose queries, or relevant documents, are among the training texts.

    Kinds ``train-queries`` (an error) and ``train-documents`` (a warning), as in `fullrank.checks.check_golden`.

    Args:
        sets: the golden sets.
        texts: of training; read once.
        strict: raises where there is one.
        quiet: shows no progress bar.

    Raises:
        DataError: something was found, with ``strict``.
    """
    parts = [(golden, "query", _by_text(golden.queries)) for golden in sets]
    parts += [(golden, "relevant document", _by_text(_relevant(golden))) for golden in sets]
    known = {whole for _, _, ids in parts for whole in ids}
    heads = {_head(whole) for whole in known}
    # Most texts end at their first two words: 1 million pairs with passages of 900 characters take 2 s, not 6.
    bar = tqdm(texts, "training texts", delay=PROGRESS_AFTER_SECONDS, disable=True if quiet else None, leave=False)
    met = {whole for text in bar if _head(text) in heads and (whole := normalise(text)) in known}
    findings = []
    for golden, noun, ids in parts:
        found = [key for whole, keys in ids.items() if whole in met for key in keys]
        if found:
            of_queries = noun == "query"
            plural = ("queries" if of_queries else "relevant documents") if len(found) > 1 else noun
            findings.append(
                Finding(
                    "train-queries" if of_queries else "train-documents",
                    "error" if of_queries else "warning",
                    f"{len(found)} {plural} of {golden.name!r} with a text that is in the training data",
                    len(found),
                    tuple(found[:EXAMPLES]),
                    REMEDY[noun],
                )
            )
    if strict and findings:
        raise DataError(f"strict=True, and {'; '.join(map(str, findings))}")
    return findings


def flat_texts(train_texts: Iterable[Any]) -> Iterator[str]:
    """Yields the texts of ``train_texts``: texts, or (query, positive, ...) tuples of them.

    Raises:
        DataError: something else.
    """
    if isinstance(train_texts, str | Mapping) or not isinstance(train_texts, Iterable):
        raise DataError(f"train_texts must be texts or (query, positive) pairs; got {str(train_texts)[:60]!r}")
    for entry in train_texts:
        parts = entry if isinstance(entry, tuple | list) else (entry,)
        for text in parts:
            if not isinstance(text, str):
                raise DataError(f"train_texts must hold texts or (query, positive) pairs; got {str(entry)[:60]!r}")
            yield text


def dataset_texts(dataset: Any) -> Iterator[str]:
    """Yields all texts of a ``datasets.Dataset``, or of a dict of them; what can be read only once is left alone."""
    if isinstance(dataset, Mapping):
        for one in dataset.values():
            yield from dataset_texts(one)
        return
    if not hasattr(dataset, "select_columns") or not hasattr(dataset, "num_rows"):
        if dataset is not None:
            logger.info("a %s is not searched for texts of the golden set", type(dataset).__name__)
        return
    names = [
        name for name, kind in dataset.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")
    ]
    if not names:
        return
    for table in dataset.select_columns(names).with_format("arrow").iter(batch_size=ROWS):
        for name in names:
            yield from (text for text in table[name].to_pylist() if text is not None)


def _head(text: str) -> str:
    """Returns the first two words, normalised, or a shorter text; equal for texts that are equal when normalised."""
    words = text[:HEAD].split(None, 2)
    if len(words) < 3 and len(text) > HEAD:  # the second word may be cut off
        words = text.split(None, 2)
    return normalise(" ".join(words[:2]))


def _by_text(texts: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, text in texts.items():
        if whole := normalise(text):
            found.setdefault(whole, []).append(key)
    return found


def _relevant(golden: GoldenSet) -> dict[str, str]:
    judged = golden.judgements
    good = (judged.doc >= 0) & (judged.grade > 0) & (judged.grade >= golden.relevant_from)
    return {golden.doc_ids[i]: golden.doc_texts[i] for i in np.unique(judged.doc[good]).tolist()}
