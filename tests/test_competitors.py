"""Which documents a model is expected to lose the most by, and what its queries can lose."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from fullrank import GoldenSet, Metric, Result, evaluate_embeddings
from fullrank.clock import Clock
from fullrank.competitors import STEEPNESS, Rivals
from fullrank.measure import Measurement
from fullrank.outcome import Settings


def golden_of(n, qrels):
    queries = {qid: qid for qid in qrels}
    return GoldenSet(queries, {f"d{i}": f"text {i}" for i in range(n)}, qrels, name="dev")


def result_of(golden, listed):
    return Result(
        {"recall@1": 0.0},
        {"recall@1": np.zeros(len(golden.queries))},
        tuple(golden.query_ids),
        {},
        hits=listed,
        qrels=golden.qrels,
    )


THREE = golden_of(6, {"a": {"d0": 1}, "b": {"d1": 1}, "c": {"d2": 1}})
LISTED = {
    "a": [("d3", 0.9), ("d0", 0.5), ("d4", 0.1)],  # d3 leads by 0.4, d4 trails by 0.4
    "b": [("d3", 0.8), ("d1", 0.8), ("d5", 0.2)],  # d3 level, d5 trails by 0.6
    "c": [("d5", 0.9), ("d4", 0.7), ("d2", 0.5)],  # d5 leads by 0.4, d4 by 0.2
}


def test_what_costs_most_together_comes_first_and_is_lost_once():
    rivals, seen = Rivals([result_of(THREE, LISTED)], THREE), np.zeros(6, dtype=bool)
    spread = np.median([np.std([score for _, score in hits]) for hits in LISTED.values()])

    def chance(lead):
        return expit(lead / spread * STEEPNESS)

    # d3: nearly all of a and half of b. d5: nearly all of c and little of b. Then a and c are lost, and what is left
    # for d4 is what d3 and d5 left over.
    assert chance(0.4) + chance(0.0) > chance(0.4) + chance(-0.6) > chance(0.2) + chance(-0.4)
    assert rivals.most_harmful(np.ones(3), seen, 2).tolist() == [3, 5]
    assert rivals.most_harmful(np.ones(3), seen, 9).tolist() == [3, 5, 4]
    # Where only c has something to lose, d3 costs nothing, and d4 less than d5.
    assert rivals.most_harmful(np.array([0.0, 0.0, 1.0]), seen, 9).tolist() == [5, 4]
    # b alone: d3 stands level with its answer, d5 far below.
    assert rivals.most_harmful(np.array([0.0, 1.0, 0.0]), seen, 1).tolist() == [3]
    seen[[3, 5]] = True
    assert rivals.most_harmful(np.ones(3), seen, 9).tolist() == [4]
    assert rivals.most_harmful(np.zeros(3), seen, 9).tolist() == []


def test_models_are_averaged_and_scale_does_not_matter():
    other = {qid: [(doc, 1000 * score + 7) for doc, score in hits] for qid, hits in LISTED.items()}
    one, two = (result_of(THREE, listed) for listed in (LISTED, other))
    seen = np.zeros(6, dtype=bool)
    for stakes in (np.ones(3), np.array([0.2, 1.0, 0.5])):
        expected = Rivals([one], THREE).most_harmful(stakes, seen, 9).tolist()
        assert Rivals([two], THREE).most_harmful(stakes, seen, 9).tolist() == expected
        assert Rivals([one, two], THREE).most_harmful(stakes, seen, 9).tolist() == expected


@pytest.mark.parametrize("listed", [{}, {"a": []}, {"a": [("gone", 0.9), ("d0", 0.5)]}, {"a": [("d0", 0.5)]}])
def test_lists_without_rivals_name_nothing(listed):
    assert Rivals([result_of(THREE, listed)], THREE).most_harmful(np.ones(3), np.zeros(6, dtype=bool), 9).size == 0
    assert Rivals([], THREE).most_harmful(np.ones(3), np.zeros(6, dtype=bool), 9).size == 0


def test_scores_that_are_all_equal_and_answers_that_are_not_listed():
    level = result_of(THREE, {"a": [("d3", 0.5), ("d0", 0.5)], "b": [("d4", 0.5), ("d5", 0.5)]})
    found = Rivals([level], THREE).most_harmful(np.ones(3), np.zeros(6, dtype=bool), 9)
    assert sorted(found.tolist()) == [3, 4, 5]


@given(seed=st.integers(0, 10**6), n=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_no_other_document_is_expected_to_cost_more_than_the_first(seed, n):
    rng = np.random.default_rng(seed)
    golden = golden_of(30, {f"q{i}": {f"d{rng.integers(30)}": 1} for i in range(8)})
    queries, documents = rng.normal(size=(8, 4)), rng.normal(size=(30, 4))
    results = [
        evaluate_embeddings(queries + 0.1 * rng.normal(size=(8, 4)), documents, golden, metrics=["recall@1"])
        for _ in range(2)
    ]
    stakes, seen = rng.uniform(size=8), rng.uniform(size=30) < 0.3
    rivals = Rivals(results, golden)
    found = rivals.most_harmful(stakes, seen, n)
    assert len(found) == len(set(found.tolist())) <= n
    assert not seen[found].any()
    harm = np.asarray(rivals._by_query.todense()).T @ stakes
    harm[seen[rivals.docs]] = 0
    if len(found):
        assert harm[rivals.docs.tolist().index(found[0])] == pytest.approx(harm.max())
    assert rivals.most_harmful(stakes, seen, 100)[: len(found)].tolist() == found.tolist()


def stakes_of(metric, better, weights=None):
    """One query whose answer scores 0, with ``better`` documents above it and nothing else."""
    import torch

    golden = golden_of(better + 1, {"q": {"d0": 1}})
    documents = torch.tensor([[1.0, 0.0]] + [[1.0, 1.0 + i] for i in range(better)], dtype=torch.float32)
    queries = torch.tensor([[0.0, 1.0]])
    kept = Settings([Metric.parse(metric)], "expected", "dot", None, False, "raise")
    measurement = Measurement(golden, kept, queries, Clock())
    everything = np.arange(better + 1)
    vectors = measurement.ready(everything, documents)
    measurement.aim(everything, vectors)
    measurement.take(everything, vectors)
    return measurement.stakes(weights or {metric: 1.0}).tolist()


@pytest.mark.parametrize(
    ("metric", "better", "stake"),
    [
        ("recall@1", 0, 1.0),
        ("recall@1", 1, 0.0),
        ("recall@10", 9, 1.0),
        ("recall@10", 8, 1 / 2),  # two push the answer out of the top ten
        ("recall@10", 3, 1 / 8),  # seven would; eight are looked at
        ("recall@10", 10, 0.0),
        ("mrr@10", 0, 1 - 1 / 2),
        ("mrr@10", 1, 1 / 2 - 1 / 3),
        ("ndcg@10", 0, 1 - 1 / np.log2(3)),
    ],
)
def test_what_a_query_can_lose(metric, better, stake):
    assert stakes_of(metric, better) == pytest.approx([stake])
    assert stakes_of(metric, better, {metric: 3.0}) == pytest.approx([3 * stake])
    assert stakes_of(metric, better, {"precision@1": 1.0}) == [0.0]
