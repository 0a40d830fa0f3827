"""The prompts that an evaluation uses, and what speaks against them.

Promise: reads settings only; nothing is encoded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fullrank.encode import Adapter
from fullrank.result import Finding
from fullrank.wrappers import declared_prompt

__all__ = ["prompt_findings", "prompts_text", "trained_prompts", "unused_prompts"]


def unused_prompts(encoder: Adapter) -> list[Finding]:
    """Returns a Finding where the model declares a prompt that is not used."""
    model = getattr(encoder, "model", None)
    unused = [side for side in ("query", "document") if declared_prompt(model, side) and not encoder.prompt(side)]
    if not unused:
        return []
    return [
        Finding(
            "prompt-unused",
            "warning",
            "the model declares a prompt that was not used",
            count=len(unused),
            examples=tuple(unused),
            remedy="Leave query_prompt and document_prompt at None to use the model's own",
        )
    ]


def prompt_findings(encoder: Adapter, trained: Sequence[tuple[str, str]] = ()) -> list[Finding]:
    """Returns what speaks against the prompts of an evaluation.

    Kinds: ``prompt-unused``; ``prompt-same``, the prompt of queries in front of documents too; ``prompt-trained``,
    training uses others.

    Args:
        encoder: of the evaluation.
        trained: (prompt of queries, of documents) of each dataset that the model is trained on, see `trained_prompts`.
    """
    query, document = encoder.prompt("query"), encoder.prompt("document")
    findings = unused_prompts(encoder)
    if query and query == document:
        message = f"queries and documents have the same prompt, {query!r}"
        remedy = "Right for a model that was made so; elsewhere give documents a prompt of their own, or none"
        findings.append(Finding("prompt-same", "warning", message, remedy=remedy))
    other = [pair for pair in dict.fromkeys(trained) if pair != (query, document)]
    if other:
        q, d = other[0]
        message = (
            f"evaluations put {query!r} before queries and {document!r} before documents, training {q!r} and {d!r}: "
            "what is measured is not what is trained"
        )
        remedy = "Pass prompts={column: prompt} to the training arguments, or change model.prompts"
        findings.append(Finding("prompt-trained", "warning", message, count=len(other), remedy=remedy))
    return findings


def prompts_text(encoder: Adapter) -> str | None:
    """Returns a line on the prompts in use, or None where there is none."""
    query, document = encoder.prompt("query"), encoder.prompt("document")
    if not query and not document:
        return None
    return f"Prompts: queries {query!r}, documents {document!r}"


def trained_prompts(trainer: Any) -> list[tuple[str, str]]:
    """Returns (prompt of queries, of documents) of each training dataset of a sentence-transformers trainer.

    The first column of a dataset holds queries and the second documents, as the losses have it. Empty for a trainer
    that knows no prompts.
    """
    args: Any = getattr(trainer, "args", None)
    if not hasattr(args, "prompts"):
        return []
    dataset: Any = getattr(trainer, "train_dataset", None)
    several = isinstance(dataset, Mapping)
    found = []
    for name, one in dataset.items() if several else [("", dataset)]:
        columns = [
            c for c in getattr(one, "column_names", None) or [] if c not in ("label", "labels", "score", "scores")
        ]
        if len(columns) < 2:
            continue
        prompts: Any = args.prompts or ""
        if several and isinstance(prompts, Mapping) and name in prompts:
            prompts = prompts[name]
        if isinstance(prompts, str):
            found.append((prompts, prompts))
        elif isinstance(prompts, Mapping):
            found.append((str(prompts.get(columns[0]) or ""), str(prompts.get(columns[1]) or "")))
    return found
