"""What changed between two results, and whether a gate lets it through: the pure functions."""

import math

import numpy as np
import pytest

import fullrank
from fullrank import Result, compare, evaluate_run, report
from fullrank._errors import DataError, SettingError
from fullrank.changes import changes, changes_by_group, flips
from fullrank.gating import fell_beyond, gate
from fullrank.stats import holm
from fullrank.tables import changes_table

QRELS = {f"q{i}": {"a": 1} for i in range(40)}


def make_result(values, *, metric="ndcg@10", **fields):
    """A result with these values of the queries q0, q1, ..."""
    values = np.asarray(values, dtype=np.float64)
    metrics = {metric: values} if isinstance(metric, str) else dict(zip(metric, values, strict=True))
    n = len(next(iter(metrics.values())))
    return Result(
        {name: math.fsum(v) / n for name, v in metrics.items()},
        metrics,
        tuple(f"q{i}" for i in range(n)),
        {"n_scored": n, "n_documents": 100},
        **fields,
    )


def falling(share, n=100):
    """Before: all 1. After: that share of the queries at 0."""
    lost = round(share * n)
    return make_result(np.ones(n)), make_result([0.0] * lost + [1.0] * (n - lost))


# ------------------------------------------------------------------------------------------------ changes


def test_changes_are_those_of_compare_with_the_means_of_the_compared_queries():
    rng = np.random.default_rng(0)
    names = ("recall@1", "ndcg@10", "mrr@10")
    base = make_result(rng.random((3, 50)), metric=names)
    tuned = make_result(rng.random((3, 50)), metric=names)
    found = changes(base, tuned)
    assert tuple(found) == names
    assert {name: c.comparison for name, c in found.items()} == {name: compare(base, tuned, name) for name in names}
    assert found["mrr@10"].before == base.metrics["mrr@10"]
    assert found["mrr@10"].after == tuned.metrics["mrr@10"]
    assert [c.adjusted_p for c in found.values()] == holm([c.comparison.p_value for c in found.values()])


def test_only_common_metrics_are_compared_and_a_wanted_one_must_be_there():
    base = make_result([[0, 1], [0, 1]], metric=("recall@1", "ndcg@10"))
    tuned = make_result([[1, 1], [0, 1]], metric=("ndcg@10", "map@5"))
    assert list(changes(base, tuned)) == ["ndcg@10"]
    with pytest.raises(SettingError, match=r"metric 'recall@1' was not computed; there are ndcg@10, map@5"):
        changes(base, tuned, metrics=["recall@1"])
    with pytest.raises(DataError, match=r"no metric in common: one has recall@1, ndcg@10, the other mrr@10"):
        changes(base, make_result([1, 1], metric="mrr@10"))


def test_means_are_over_the_common_queries_where_the_data_differ():
    base = make_result([1, 1, 0, 0], provenance={"data": "x"})
    tuned = make_result([0, 0], provenance={"data": "y"})
    with pytest.raises(DataError, match="the two results differ in data"):
        changes(base, tuned)
    found = changes(base, tuned, allow_other_data=True)["ndcg@10"]
    assert (found.before, found.after, found.comparison.n) == (1.0, 0.0, 2)


def test_query_types_are_compared_apart():
    groups = {"q0": "how", "q1": "how", "q2": "why"}
    base = make_result([0, 0, 1, 1], groups=groups)
    tuned = make_result([1, 0, 0, 1], groups=groups)
    found = changes_by_group(base, tuned, "ndcg@10")
    assert {g: (c.before, c.after, c.comparison.n) for g, c in found.items()} == {
        "": (1.0, 1.0, 1),
        "how": (0.0, 0.5, 2),
        "why": (1.0, 0.0, 1),
    }
    assert found["how"].comparison.wins == ("q0",)
    assert found["why"].comparison.losses == ("q2",)
    assert changes_by_group(make_result([0, 1]), make_result([1, 1]), "ndcg@10") == {}


def test_p_values_of_query_types_are_corrected_over_the_types():
    groups = {f"q{i}": f"type {i % 4}" for i in range(80)}
    rng = np.random.default_rng(1)
    base, tuned = (make_result(rng.random(80), groups=groups) for _ in range(2))
    found = changes_by_group(base, tuned, "ndcg@10")
    assert [c.adjusted_p for c in found.values()] == holm([c.comparison.p_value for c in found.values()])


def test_flips_show_texts_and_both_rankings_largest_change_first():
    shared = {
        "queries": {f"q{i}": f"text {i}" for i in range(4)},
        "groups": {"q1": "how"},
        "qrels": {"q1": {"a": 1, "n": 0}},
    }
    base = make_result([0.5, 0.0, 1.0, 0.3], hits={"q1": [("b", 0.9), ("a", 0.8)]}, **shared)
    tuned = make_result([0.6, 1.0, 0.2, 0.3], hits={"q1": [("a", 0.7), ("b", 0.6)]}, **shared)
    won, lost = flips(base, tuned, "ndcg@10")
    assert [f.query_id for f in won] == ["q1", "q0"]
    assert [f.query_id for f in lost] == ["q2"]
    first = won[0]
    assert (first.query, first.group, first.before, first.after) == ("text 1", "how", 0.0, 1.0)
    assert first.expected == {"a": 1}
    assert first.retrieved_before == [("b", 0.9), ("a", 0.8)]
    assert first.retrieved_after == [("a", 0.7), ("b", 0.6)]
    assert flips(base, tuned, "ndcg@10", n=1)[0] == [first]


def test_a_bound_is_compared_with_nothing():
    whole, bound = make_result([0, 1]), make_result([1, 1], bound=True)
    with pytest.raises(DataError, match="the candidate is a bound: it saw only a part of the corpus"):
        compare(whole, bound, "ndcg@10")
    with pytest.raises(DataError, match="the baseline is a bound"):
        compare(bound, whole, "ndcg@10")


# ------------------------------------------------------------------------------------------------ the gate


def test_a_fall_beyond_the_margin_that_the_queries_carry_fails():
    found = gate(*falling(0.2))
    (check,) = found.checks
    assert not found.passed
    assert check.failed
    low, high = check.comparison.interval
    assert high < 0
    assert check.reason == (
        f"fell by 20.00 points (2.00 allowed); 95% interval [{100 * low:+.2f}, {100 * high:+.2f}] excludes no fall"
    )


def test_a_fall_within_the_margin_passes_however_sure_it_is():
    found = gate(*falling(0.2), max_drop=0.25)
    assert found.checks[0].comparison.interval.high < 0
    assert found.passed
    assert found.checks[0].reason == "fell by 20.00 points (25.00 allowed)"


def test_a_fall_of_exactly_the_margin_passes():
    assert gate(*falling(0.02), max_drop=0.02).passed
    base, tuned = (
        make_result([0.62] * 99 + [0.5]),
        make_result([0.6] * 99 + [0.48]),
    )  # the difference is not 0.02 exactly
    assert tuned["ndcg@10"] - base["ndcg@10"] != -0.02
    assert gate(base, tuned, max_drop=0.02).passed
    assert not fell_beyond(-0.02, 0.02)
    assert not fell_beyond(0.6 - 0.62, 0.02)
    assert fell_beyond(-0.020001, 0.02)


def test_a_fall_that_the_queries_cannot_carry_passes_and_says_so():
    base = make_result([1, 0] * 20)
    tuned = make_result([1, 0] * 14 + [0, 1] * 4 + [0, 0] * 2)
    found = gate(base, tuned)
    assert found.checks[0].comparison.delta < -0.02
    assert found.passed
    assert "points (2.00 allowed), but 95% interval [" in found.checks[0].reason
    assert found.checks[0].reason.endswith("does not exclude no fall")


def test_a_rise_and_no_change_pass():
    assert gate(make_result([0, 0, 1]), make_result([0, 1, 1])).checks[0].reason == "did not fall"
    assert gate(make_result([0, 0, 1]), make_result([0, 0, 1])).passed


def test_where_every_query_fell_alike_the_p_value_decides():
    """All differences equal leave no interval; that must not let a sure fall through."""
    found = gate(make_result([1.0] * 50), make_result([0.5] * 50))
    assert found.checks[0].comparison.interval.method == "degenerate"
    assert not found.passed
    assert "p = 0.0001 excludes no fall" in found.checks[0].reason
    few = gate(make_result([1.0] * 3), make_result([0.5] * 3))
    assert few.passed
    assert few.checks[0].reason.endswith("but p = 0.2500 does not exclude no fall")


def test_each_of_several_metrics_is_judged_by_itself():
    """Metrics of one ranking fall together: a correction for their number would let certain falls pass."""
    n = 60
    before, after = np.ones(n), np.ones(n)
    after[:6] = 0.0  # p = 2 / 2^6 = 0.03
    names = [f"ndcg@{k}" for k in range(1, 11)]
    alone = gate(make_result(before), make_result(after))
    assert not alone.passed
    base = make_result([before] * 10, metric=names)
    tuned = make_result([after] + [before] * 9, metric=names)
    together = gate(base, tuned)
    assert together.checks[0].comparison.interval.high < 0
    assert together.checks[0].adjusted_p > 0.05
    assert not together.passed
    assert together.checks[0].reason == alone.checks[0].reason
    assert [check.failed for check in together.checks] == [True] + [False] * 9
    assert not gate(base, tuned, metrics=["ndcg@1"]).passed


@pytest.mark.parametrize("which", ["baseline", "result"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bound": True}, "the {} is a bound: it saw only a part of the corpus"),
        ({"eligible": False}, "the {} is not eligible. Gate on an evaluation whose embeddings are all finite"),
    ],
)
def test_bounds_and_ineligible_results_are_refused(which, fields, message):
    whole, unfit = make_result([0, 1]), make_result([0, 1], **fields)
    pair = (unfit, whole) if which == "baseline" else (whole, unfit)
    with pytest.raises(DataError, match=message.format(which)):
        gate(*pair)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"provenance": {"data": "x"}}, {"provenance": {"data": "y"}}, "differ in data"),
        ({"provenance": {"ties": "trec"}}, {"provenance": {"ties": "expected"}}, "differ in ties"),
        ({"qrels": {"q0": {"a": 1}}}, {"qrels": {"q0": {"b": 1}}}, "differ in judgements"),
        ({}, {"relevant_from": 2}, "differ in relevant_from"),
        ({"provenance": {"truncated_run": True}}, {"provenance": {"truncated_run": False}}, "one result is of a run"),
    ],
)
def test_unlike_results_are_refused(one, other, message):
    with pytest.raises(DataError, match=message):
        gate(make_result([0, 1], **one), make_result([0, 1], **other))


def test_runs_can_be_gated_by_metrics_with_a_cutoff_alone():
    run = {qid: {"a": 1.0, "b": 0.5} for qid in QRELS}
    worse = {qid: {"b": 1.0, "a": 0.5} for qid in QRELS}
    base, tuned = (evaluate_run(r, QRELS, metrics=["recall@1", "map"]) for r in (run, worse))
    assert not gate(base, tuned, metrics=["recall@1"]).passed
    with pytest.raises(DataError, match="the baseline is of a run, whose lists end somewhere, so map depends on"):
        gate(base, tuned)


@pytest.mark.parametrize("max_drop", [2, 1.0, -0.1, math.nan])
def test_a_margin_that_is_none_is_refused(max_drop):
    with pytest.raises(SettingError, match=r"must be at least 0 and below 1: 0\.02 allows a fall of 2 points"):
        gate(make_result([0, 1]), make_result([0, 1]), max_drop=max_drop)


def test_gate_is_public():
    assert fullrank.gate is gate


def test_the_table_fits_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setattr(report, "PIPE_WIDTH", 80)
    found = changes(make_result([1.0] * 6 + [0.0] * 1200), make_result([0.0] * 6 + [0.0] * 1000 + [1.0] * 200))
    table = changes_table({"recall@10": next(iter(found.values()))}, title="a -> b", what="type")
    assert max(map(len, table.splitlines())) <= 80
    assert "1,206" in table
