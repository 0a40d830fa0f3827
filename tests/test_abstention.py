"""When to answer at all: the sweep over thresholds against counting by hand and by brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank import GoldenSet, Result, evaluate_embeddings
from fullrank._errors import DataError, SettingError
from fullrank.abstention import abstention, threshold_for, threshold_text


def make_result(answerable, unanswerable, *, right=None, groups=None):
    """A result whose queries have these top scores; ``right`` says whether the top document is relevant."""
    right = [True] * len(answerable) if right is None else right
    ids = tuple(f"a{i}" for i in range(len(answerable)))
    hits = {q: [("good" if ok else "bad", s), ("x", s - 1)] for q, s, ok in zip(ids, answerable, right, strict=True)}
    hits |= {f"u{i}": [("x", s)] for i, s in enumerate(unanswerable)}
    qrels = {q: {"good": 1} for q in ids} | {f"u{i}": {} for i in range(len(unanswerable))}
    values = np.array(right, dtype=float)
    return Result(
        {"recall@1": float(values.mean())},
        {"recall@1": values},
        ids,
        {"n_scored": len(ids), "n_unanswerable": len(unanswerable)},
        hits=hits,
        qrels=qrels,
        groups=groups or {},
    )


def test_rates_as_counted_by_hand():
    # Answerable: 0.9 right, 0.7 wrong, 0.5 right. Unanswerable: 0.6, 0.3.
    found = abstention(make_result([0.9, 0.7, 0.5], [0.6, 0.3], right=[True, False, True]))
    assert found.thresholds[:-1].tolist() == [0.3, 0.5, 0.6, 0.7, 0.9]
    assert found.answer_rate.tolist() == pytest.approx([1, 1, 2 / 3, 2 / 3, 1 / 3, 0])
    assert found.correct_answer_rate.tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 0])
    assert found.false_answer_rate.tolist() == [1, 0.5, 0.5, 0, 0, 0]
    assert found.auroc == pytest.approx(5 / 6)  # of six pairs only (0.5, 0.6) is the wrong way round


def test_the_threshold_is_the_lowest_that_meets_the_target():
    found = abstention(make_result([0.9, 0.7, 0.5], [0.6, 0.3], right=[True, False, True]))
    strict = threshold_for(found, max_false_answer_rate=0.05)
    assert (strict.value, strict.false_answer_rate) == (0.7, 0.0)
    assert (strict.answer_rate, strict.correct_answer_rate) == pytest.approx((2 / 3, 1 / 3))
    assert strict.resolution == 0.5
    loose = threshold_for(found, max_false_answer_rate=0.5)
    assert (loose.value, loose.false_answer_rate, loose.answer_rate) == (0.5, 0.5, 1.0)
    assert threshold_for(found, max_false_answer_rate=1).value == 0.3


def test_where_an_unanswerable_query_stands_on_top_nothing_is_answered():
    cut = threshold_for(abstention(make_result([0.5, 0.4], [0.9, 0.1])), max_false_answer_rate=0.1)
    assert cut.value > 0.9
    assert (cut.answer_rate, cut.false_answer_rate) == (0, 0)


scores = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=12)


@settings(deadline=None, max_examples=120)
@given(scores, scores, st.integers(0, 10), st.data())
def test_against_counting_every_pair_and_every_threshold(answerable, unanswerable, tenths, data):
    right = data.draw(st.lists(st.booleans(), min_size=len(answerable), max_size=len(answerable)))
    found = abstention(make_result(answerable, unanswerable, right=right), n_resamples=5)
    pairs = [(a > u) + (a == u) / 2 for a in answerable for u in unanswerable]
    assert found.auroc == pytest.approx(sum(pairs) / len(pairs))
    for i, t in enumerate(found.thresholds):
        assert found.answer_rate[i] == pytest.approx(sum(a >= t for a in answerable) / len(answerable))
        assert found.false_answer_rate[i] == pytest.approx(sum(u >= t for u in unanswerable) / len(unanswerable))
        kept = sum(r for a, r in zip(answerable, right, strict=True) if a >= t)
        assert found.correct_answer_rate[i] == pytest.approx(kept / len(answerable))
    cut = threshold_for(found, max_false_answer_rate=tenths / 10, n_resamples=5)
    fit = [t for t in found.thresholds if sum(u >= t for u in unanswerable) / len(unanswerable) <= tenths / 10]
    assert cut.value == min(fit)


def test_auroc_is_that_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    a, u = rng.normal(1, 1, 300).round(1), rng.normal(0, 1, 80).round(1)
    labels, values = [1] * 300 + [0] * 80, np.concatenate([a, u])
    assert abstention(make_result(a, u)).auroc == pytest.approx(metrics.roc_auc_score(labels, values), abs=1e-12)


def test_only_the_order_of_the_scores_counts():
    """Cosine and dot products alike: negative, large, shifted."""
    rng = np.random.default_rng(1)
    a, u = rng.normal(1, 1, 60), rng.normal(0, 1, 30)
    plain, other = abstention(make_result(a, u)), abstention(make_result(300 * a - 5_000, 300 * u - 5_000))
    assert plain.auroc_interval == other.auroc_interval
    assert plain.answer_rate.tolist() == other.answer_rate.tolist()
    assert threshold_for(other).value == pytest.approx(300 * threshold_for(plain).value - 5_000)


def test_the_interval_covers_the_truth_and_comes_from_its_seed():
    rng = np.random.default_rng(2)
    truth, covered = 0.7602, 0  # P(N(1, 1) > N(0, 1)) = Phi(1 / sqrt 2)
    for _ in range(60):
        found = abstention(make_result(rng.normal(1, 1, 80), rng.normal(0, 1, 40)), n_resamples=300)
        covered += found.auroc_interval.low <= truth <= found.auroc_interval.high
    assert covered >= 52
    result = make_result(rng.normal(1, 1, 80), rng.normal(0, 1, 40))
    assert abstention(result, seed=3).auroc_interval == abstention(result, seed=3).auroc_interval
    assert abstention(result, seed=3).auroc_interval != abstention(result, seed=4).auroc_interval


def test_the_order_of_the_queries_changes_nothing():
    rng = np.random.default_rng(5)
    a, u = rng.normal(1, 1, 40), rng.normal(0, 1, 20)
    one, other = abstention(make_result(a, u)), abstention(make_result(a[::-1], u[::-1]))
    assert one.auroc_interval == other.auroc_interval
    assert threshold_for(one) == threshold_for(other)


# ------------------------------------------------------------------------------------------------ edges


def test_without_an_unanswerable_query_it_is_refused():
    with pytest.raises(
        DataError, match=r"all 2 queries have an answer: false answers cannot be measured\. Add queries"
    ):
        abstention(make_result([0.5, 0.4], []))


def test_without_lists_it_is_refused():
    result = make_result([0.5], [0.4])
    with pytest.raises(DataError, match="the result holds no ranked lists"):
        abstention(Result(**{**vars(result), "hits": {}}))


def test_collapsed_scores_say_nothing_and_claim_nothing():
    found = abstention(make_result([0.5] * 20, [0.5] * 10))
    assert found.auroc == 0.5
    assert (found.auroc_interval.low, found.auroc_interval.high, found.auroc_interval.method) == (0, 1, "degenerate")
    cut = threshold_for(found)
    assert cut.value > 0.5
    assert (cut.answer_rate, cut.false_answer_rate) == (0, 0)
    assert cut.interval.method == "degenerate"
    assert cut.false_answer_interval.high > 0.2  # none of ten is no proof of none


def test_one_query_of_a_side_claims_nothing():
    for found in (abstention(make_result([0.9], [0.1])), abstention(make_result([0.9, 0.8, 0.7], [0.1]))):
        assert found.auroc == 1
        assert found.auroc_interval.method == "degenerate"


def test_fully_apart_is_not_certain():
    found = abstention(make_result([0.9] * 50, [0.1] * 10))
    assert found.auroc == 1
    assert found.auroc_interval.method == "wilson"
    assert 0.6 < found.auroc_interval.low < 0.8  # the ten limit it
    assert found.auroc_interval.high == pytest.approx(1)


def test_a_query_that_retrieved_nothing_is_never_answered():
    result = make_result([0.9, 0.5], [0.4, 0.3])
    lists = {q: hits for q, hits in result.hits.items() if q not in ("a1", "u1")}
    found = abstention(Result(**{**vars(result), "hits": lists}))
    assert np.isfinite(found.thresholds).all()
    assert found.answer_rate[0] == 0.5
    assert found.false_answer_rate[0] == 0.5
    assert found.answerable.tolist() == [0.9, -math.inf]
    assert 0 <= threshold_for(found).false_answer_rate <= 0.05
    empty = {q: hits for q, hits in result.hits.items() if q.startswith("a")}
    assert threshold_for(abstention(Result(**{**vars(result), "hits": empty}))).answer_rate == 1


def test_what_ties_on_top_counts_in_shares():
    result = make_result([0.9, 0.9], [0.1])
    lists = {**result.hits, "a0": [("x", 0.9), ("good", 0.9)]}
    assert abstention(Result(**{**vars(result), "hits": lists})).correct.tolist() == [0.5, 1.0]


def test_grades_below_the_threshold_of_relevance_are_not_right():
    result = make_result([0.9], [0.1])
    changed = Result(**{**vars(result), "relevant_from": 2, "qrels": {"a0": {"good": 1}, "u0": {}}})
    assert abstention(changed).correct.tolist() == [0.0]


@pytest.mark.parametrize("rate", [-0.1, 1.5, True, float("nan")])
def test_a_rate_outside_zero_and_one_is_refused(rate):
    found = abstention(make_result([0.9], [0.1]))
    with pytest.raises(SettingError, match="must lie between 0 and 1"):
        threshold_for(found, max_false_answer_rate=rate)


# ------------------------------------------------------------------------------------------------ by type


def test_rates_by_type():
    groups = {"a0": "fact", "a1": "fact", "a2": "how-to", "u0": "fact", "u1": "no-answer"}
    found = abstention(make_result([0.9, 0.4, 0.8], [0.5, 0.3], right=[True, True, False], groups=groups))
    by_group = threshold_for(found, max_false_answer_rate=0).by_group
    assert list(by_group) == ["fact", "how-to", "no-answer"]
    fact, how_to, none = by_group.values()
    assert (fact.n_answerable, fact.n_unanswerable) == (2, 1)
    assert (fact.answer_rate, fact.correct_answer_rate, fact.false_answer_rate, fact.auroc) == (0.5, 0.5, 0.0, 0.5)
    assert (how_to.answer_rate, how_to.correct_answer_rate, how_to.false_answer_rate) == (1.0, 0.0, None)
    assert (none.answer_rate, none.false_answer_rate, none.auroc) == (None, 0.0, None)


def test_of_a_real_evaluation(tiny_st, tiny_golden):
    from fullrank import GoldenSet, evaluate

    queries = {**tiny_golden.queries, "none": "bal bal bal"}
    golden = GoldenSet(queries, tiny_golden.corpus, {**tiny_golden.qrels, "none": {}}, name="with one")
    found = abstention(evaluate(tiny_st(), golden))
    assert len(found.answerable) == 15
    assert len(found.unanswerable) == 1
    assert 0 <= found.auroc <= 1


def test_the_threshold_is_printed_with_the_digits_that_it_takes():
    found = abstention(make_result([0.91229 + i / 1e5 for i in range(9)], [0.91224 + i / 1e5 for i in range(9)]))
    cut = threshold_for(found)
    shown = float(threshold_text(found, cut))
    assert float(np.mean(found.unanswerable >= float(f"{cut.value:.4g}"))) > 0.05  # four digits would not do
    assert np.mean(found.unanswerable >= shown) == cut.false_answer_rate
    assert np.mean(found.answerable >= shown) == cut.answer_rate
    easy = abstention(make_result([0.9, 0.8], [0.1]))
    assert threshold_text(easy, threshold_for(easy)) == "0.8"


def test_a_tie_that_goes_on_behind_the_list_counts_as_a_whole():
    golden = GoldenSet(
        {f"q{i}": "x" for i in range(20)},
        {f"d{i:04d}": f"t{i}" for i in range(1000)},
        {f"q{i}": {"d0003": 1} if i < 15 else {} for i in range(20)},
        name="all alike",
    )
    result = evaluate_embeddings(np.ones((20, 4), "float32"), np.ones((1000, 4), "float32"), golden)
    assert len(result.hits["q0"]) < 1000
    assert abstention(result).correct.tolist() == pytest.approx([1 / 1000] * 15)
