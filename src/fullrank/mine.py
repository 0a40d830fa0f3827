"""Hard negatives for training, mined with a model over the full corpus.

Promise: a mined negative is never a judged answer of its query, nor a text equal to one, nor stands twice in a row;
whatever was looked at and not taken is counted under its reason. The same model, data and seed give the same negatives.

Documents that the model ranks high and nobody judged are often answers that nobody labelled. Two bars keep them out:
the first ranks are skipped, and a candidate must score clearly below the positive (as a share of its score: Moreira et
al., *NV-Retriever: improving text embedding models with effective hard-negative mining*, 2024, who use 95 %).
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, get_args

from rich.table import Table
from rich.text import Text

from fullrank._errors import DataError, SettingError
from fullrank.checks import normalise
from fullrank.data import GoldenSet
from fullrank.encode import Precision, as_encoder
from fullrank.plan import EvaluationPlan, Progress
from fullrank.report import render
from fullrank.result import Hit
from fullrank.settings import refuse_no_count, refuse_unknown
from fullrank.training_data import TrainingExample

__all__ = [
    "REASONS",
    "Mined",
    "MiningRules",
    "Picked",
    "golden_from_examples",
    "mine_from_hits",
    "mine_negatives",
    "mined_table",
    "pick_negatives",
]

Sampling = Literal["top", "random"]

REASONS = {
    "answer": "a judged answer of the query, or a text equal to one",
    "query": "the text of the query itself",
    "empty": "no text",
    "repeated": "the text of another candidate of the query",
    "too-close": "scores too near to the positive, or above it: perhaps an answer that nobody judged",
    "not-needed": "fit, but the row is full",
}
"""Why a candidate within the window of ranks was not taken."""


@dataclass(frozen=True)
class MiningRules:
    """Which documents become negatives.

    Args:
        from_rank, to_rank: the ranks to look at, 1-based and inclusive, answers counted in.
        max_ratio: a candidate scores at most this share of the positive's score; None for no such bar. Below a score
            of 0, where a share would turn round, the distance is what counts: at most s - (1 - max_ratio) |s|.
        margin: a candidate scores at least this much below the positive; None for no such bar.
        negatives: for each example at most so many.
        sampling: ``top`` takes the highest ranked of the fit ones, ``random`` draws among them.
        seed: of the drawing.

    Raises:
        SettingError: a value that cannot work.
    """

    from_rank: int = 10
    to_rank: int = 100
    max_ratio: float | None = 0.95
    margin: float | None = None
    negatives: int = 5
    sampling: Sampling = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("from_rank", "to_rank", "negatives"):
            refuse_no_count(name, getattr(self, name) or 0, "a whole number from 1")
        if self.from_rank > self.to_rank:
            raise SettingError(
                f"from_rank={self.from_rank} lies behind to_rank={self.to_rank}: no rank is between them"
            )
        if self.max_ratio is not None and not 0 < self.max_ratio <= 1:
            raise SettingError(f"max_ratio={self.max_ratio!r} must be above 0 and at most 1, or None for no such bar")
        if self.margin is not None and not 0 <= self.margin < math.inf:
            raise SettingError(f"margin={self.margin!r} must be a number from 0, or None for no such bar")
        refuse_unknown("sampling", self.sampling, get_args(Sampling))

    def highest(self, positive: float) -> float:
        """Returns the highest score that a negative may have beside a positive that scores ``positive``."""
        bars = [math.inf]
        if positive == -math.inf:  # it stands behind everything that is looked at
            return math.inf if self.max_ratio is None and self.margin is None else positive
        if self.max_ratio is not None:
            bars.append(positive - (1 - self.max_ratio) * abs(positive))
        if self.margin is not None:
            bars.append(positive - self.margin)
        return min(bars)


@dataclass(frozen=True)
class Picked:
    """The negatives of one example.

    Attributes:
        doc_ids: in the order of their ranks.
        dropped: ``{reason: candidates}``, see `REASONS`.
    """

    doc_ids: tuple[str, ...]
    dropped: Counter[str]


@dataclass(frozen=True)
class Mined:
    """What mining gave.

    Attributes:
        examples: one for each query and each of its answers, in the order of the golden set; also those without
            negatives.
        rules: that were used.
        n_candidates: documents looked at, over all examples.
        dropped: ``{reason: candidates}`` that were not taken, see `REASONS`.
        n_out_of_list: examples whose positive the model ranks behind ``to_rank``: look at some of them, for either the
            pair is wrong or it is what the model has to learn.
    """

    examples: list[TrainingExample]
    rules: MiningRules
    n_candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    n_out_of_list: int = 0

    def summary(self) -> dict[str, object]:
        """Returns the counts as JSON holds them."""
        counts = [len(example.negatives) for example in self.examples]
        return {
            "examples": len(counts),
            "negatives": sum(counts),
            "full": sum(n == self.rules.negatives for n in counts),
            "too_few": sum(0 < n < self.rules.negatives for n in counts),
            "none": sum(n == 0 for n in counts),
            "positive_out_of_list": self.n_out_of_list,
            "candidates": self.n_candidates,
            "dropped": {reason: self.dropped[reason] for reason in REASONS},
        }


def pick_negatives(
    hits: Sequence[Hit],
    positive_score: float,
    *,
    text_of: Callable[[str], str],
    query: str,
    answers: Set[str],
    rules: MiningRules,
    rng: random.Random,
) -> Picked:
    """Returns the negatives among the ranked documents of one query.

    Args:
        hits: (document id, score), best first, from rank 1.
        positive_score: of the positive that the negatives go with; -inf where it ranks behind all of ``hits``.
        text_of: gives the text of a document.
        query: its text.
        answers: the texts of all its answers, normalised (`fullrank.checks.normalise`).
        rules: what to take.
        rng: draws, where the rules say so.
    """
    window = hits[rules.from_rank - 1 : rules.to_rank]
    highest, whole_query = rules.highest(positive_score), normalise(query)
    dropped: Counter[str] = Counter()
    fit: dict[str, str] = {}
    for doc_id, score in window:
        text = normalise(text_of(doc_id))
        if text in answers:
            dropped["answer"] += 1
        elif not text:
            dropped["empty"] += 1
        elif text == whole_query:
            dropped["query"] += 1
        elif score > highest:
            dropped["too-close"] += 1
        elif text in fit:
            dropped["repeated"] += 1
        else:
            fit[text] = doc_id
    ids = list(fit.values())
    n = min(rules.negatives, len(ids))
    taken = sorted(rng.sample(range(len(ids)), n)) if rules.sampling == "random" else range(n)
    dropped["not-needed"] = len(ids) - len(taken)
    return Picked(tuple(ids[i] for i in taken), dropped)


def mine_negatives(
    model: object,
    golden: GoldenSet,
    *,
    rules: MiningRules | None = None,
    precision: Precision | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Mined:
    """Returns an example with hard negatives for each answer of each query of ``golden``.

    Queries of one text share their answers. The ranked lists of all queries are in memory at once, about 10 kB a query
    for a hundred ranks.

    Args:
        model: what to mine with, see `fullrank.evaluate`.
        golden: the queries to train on, their answers, and the corpus to mine in. Not the set you measure by.
        rules: what to take.
        precision, batch_tokens, progress: see `fullrank.evaluate`.

    Raises:
        DataError: no query has an answer.
        EvaluationError: embeddings that cannot be ranked.
    """
    rules = rules or MiningRules()
    plan = EvaluationPlan(as_encoder(model), golden, batch_tokens)
    hits = plan.run(precision=precision, list_length=rules.to_rank, progress=progress).hits
    return mine_from_hits(hits, golden, rules=rules)


def mine_from_hits(hits: Mapping[str, Sequence[Hit]], golden: GoldenSet, *, rules: MiningRules) -> Mined:
    """Returns the examples that ranked lists give: the part of `mine_negatives` that needs no model.

    Args:
        hits: ``{query id: [(document id, score), ...]}``, best first, at least ``rules.to_rank`` long where the corpus
            is.
        golden, rules: see `mine_negatives`.
    """
    text = dict(zip(golden.doc_ids, golden.doc_texts, strict=True))
    relevant = {
        query_id: [d for d, grade in golden.qrels[query_id].items() if grade >= golden.relevant_from and grade > 0]
        for query_id in golden.query_ids
    }
    # A document of a low grade is no positive, but no negative either.
    judged: dict[str, set[str]] = {}
    for query_id in golden.query_ids:
        whole = judged.setdefault(normalise(golden.queries[query_id]), set())
        whole |= {normalise(text[d]) for d, grade in golden.qrels[query_id].items() if grade > 0 and d in text}
    examples: list[TrainingExample] = []
    dropped: Counter[str] = Counter()
    n_candidates = n_out_of_list = 0
    rng = random.Random(rules.seed)
    for query_id in golden.query_ids:
        listed = hits.get(query_id, ())
        scores, query = dict(listed), golden.queries[query_id]
        for positive in (d for d in relevant[query_id] if d in text):
            picked = pick_negatives(
                listed,
                scores.get(positive, -math.inf),
                text_of=text.__getitem__,
                query=query,
                answers=judged[normalise(query)],
                rules=rules,
                rng=rng,
            )
            negatives = tuple(text[d] for d in picked.doc_ids)
            examples.append(TrainingExample(query, text[positive], negatives))
            dropped.update(picked.dropped)
            n_candidates += len(negatives) + picked.dropped.total()
            n_out_of_list += positive not in scores and len(listed) < len(text)
    return Mined(examples, rules, n_candidates, dropped, n_out_of_list)


def golden_from_examples(
    examples: Sequence[TrainingExample], corpus: Iterable[str] = (), *, name: str = "training"
) -> GoldenSet:
    """Returns a golden set of training examples, to mine with: equal queries are one, with the answers of all.

    Args:
        examples: queries and positives; negatives that they have are not looked at.
        corpus: texts to mine in beside the positives.
        name: of the set.

    Raises:
        DataError: there are no examples.
    """
    if not examples:
        raise DataError("there are no training examples to mine for")
    places = {text: f"d{i}" for i, text in enumerate(dict.fromkeys([*corpus, *(e.positive for e in examples)]))}
    answers: dict[str, dict[str, float]] = {}
    for example in examples:
        answers.setdefault(example.query, {})[places[example.positive]] = 1
    return GoldenSet(
        {f"q{i}": query for i, query in enumerate(answers)},
        {doc_id: text for text, doc_id in places.items()},
        {f"q{i}": grades for i, grades in enumerate(answers.values())},
        name=name,
    )


def mined_table(mined: Mined, *, title: str) -> str:
    """Returns the counts as a table: what was found, what was dropped and why."""
    rules, counts = mined.rules, mined.summary()
    table = Table(title=Text(title, style="table.title"), title_justify="left")  # a name may look like markup
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    rows = (
        ("examples", "examples", "a query with one of its answers"),
        ("full", "with all negatives", f"{rules.negatives} of them"),
        ("too_few", "with too few", ""),
        ("none", "with none", ""),
        (
            "positive_out_of_list",
            "answer out of sight",
            f"ranks behind {rules.to_rank}: a wrong pair, or what to learn",
        ),
        ("candidates", "candidates", f"ranks {rules.from_rank} to {rules.to_rank}"),
        ("negatives", "taken", ""),
    )
    for key, name, remark in rows:
        table.add_row(name, f"{counts[key]:,}", remark)
    for reason, remark in REASONS.items():
        table.add_row(f"dropped: {reason}", f"{mined.dropped[reason]:,}", remark)
    return render(table)
