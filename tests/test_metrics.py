"""Three witnesses for every metric: hand-computed tables, a naive oracle over permutations, and pytrec_eval."""

import itertools
import math
import time

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.metrics import Metric, RankCounts, mrr_at_k, ndcg_at_k, ranks_from_scores, recall_at_k, score_queries

NAMES = ("recall", "hit", "recall_cap", "precision", "mrr", "map", "ndcg", "ndcg_exp")
NEED_K = ("recall", "hit", "recall_cap", "precision")
CUTS = (None, 1, 2, 3, 4, 5, 7, 8, 20, 10**6)
ALL = [Metric(name, k) for name in NAMES for k in CUTS if k or name not in NEED_K]


def counts_of(*queries, relevant_from=1):
    """A query is (tie groups, grades of judged documents that were not retrieved); None is an unjudged document."""
    rows = []
    for q, (groups, missing) in enumerate(queries):
        better = 0
        for group in groups:
            rows += [(q, better, len(group), i, grade) for i, grade in enumerate(group) if grade is not None]
            better += len(group)
        rows += [(q, math.inf, 1, 0, grade) for grade in missing]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return RankCounts(len(queries), columns[0].astype(np.int64), *columns[1:], relevant_from=relevant_from)


def values(metrics, groups, missing=(), *, ties="expected", relevant_from=1):
    """The values of one query, by metric name."""
    metrics = [Metric.parse(m) for m in metrics]
    found = score_queries(metrics, counts_of((groups, missing), relevant_from=relevant_from), ties=ties)
    return {name: float(column[0]) for name, column in found.items()}


def singles(*grades):
    return [[grade] for grade in grades]


def gain(grade, name="ndcg"):
    return 0.0 if not grade or grade <= 0 else 2.0**grade - 1 if name == "ndcg_exp" else float(grade)


def is_relevant(grade, relevant_from):
    return grade is not None and grade > 0 and grade >= relevant_from


def naive(name, k, ranking, judged, relevant_from):
    """One explicit ranking (grades in order), and the grades of all documents: the textbook, nothing clever."""
    k = k or 10**9
    total = sum(is_relevant(g, relevant_from) for g in judged)
    ranks = [r for r, g in enumerate(ranking[:k], start=1) if is_relevant(g, relevant_from)]
    if name.startswith("ndcg"):
        ideal = sorted((gain(g, name) for g in judged), reverse=True)[:k]
        dcg = sum(gain(g, name) / math.log2(r + 1) for r, g in enumerate(ranking[:k], start=1))
        return dcg / sum(g / math.log2(r + 1) for r, g in enumerate(ideal, start=1))
    if name == "mrr":
        return 1 / ranks[0] if ranks else 0.0
    if name == "map":
        return sum(i / r for i, r in enumerate(ranks, start=1)) / total
    if name == "hit":
        return float(bool(ranks))
    return len(ranks) / {"recall": total, "precision": k, "recall_cap": min(k, total)}[name]


def all_orders(groups):
    """Every order of the whole ranking, each as likely as the others."""
    orders = [sorted(set(itertools.permutations([gain(g) for g in group]))) for group in groups]
    return [list(itertools.chain(*parts)) for parts in itertools.product(*orders)]


def naive_values(groups, missing, *, ties, relevant_from):
    groups = [[max(g or 0, 0) for g in group] for group in groups]
    if ties == "expected":
        rankings = all_orders(groups)
    elif ties == "worst":
        rankings = [list(itertools.chain(*(sorted(group) for group in groups)))]
    else:
        rankings = [list(itertools.chain(*groups))]
    judged = list(itertools.chain(*groups, missing))
    return {
        str(m): math.fsum(naive(m.name, m.k, r, judged, relevant_from) for r in rankings) / len(rankings) for m in ALL
    }


GRADES = st.sampled_from([None, None, 0, -1, 1, 1, 2, 3, 0.5])


@st.composite
def rankings(draw, max_documents=7):
    """Tie groups of up to `max_documents` documents in all, a few that were not retrieved, and a relevance level."""
    grades = draw(st.lists(GRADES, min_size=1, max_size=max_documents))
    cuts = draw(st.lists(st.booleans(), min_size=len(grades), max_size=len(grades)))
    groups = [[grades[0]]]
    for grade, cut in zip(grades[1:], cuts[1:], strict=True):
        if cut:
            groups.append([grade])
        else:
            groups[-1].append(grade)
    missing = draw(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3))
    return groups, missing, draw(st.sampled_from([1, 1, 2, 0]))


# ---------------------------------------------------------------- hand-computed tables

# Run: -, 2, -, 1, - and one relevant document of grade 3 that was not retrieved. Relevant: 3.
# 1/log2(3) = .63092975, 1/log2(5) = .43067656
NO_TIES = {
    "recall@1": 0,
    "recall@2": 1 / 3,
    "recall@3": 1 / 3,
    "recall@4": 2 / 3,
    "recall@9": 2 / 3,
    "hit@1": 0,
    "hit@2": 1,
    "recall_cap@1": 0,
    "recall_cap@2": 1 / 2,  # 1 / min(2, 3)
    "recall_cap@4": 2 / 3,  # 2 / min(4, 3)
    "precision@1": 0,
    "precision@2": 1 / 2,
    "precision@4": 2 / 4,
    "precision@10": 2 / 10,  # the k asked for, though 5 documents are listed
    "mrr": 1 / 2,
    "mrr@1": 0,
    "mrr@2": 1 / 2,
    "map": 1 / 3,  # (1/2 + 2/4) / 3
    "map@2": 1 / 6,  # (1/2) / 3
    "map@3": 1 / 6,
    "ndcg": 0.3554360,  # (2 * .63092975 + .43067656) / (3 + 2 * .63092975 + 1/2) = 1.69253606 / 4.76185950
    "ndcg@2": 0.2960819,  # 1.26185950 / (3 + 1.26185950)
    "ndcg@4": 0.3554360,
    "ndcg_exp": 0.2473670,  # (3 * .63092975 + .43067656) / (7 + 3 * .63092975 + 1/2) = 2.32346581 / 9.39278925
    "ndcg_exp@2": 0.2128454,  # 1.89278925 / (7 + 1.89278925)
}

# Run: a tie group of 1, -, - then 2. E[1/rank] in the group = (1 + 1/2 + 1/3) / 3 = 11/18,
# E[discount] = (1 + .63092975 + .5) / 3 = .71030992
TIE_ON_TOP = {
    "recall@1": 1 / 6,  # (1/3) / 2
    "recall@2": 1 / 3,
    "recall@3": 1 / 2,
    "recall@4": 1,
    "hit@1": 1 / 3,
    "hit@2": 2 / 3,
    "hit@3": 1,
    "recall_cap@1": 1 / 3,
    "recall_cap@2": 1 / 3,  # (2/3) / 2
    "precision@1": 1 / 3,
    "precision@2": 1 / 3,
    "precision@4": 1 / 2,
    "mrr": 11 / 18,
    "mrr@2": 1 / 2,  # (1 + 1/2) / 3
    "map": 5 / 9,  # (11/18 + 2/4) / 2
    "map@2": 1 / 4,  # (1/2) / 2
    "ndcg": 0.5973793,  # (.71030992 + 2 * .43067656) / (2 + .63092975) = 1.57166304 / 2.63092975
    "ndcg@2": 0.2066354,  # (1 + .63092975) / 3 = .54364325, / 2.63092975
    "ndcg_exp": 0.5514675,  # (.71030992 + 3 * .43067656) / (3 + .63092975) = 2.00233960 / 3.63092975
    "ndcg_exp@2": 0.1497256,  # .54364325 / 3.63092975
}

# Run: one tie group of 2, 1, -. Orders by the place of "-": first 1/3, second 1/3, last 1/3.
TIED_ANSWERS = {
    "recall@1": 1 / 3,
    "recall@2": 2 / 3,
    "hit@1": 2 / 3,
    "hit@2": 1,  # one of the first two is always relevant
    "recall_cap@1": 2 / 3,
    "precision@2": 2 / 3,
    "precision@10": 2 / 10,
    "mrr": 5 / 6,  # (1/2 + 1 + 1) / 3
    "mrr@1": 2 / 3,
    "map": 29 / 36,  # ((1/2 + 2/3)/2 + (1 + 2/3)/2 + (1 + 1)/2) / 3 = (7/12 + 10/12 + 12/12) / 3
    "map@1": 1 / 3,  # (2/3) / 2
    "map@2": 7 / 12,  # ((1/2)/2 + 1/2 + 1) / 3 = (1/4 + 2/4 + 4/4) / 3
    "ndcg": 0.8099531,  # .71030992 * 3 / 2.63092975
    "ndcg@1": 0.5,  # (2 + 1 + 0) / 3 / 2
    "ndcg_exp": 0.7825102,  # .71030992 * (3 + 1) / 3.63092975
}

# The same group, "worst": -, 1, 2.
TIED_ANSWERS_WORST = {
    "recall@1": 0,
    "recall@2": 1 / 2,
    "hit@2": 1,
    "mrr": 1 / 2,
    "map": 7 / 12,  # (1/2 + 2/3) / 2
    "ndcg": 0.6199063,  # (.63092975 + 2 * .5) / 2.63092975
    "ndcg@2": 0.2398125,  # .63092975 / 2.63092975
    "ndcg_exp": 0.5868827,  # (.63092975 + 3 * .5) / 3.63092975
}


@pytest.mark.parametrize(
    ("table", "groups", "missing", "ties"),
    [
        (NO_TIES, singles(0, 2, 0, 1, 0), [3], "expected"),
        (NO_TIES, singles(None, 2, None, 1, -1), [3], "worst"),
        (NO_TIES, singles(0, 2, None, 1), [3], "trec"),
        (TIE_ON_TOP, [[1, None, None], [2]], [], "expected"),
        (TIE_ON_TOP, [[0, 1, -2], [2]], [0], "expected"),
        (TIED_ANSWERS, [[2, 1, None]], [], "expected"),
        (TIED_ANSWERS_WORST, [[2, 1, None]], [], "worst"),
        (TIED_ANSWERS_WORST, [[None, 1, 2]], [], "trec"),
    ],
)
def test_hand_computed(table, groups, missing, ties):
    assert values(table, groups, missing, ties=ties) == pytest.approx(table, abs=1e-6)


def test_worst_is_one_order_for_all_metrics():
    # -, 1, 2 and then 3 alone: the answers rise although mrr alone would not care
    found = values(["ndcg", "map", "recall@2"], [[2, None, 1], [3]], ties="worst")
    dcg = 1 / math.log2(3) + 2 / 2 + 3 / math.log2(5)
    assert found["ndcg"] == pytest.approx(dcg / (3 + 2 / math.log2(3) + 1 / 2), abs=1e-12)
    assert found["map"] == pytest.approx((1 / 2 + 2 / 3 + 3 / 4) / 3, abs=1e-12)
    assert found["recall@2"] == pytest.approx(1 / 3, abs=1e-12)


def test_exponential_gain_of_a_fraction_and_the_linear_one():
    # grades 0.5 at rank 1 and 1 at rank 2; 0.5 is below the relevance level
    found = values(["ndcg", "ndcg_exp", "recall@2", "recall@1"], singles(0.5, 1))
    low = 2**0.5 - 1
    assert found["ndcg"] == pytest.approx((0.5 + 0.63092975) / (1 + 0.5 * 0.63092975), abs=1e-6)
    assert found["ndcg_exp"] == pytest.approx((low + 0.63092975) / (1 + low * 0.63092975), abs=1e-6)
    assert (found["recall@1"], found["recall@2"]) == (0, 1)


# ---------------------------------------------------------------- cases.md


@pytest.mark.parametrize("place", range(4))
def test_case_1_collapse(place):
    group = [None] * 4
    group[place] = 1
    metrics = ["recall@1", "mrr@4", "ndcg@4"]
    assert list(values(metrics, [group]).values()) == pytest.approx([0.25, 0.5208333, 0.6404016], abs=1e-6)
    assert list(values(metrics, [group], ties="worst").values()) == pytest.approx([0, 0.25, 0.4306766], abs=1e-6)


def test_case_3_trec_order():
    metrics = ["mrr", "ndcg@3", "hit@1"]
    assert list(values(metrics, [[None, None, 1]], ties="trec").values()) == pytest.approx([1 / 3, 0.5, 0])
    assert list(values(metrics, [[1, None, None]], ties="trec").values()) == pytest.approx([1, 1, 1])


def test_case_11_recall_hit_capped():
    metrics = ["recall@1", "recall@3", "recall@4", "hit@1", "recall_cap@1", "recall_cap@3", "mrr@1"]
    found = values(metrics, singles(1, None, None, 1), [1])
    assert list(found.values()) == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1, 1, 1 / 3, 1], abs=1e-6)


def test_case_13_first_hit_only():
    found = values(["mrr@10", "ndcg@10", "map"], singles(1, None, 1))
    assert list(found.values()) == pytest.approx([1, 0.9197208, 0.8333333], abs=1e-6)


def test_case_14_grades():
    found = values([f"{n}@{k}" for n in ("ndcg", "ndcg_exp") for k in (1, 2, 3)], singles(1, None, 2))
    expected = [0.5, 0.3800938, 0.7601875, 0.3333333, 0.2754116, 0.6885289]
    assert list(found.values()) == pytest.approx(expected, abs=1e-6)


def test_case_16_ideal_from_all_judged():
    found = values(["ndcg@10", "recall@10"], singles(1, None, None), [1])
    assert list(found.values()) == pytest.approx([0.6131472, 0.5], abs=1e-6)


def test_case_17_grade_0():
    found = values(["recall@1", "mrr@10", "ndcg@10"], singles(0, 1))
    assert list(found.values()) == pytest.approx([0, 0.5, 0.6309298], abs=1e-6)


def test_case_19_relevance_level():
    found = values(["recall@1", "mrr", "ndcg@10"], singles(1, 2), relevant_from=2)
    assert list(found.values()) == pytest.approx([0, 0.5, 0.8597187], abs=1e-6)


@pytest.mark.parametrize("ties", ["expected", "worst", "trec"])
def test_case_21_unanswerable_is_nan_and_never_answers(ties):
    # q0 perfect; q1 no judgement; q2 only grade 0; q3 not retrieved at all: 0, not NaN
    counts = counts_of((singles(1), []), (singles(None), []), (singles(0), [0]), ([], [1, 2]))
    for column in score_queries([m for m in ALL if m.name != "precision"], counts, ties=ties).values():
        assert column.dtype == np.float64
        assert column.shape == (4,)
        assert column[0] == 1
        assert np.isnan(column[1:3]).all()
        assert column[3] == 0
    assert counts.n_relevant().tolist() == [1, 0, 0, 2]
    below = counts_of((singles(1, 1), [1]), relevant_from=2)
    assert all(np.isnan(column).all() for column in score_queries(ALL, below, ties=ties).values())
    assert below.n_relevant().tolist() == [0]


def test_which_grades_are_relevant():
    grades = np.array([-1.0, 0, 0.5, 1, 2])
    counts = [np.zeros(5, dtype=np.int64), np.arange(5.0), np.ones(5), np.zeros(5), grades]
    assert RankCounts(1, *counts).n_relevant().tolist() == [2]
    for level, relevant in ((-5, 3), (0, 3), (0.5, 3), (0.6, 2), (1, 2), (1.5, 1), (2, 1), (3, 0)):
        assert RankCounts(1, *counts, relevant_from=level).n_relevant().tolist() == [relevant]
    with pytest.raises(AttributeError):
        RankCounts(1, *counts).relevant_from = 2


@pytest.mark.parametrize(
    "groups", [[[3, 3, 3]], [[2, 2, 2]], [[3, 3], [2, 1, 1]], [[3, 3, 3, 2, 1], [1, 1, 1]], [[3] * 5]]
)
def test_rounding_lifts_no_value_over_1(groups):
    # without a clamp: 1.0000000000000002
    assert max(values(ALL, [*groups, [None] * 3]).values()) <= 1


def test_no_counts_at_all():
    none = counts_of(([], []), ([], []))
    assert all(np.isnan(column).all() for column in score_queries(ALL, none).values())
    assert score_queries([], none) == {}


# ---------------------------------------------------------------- naive oracle


@pytest.mark.parametrize("ties", ["expected", "worst", "trec"])
@settings(deadline=None, max_examples=120)
@given(case=rankings())
def test_equals_the_naive_oracle(ties, case):
    groups, missing, relevant_from = case
    found = values(ALL, groups, missing, ties=ties, relevant_from=relevant_from)
    if not any(is_relevant(g, relevant_from) for g in itertools.chain(*groups, missing)):
        assert all(math.isnan(v) for v in found.values())
        return
    expected = naive_values(groups, missing, ties=ties, relevant_from=relevant_from)
    assert found == pytest.approx(expected, abs=1e-9)
    assert all(0 <= v <= 1 for v in found.values())


@pytest.mark.parametrize("group", [[1] * 7, [1, 1, 2, 2, 3, 3, None], [3, None, None, None, None, None, 1]])
def test_large_groups_by_all_permutations(group):
    groups = [[None, 1], group, [2]]
    found = values(ALL, groups, [1])
    assert found == pytest.approx(naive_values(groups, [1], ties="expected", relevant_from=1), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(cases=st.lists(rankings(max_documents=5), min_size=1, max_size=6), level=st.sampled_from([1, 2]))
def test_queries_do_not_see_one_another(cases, level):
    together = score_queries(ALL, counts_of(*(c[:2] for c in cases), relevant_from=level))
    for i, (groups, missing, _) in enumerate(cases):
        alone = values(ALL, groups, missing, relevant_from=level)
        np.testing.assert_array_equal([together[str(m)][i] for m in ALL], list(alone.values()))


# ---------------------------------------------------------------- pytrec_eval

TREC_NAMES = {"recall": "recall", "precision": "P", "map": "map_cut", "ndcg": "ndcg_cut", "hit": "success"}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("n_scores", [1, 3, 1000])
def test_trec_rule_equals_pytrec_eval(n_scores, level):
    rng = np.random.default_rng([n_scores, level])
    run, qrels, rows = {}, {}, []
    for q in range(60):
        docs = [f"d{i}" for i in rng.permutation(130)[: rng.integers(1, 40)]] + ["é", "z", "Z1"]
        scores = rng.integers(0, n_scores, len(docs)) / 7 - 20
        judged = {d: int(rng.integers(-1, 4)) for d in docs if rng.random() < 0.3}
        judged |= {f"unretrieved{i}": int(rng.integers(0, 4)) for i in range(rng.integers(0, 3))}
        judged[docs[0]] = level
        run[f"q{q}"] = dict(zip(docs, scores.tolist(), strict=True))
        qrels[f"q{q}"] = judged
        for doc, grade in judged.items():
            if doc not in docs:
                rows.append((q, math.inf, 1, 0, grade))
                continue
            mine = run[f"q{q}"][doc]
            tied = [d for d in docs if run[f"q{q}"][d] == mine]
            ahead = sum(d.encode() > doc.encode() for d in tied)
            rows.append((q, sum(scores > mine), len(tied), ahead, grade))
    columns = np.array(rows, dtype=np.float64).T
    counts = RankCounts(60, columns[0].astype(np.int64), *columns[1:], relevant_from=level)
    cuts = (1, 2, 3, 5, 10, 50)
    metrics = [Metric(name, k) for name in TREC_NAMES for k in cuts] + [Metric(n) for n in ("mrr", "map", "ndcg")]
    found = score_queries(metrics, counts, ties="trec")
    asked = {f"{name}.{','.join(map(str, cuts))}" for name in TREC_NAMES.values()} | {"recip_rank", "map", "ndcg"}
    oracle = pytrec_eval.RelevanceEvaluator(qrels, asked, relevance_level=level).evaluate(run)
    for m in metrics:
        trec = "recip_rank" if m.name == "mrr" else m.name if m.k is None else f"{TREC_NAMES[m.name]}_{m.k}"
        expected = [oracle[f"q{q}"][trec] for q in range(60)]
        np.testing.assert_allclose(found[str(m)], expected, atol=1e-9, rtol=0, err_msg=str(m))


# ---------------------------------------------------------------- properties


def shuffled(counts, order):
    columns = (counts.query, counts.better, counts.tied, counts.ahead, counts.grade)
    return RankCounts(counts.n_queries, *(c[order] for c in columns), relevant_from=counts.relevant_from)


@pytest.mark.parametrize("ties", ["expected", "worst", "trec"])
@settings(deadline=None, max_examples=60)
@given(cases=st.lists(rankings(max_documents=9), min_size=1, max_size=4), data=st.data())
def test_shuffling_changes_no_bit(ties, cases, data):
    counts = counts_of(*(c[:2] for c in cases), relevant_from=cases[0][2])
    before = score_queries(ALL, counts, ties=ties)
    order = np.array(data.draw(st.permutations(range(len(counts.query)))), dtype=np.int64)
    after = score_queries(ALL, shuffled(counts, order), ties=ties)
    assert {n: v.tobytes() for n, v in before.items()} == {n: v.tobytes() for n, v in after.items()}


def test_shuffling_many_changes_no_bit():
    rng = np.random.default_rng(0)
    m, draw = 4000, rng.integers
    better = rng.choice([0, 1, 5, 50, math.inf], m)
    counts = RankCounts(30, draw(0, 30, m), better, np.full(m, 300.0), np.zeros(m), draw(-1, 4, m) / 1.0)
    expected = {n: v.tobytes() for n, v in score_queries(ALL, counts).items()}
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(m)
        assert {n: v.tobytes() for n, v in score_queries(ALL, shuffled(counts, order)).items()} == expected


@settings(deadline=None, max_examples=60)
@given(case=rankings(), level=st.sampled_from([1, 2]))
def test_ties_rules_agree_where_nothing_ties(case, level):
    groups, missing = [[g] for g in itertools.chain(*case[0])], case[1]
    expected, worst, trec = (
        values(ALL, groups, missing, ties=t, relevant_from=level) for t in ("expected", "worst", "trec")
    )
    assert trec == pytest.approx(expected, abs=1e-15, nan_ok=True)
    assert worst == pytest.approx(expected, abs=1e-15, nan_ok=True)


@pytest.mark.parametrize("ties", ["expected", "worst", "trec"])
@settings(deadline=None, max_examples=60)
@given(case=rankings(), grade=st.sampled_from([None, 0, -3]))
def test_an_irrelevant_document_at_the_bottom_changes_nothing(ties, case, grade):
    groups, missing, level = case
    before = values(ALL, groups, missing, ties=ties, relevant_from=level)
    after = values(ALL, [*groups, [grade]], missing, ties=ties, relevant_from=level)
    unlisted = values(ALL, groups, [*missing, 0], ties=ties, relevant_from=level)
    np.testing.assert_array_equal(list(after.values()), list(before.values()))
    np.testing.assert_array_equal(list(unlisted.values()), list(before.values()))


@pytest.mark.parametrize("ties", ["expected", "worst", "trec"])
@settings(deadline=None, max_examples=60)
@given(case=rankings(), tied=st.integers(1, 9))
def test_unretrieved_stays_unretrieved_whatever_its_tie_group(ties, case, tied):
    groups, missing, level = case
    counts = counts_of((groups, missing), relevant_from=level)
    gone = np.isinf(counts.better)
    other = RankCounts(
        1,
        counts.query,
        counts.better,
        np.where(gone, tied, counts.tied),
        np.where(gone, tied - 1, counts.ahead),
        counts.grade,
        level,
    )
    after = score_queries(ALL, other, ties=ties)
    for name, column in score_queries(ALL, counts, ties=ties).items():
        np.testing.assert_array_equal(after[name], column)


@pytest.mark.parametrize("ties", ["expected", "worst", "trec"])
@settings(deadline=None, max_examples=150)
@given(case=rankings(), data=st.data())
def test_more_documents_never_raise_a_value(ties, case, data):
    # the anytime bound: any number of irrelevant documents, above any group or into it
    groups, missing, level = case
    few = st.sampled_from([0, 0, 1, 2, 5])
    grown = []
    for group in groups:
        grown += [[None]] * data.draw(few)
        joining = [None] * data.draw(few)
        grown.append(data.draw(st.permutations([*group, *joining])) if ties != "trec" else [*joining, *group])
    before = values(ALL, groups, missing, ties=ties, relevant_from=level)
    after = values(ALL, grown, missing, ties=ties, relevant_from=level)
    assert [n for n in before if after[n] > before[n] + 1e-12] == []


def test_mutates_nothing():
    counts = counts_of(([[2, None, 1], [1], [3]], [1]))
    columns = (counts.query, counts.better, counts.tied, counts.ahead, counts.grade)
    before = [c.copy() for c in columns]
    for column in columns:
        column.setflags(write=False)
    for ties in ("expected", "worst", "trec"):
        score_queries(ALL, counts, ties=ties)
    for mine, old in zip(columns, before, strict=True):
        np.testing.assert_array_equal(mine, old)


@pytest.mark.parametrize("ties", ["worst", "trec"])
def test_placed_resolves_ties_and_drops_what_never_counts(ties):
    counts = counts_of(([[0, None, 1, 2], [-1], [3]], [0, 1]))
    placed = counts.placed(ties)
    assert sorted(zip(placed.better.tolist(), placed.grade.tolist(), strict=True)) == [
        (2, 1),
        (3, 2),
        (5, 3),
        (math.inf, 1),
    ]
    assert placed.tied.tolist() == [1] * 4


# ---------------------------------------------------------------- large tie groups


def harmonic(n):
    return math.fsum(1 / np.arange(1, n + 1))


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_large_tie_group_with_one_answer(size):
    better, k = 10, 1000
    counts = RankCounts(1, np.array([0]), *(np.array([float(v)]) for v in (better, size, 0, 1)))
    metrics = [
        Metric.parse(m) for m in ("recall@1000", "mrr", "mrr@1000", "map", "ndcg", "ndcg@1000", "precision@1000")
    ]
    start = time.perf_counter()
    found = {n: float(v[0]) for n, v in score_queries(metrics, counts).items()}
    assert time.perf_counter() - start < 5
    discounts = 1 / np.log2(np.arange(better + 1, better + size + 1) + 1)
    inside = k - better
    assert found == pytest.approx(
        {
            "recall@1000": inside / size,
            "mrr": (harmonic(better + size) - harmonic(better)) / size,
            "mrr@1000": (harmonic(k) - harmonic(better)) / size,
            "map": (harmonic(better + size) - harmonic(better)) / size,
            "ndcg": math.fsum(discounts) / size,
            "ndcg@1000": math.fsum(discounts[:inside]) / size,
            "precision@1000": inside / size / k,
        },
        rel=1e-9,
        abs=1e-12,
    )


@pytest.mark.parametrize(("size", "relevant"), [(100_000, 2), (100_000, 500), (1_000_000, 3)])
def test_a_large_tie_group_with_many_answers(size, relevant):
    t, r, k = size, relevant, 100
    counts = RankCounts(1, np.zeros(r, dtype=np.int64), np.zeros(r), np.full(r, float(t)), np.zeros(r), np.ones(r))
    metrics = [Metric.parse(m) for m in ("recall@100", "hit@100", "mrr", "map")]
    start = time.perf_counter()
    found = {n: float(v[0]) for n, v in score_queries(metrics, counts).items()}
    assert time.perf_counter() - start < 5
    # P(first answer after rank i) = product of (t - r - j) / (t - j) for j < i
    j = np.arange(t - r + 1)
    beyond = np.concatenate([[1.0], np.cumprod((t - r - j) / (t - j))])
    mrr = math.fsum((beyond[:-1] - beyond[1:]) / (j + 1))
    assert found == pytest.approx(
        {
            "recall@100": k / t,
            "hit@100": 1 - beyond[k],
            "mrr": mrr,
            # an answer at rank i has (r - 1)(i - 1)/(t - 1) others ahead of it: sum of (1 + that) / i, over t
            "map": (harmonic(t) + (r - 1) / (t - 1) * (t - harmonic(t))) / t,
        },
        rel=1e-9,
    )


def test_many_queries_in_one_collapsed_group_are_fast():
    n, t = 5000, 100_000.0
    counts = RankCounts(n, np.arange(n), np.zeros(n), np.full(n, t), np.zeros(n), np.ones(n))
    start = time.perf_counter()
    found = score_queries([Metric("mrr", 10), Metric("ndcg"), Metric("map")], counts)
    assert time.perf_counter() - start < 5
    np.testing.assert_allclose(found["map"], harmonic(int(t)) / t, rtol=1e-9)


# ---------------------------------------------------------------- napkin functions

RANKS = [1, 3, 1, 7, 2, 1, 15, 4, 1, 2]


@pytest.mark.parametrize(("k", "expected"), [(1, 0.4), (2, 0.6), (5, 0.8), (10, 0.9), (14, 0.9), (15, 1), (50, 1)])
def test_recall_of_ranks(k, expected):
    assert recall_at_k(RANKS, k) == pytest.approx(expected, abs=1e-12)


def test_mrr_and_ndcg_of_ranks():
    # 1/rank: 1 + .3333 + 1 + .1429 + .5 + 1 + 0 + .25 + 1 + .5 = 5.7262; the rank 15 adds .0667 without a cut
    assert mrr_at_k(RANKS, 10) == pytest.approx(0.5726, abs=1e-4)
    assert mrr_at_k(RANKS) == pytest.approx((5.726190 + 1 / 15) / 10, abs=1e-6)
    # 1/log2(rank+1): 1 + .5 + 1 + .3333 + .6309 + 1 + 0 + .4307 + 1 + .6309 = 6.5259; rank 15 adds 1/4
    assert ndcg_at_k(RANKS, 10) == pytest.approx(0.6526, abs=1e-4)
    assert ndcg_at_k(RANKS) == pytest.approx((6.525868 + 1 / 4) / 10, abs=1e-6)
    assert mrr_at_k([2, 1], 1) == 0.5
    assert ndcg_at_k([2, 1], 1) == 0.5


def test_ranks_with_one_that_was_not_retrieved():
    assert recall_at_k([2, 1, math.inf], 3) == pytest.approx(2 / 3, abs=1e-12)
    assert mrr_at_k([2, 1, math.inf]) == pytest.approx(0.5, abs=1e-12)
    assert ndcg_at_k([1, math.inf]) == 0.5
    counts = counts_of((singles(None, 1), []), (singles(1), []), (singles(None), [1]))
    found = score_queries([Metric("recall", 3), Metric("mrr")], counts)
    assert found["recall@3"].mean() == pytest.approx(2 / 3, abs=1e-12)
    assert found["mrr"].mean() == pytest.approx(0.5, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.sampled_from([1, 2, 10, 30]))
def test_napkin_functions_equal_score_queries(ranks, k):
    n = len(ranks)
    counts = RankCounts(n, np.arange(n), np.array(ranks) - 1.0, np.ones(n), np.zeros(n), np.ones(n))
    found = score_queries([Metric(name, k) for name in ("recall", "mrr", "ndcg")], counts)
    mine = [recall_at_k(ranks, k), mrr_at_k(ranks, k), ndcg_at_k(ranks, k)]
    assert mine == pytest.approx([column.mean() for column in found.values()], abs=1e-12)


def test_ranks_from_scores():
    scores = [[0.9, 0.2, 0.4], [0.1, 0.7, 0.8], [-1.0, -2.0, -3.0]]
    ranks = ranks_from_scores(scores, [0, 1, 2])
    assert ranks.tolist() == [1, 2, 3]
    assert ranks.dtype == np.int64
    tied = [[1.0, 1.0, 0.0, 1.0], [5.0, 1.0, 1.0, 0.0]]
    assert ranks_from_scores(tied, [0, 1]).tolist() == [3, 3]
    assert ranks_from_scores(tied, [0, 1], ties="worst").tolist() == [3, 3]
    assert ranks_from_scores(tied, [0, 1], ties="best").tolist() == [1, 2]
    assert ranks_from_scores(np.zeros((2, 64)), [0, 63]).tolist() == [64, 64]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_cannot_be_ranked(bad):
    with pytest.raises(ValueError, match="1 scores are NaN or infinite"):
        ranks_from_scores([[1.0, 2.0], [3.0, bad]], [0, 0])


@pytest.mark.parametrize(
    ("scores", "relevant"), [([1.0, 2.0], [0]), ([[1.0, 2.0]], [0, 1]), ([[[1.0]]], [0]), ([[1.0, 2.0]], [[0]])]
)
def test_shapes_that_do_not_fit(scores, relevant):
    with pytest.raises(ValueError, match="scores must be"):
        ranks_from_scores(scores, relevant)


@pytest.mark.parametrize("column", [2, -1])
def test_a_relevant_column_that_is_not_there(column):
    with pytest.raises(ValueError, match="relevant"):
        ranks_from_scores([[1.0, 2.0]], [column])


def test_an_unknown_tie_rule():
    with pytest.raises(ValueError, match="ties='best' is unknown; choose one of expected, worst, trec"):
        score_queries(ALL, counts_of((singles(1), [])), ties="best")
    with pytest.raises(ValueError, match="ties='expected'"):
        ranks_from_scores([[1.0, 2.0]], [0], ties="expected")


@pytest.mark.parametrize("bad", [[], [0], [0.5], [math.nan], [-1], [[1, 2]], [1, 0]])
def test_ranks_that_are_none(bad):
    for call in (lambda: recall_at_k(bad, 1), lambda: mrr_at_k(bad), lambda: ndcg_at_k(bad)):
        with pytest.raises(ValueError, match="numbers from 1"):
            call()


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "1"])
def test_cut_offs_that_are_none(k):
    for call in (recall_at_k, mrr_at_k, ndcg_at_k, lambda _, k: Metric("ndcg", k)):
        with pytest.raises(ValueError, match="must be a whole number from 1"):
            call([1], k)


# ---------------------------------------------------------------- names


def test_parsing():
    assert Metric.parse("ndcg@10") == Metric("ndcg", 10)
    assert Metric.parse("eval_recall@1") == Metric.parse("recall@1") == Metric("recall", 1)
    assert Metric.parse(Metric("mrr")) == Metric.parse("mrr") == Metric.parse("eval_mrr")
    assert len({Metric("mrr"), Metric.parse("mrr"), Metric("mrr", 1)}) == 2
    assert Metric("mrr", 1) != Metric("mrr", 2)
    assert Metric("recall", 10**18).k == 10**18
    assert all(m.greater_is_better for m in ALL)


@pytest.mark.parametrize("metric", ALL, ids=str)
def test_prints_back(metric):
    text = metric.name if metric.k is None else f"{metric.name}@{metric.k}"
    assert str(metric) == text
    assert Metric.parse(text) == Metric.parse(f"eval_{text}") == metric


def test_a_metric_is_a_value():
    with pytest.raises(AttributeError):
        Metric("mrr").k = 3


def test_metrics_sort_by_name_and_cut_off():
    texts = ["recall@1", "ndcg@10", "ndcg@2", "map@5"]
    assert [str(m) for m in sorted(map(Metric.parse, texts))] == ["map@5", "ndcg@2", "ndcg@10", "recall@1"]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("recall_at_1", "recall@1"),
        ("eval_recall_at_10", "recall@10"),
        ("Recall@1", "recall@1"),
        ("recal@5", "recall@5"),
        ("ncdg@10", "ndcg@10"),
        ("NDCG@10", "ndcg@10"),
        ("dev/recall@1", "recall@1"),
        ("mapp", "map"),
        ("P@5", "precision@5"),
    ],
)
def test_unknown_names_suggest_the_nearest(text, nearest):
    with pytest.raises(ValueError, match=f"unknown metric '{text}'; did you mean '{nearest}'") as caught:
        Metric.parse(text)
    assert ", ".join(NAMES) in str(caught.value)


@pytest.mark.parametrize("text", ["recall@+1", "recall@-1", "recall@1_0", "ndcg@1.5", "mrr@10 ", "mrr@", "recall@１"])
def test_a_cut_off_that_is_no_whole_number(text):
    with pytest.raises(ValueError, match=r"has the cut-off '.*'; it must be a whole number from 1"):
        Metric.parse(text)


@pytest.mark.parametrize("text", ["", "@10", "zzzz", "eval_", "eval_loss"])
def test_nothing_near(text):
    with pytest.raises(ValueError, match="Known: recall, hit"):
        Metric.parse(text)


@pytest.mark.parametrize("name", NEED_K)
def test_a_missing_cut_off(name):
    for call in (lambda: Metric(name), lambda: Metric.parse(name), lambda: Metric.parse(f"eval_{name}")):
        with pytest.raises(ValueError, match=f"metric '{name}' needs a cut-off, for example '{name}@10'"):
            call()


@pytest.mark.parametrize("text", ["recall@0", "mrr@0", "ndcg@00"])
def test_a_cut_off_of_0(text):
    with pytest.raises(ValueError, match="cut-off 0; it must be a whole number from 1"):
        Metric.parse(text)


@pytest.mark.parametrize("k", [10**9, 10**18, 10**30])
def test_a_huge_cut_off_is_the_whole_ranking(k):
    groups, missing = [[1, None, 2], [None], [3, 1]], [1]
    for name in ("mrr", "map", "ndcg", "ndcg_exp"):
        found = values([name, f"{name}@{k}"], groups, missing)
        assert found[f"{name}@{k}"] == pytest.approx(found[name], abs=1e-12)
    found = values([f"{name}@{k}" for name in NEED_K], groups, missing)
    assert list(found.values()) == pytest.approx([4 / 5, 1, 4 / 5, 4 / k], abs=1e-12)


@pytest.mark.parametrize("relevant", [[0, 2], [2, 0], [0, -1], [-1, 1]])
def test_a_column_outside_the_table_is_refused_also_beside_one_inside(relevant):
    with pytest.raises(ValueError, match="relevant must hold columns from 0 to 1"):
        ranks_from_scores([[0.1, 0.2], [0.3, 0.4]], relevant)
