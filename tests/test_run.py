"""Runs that somebody else made: parity with trec_eval (pytrec_eval), ties, lists that lack documents, small cases."""

import math
import random

import numpy as np
import pytest
import pytrec_eval

from fullrank import GoldenSet, Result, compare, evaluate_embeddings, evaluate_run
from fullrank._errors import DataError, SettingError

TREC = {
    **{f"recall@{k}": f"recall_{k}" for k in (1, 3, 10, 50)},
    **{f"precision@{k}": f"P_{k}" for k in (1, 3, 10, 50)},
    **{f"map@{k}": f"map_cut_{k}" for k in (1, 3, 10, 50)},
    **{f"ndcg@{k}": f"ndcg_cut_{k}" for k in (1, 3, 10, 50)},
    **{f"hit@{k}": f"success_{k}" for k in (1, 3, 10, 50)},
    "mrr": "recip_rank",
    "map": "map",
    "ndcg": "ndcg",
}
IDS = [f"d{i}" for i in range(30)] + ["é", "e", "ß", "日本", "日", "😀", "zz", "Z", "10", "9", "\u00ff", "\ue000", "𐀀"]


def judgements(rng, n_queries=40, grades=(-1, 0, 0, 1, 1, 2, 3)):
    """One query at least has no relevant document, some have one that no run lists."""
    return {"q": {IDS[0]: 0, IDS[1]: -1}} | {
        f"q{i}": {d: rng.choice(grades) for d in rng.sample(IDS, rng.randint(1, 12))} | {f"missing{i % 3}": i % 3}
        for i in range(n_queries)
    }


def tied_run(rng, qrels):
    """Few distinct scores, 0.0 and -0.0, and scores that are equal in float32 only."""
    run = {}
    for qid in qrels:
        base = rng.choice([1.0, -3.0, 0.1, 1e6])
        values = [0.0, -0.0, base, base * (1 + 1e-9), base * (1 - 1e-9), base * 1.5, base / 3, base / 3 * (1 + 1e-10)]
        run[qid] = {d: rng.choice(values) for d in rng.sample(IDS, rng.randint(1, len(IDS)))}
    return run


def strict_run(rng, qrels):
    """No two documents of a query score alike, not even in float32."""
    run = {}
    for qid in qrels:
        docs = rng.sample(IDS, rng.randint(1, len(IDS)))
        places = rng.sample(range(1000), len(docs))
        run[qid] = {d: place / 7 - 50 for d, place in zip(docs, places, strict=True)}
    return run


def assert_equals_trec_eval(result, run, qrels, *, level=1):
    measures = {"recall", "P", "map_cut", "ndcg_cut", "success"}
    cuts = ".1,3,10,50"
    names = {m + cuts for m in measures} | {"recip_rank", "map", "ndcg"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, names, relevance_level=level).evaluate(run)
    assert result.query_ids
    for name, trec_name in TREC.items():
        ours = dict(zip(result.query_ids, result.per_query[name], strict=True))
        expected = {qid: theirs[qid][trec_name] for qid in result.query_ids}
        assert ours == pytest.approx(expected, abs=1e-9), name
        assert result.metrics[name] == pytest.approx(np.mean(list(expected.values())), abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_trec_rule_equals_trec_eval(seed):
    rng = random.Random(seed)
    qrels = judgements(rng)
    run = tied_run(rng, qrels)
    result = evaluate_run(run, qrels, metrics=list(TREC), ties="trec")
    assert result.counts["n_tied"] > 20
    assert result.counts["n_unanswerable"] > 0
    assert_equals_trec_eval(result, run, qrels)


@pytest.mark.parametrize("level", [2, 3])
def test_the_trec_rule_equals_trec_eval_at_other_relevance_levels(level):
    rng = random.Random(level)
    qrels = judgements(rng)
    run = tied_run(rng, qrels)
    result = evaluate_run(run, qrels, metrics=list(TREC), ties="trec", relevant_from=level)
    assert 0 < result.counts["n_scored"] < len(qrels)
    assert_equals_trec_eval(result, run, qrels, level=level)


@pytest.mark.parametrize("ties", ["expected", "worst", "trec"])
def test_without_ties_every_rule_equals_trec_eval(ties):
    rng = random.Random(99)
    qrels = judgements(rng)
    run = strict_run(rng, qrels)
    result = evaluate_run(run, qrels, metrics=list(TREC), ties=ties)
    assert result.counts["n_tied"] == 0
    assert_equals_trec_eval(result, run, qrels)


def test_float32_collisions_tie_under_the_trec_rule_only():
    run = {"q": {"a": 0.1, "b": 0.1 + 1e-10}}
    for relevant, expected in (("a", {"expected": 0.5, "worst": 0.5, "trec": 0.5}), ("b", dict.fromkeys(TRIO, 1.0))):
        for ties, value in expected.items():
            assert evaluate_run(run, {"q": {relevant: 1}}, metrics=["mrr"], ties=ties)["mrr"] == value
    run = {"q": {"b": 0.1, "a": 0.1 + 1e-10}}  # in float32 b wins by its id
    assert [evaluate_run(run, {"q": {"a": 1}}, metrics=["mrr"], ties=t)["mrr"] for t in TRIO] == [1.0, 1.0, 0.5]


TRIO = ("expected", "worst", "trec")


def test_expected_is_the_mean_over_all_orders_and_worst_the_least_of_them():
    rng = random.Random(5)
    qrels = judgements(rng, n_queries=6)
    run = tied_run(rng, qrels)
    names = ["recall@3", "hit@3", "precision@3", "mrr", "mrr@3", "ndcg@3", "map@10", "ndcg_exp@10", "recall_cap@3"]
    expected, worst = (evaluate_run(run, qrels, metrics=names, ties=t) for t in ("expected", "worst"))
    totals = {name: np.zeros(len(expected.query_ids)) for name in names}
    n = 4000
    for _ in range(n):
        broken = {}
        for qid, docs in run.items():
            order = sorted(docs, key=lambda d: (-docs[d], rng.random()))
            broken[qid] = {d: -float(i) for i, d in enumerate(order)}
        one = evaluate_run(broken, qrels, metrics=names)
        for name in names:
            totals[name] += one.per_query[name]
            assert (worst.per_query[name] <= one.per_query[name] + 1e-12).all(), name
    for name in names:  # the standard error of a mean of n values within [0, 1] is at most 0.5 / sqrt(n) = 0.008
        assert totals[name] / n == pytest.approx(expected.per_query[name], abs=0.035), name


# ---------------------------------------------------------------- lists that lack something


def test_a_judged_document_that_is_not_listed_is_never_retrieved():
    qrels = {"q": {"a": 1, "zz": 1}}
    for ties in TRIO:
        result = evaluate_run({"q": {"a": 1.0, "b": 1.0}}, qrels, metrics=["recall@100", "map", "ndcg"], ties=ties)
        assert result["recall@100"] == 0.5
        only = evaluate_run({"q": {"b": -1e300}}, qrels, metrics=["recall@100", "mrr", "map", "ndcg"], ties=ties)
        assert set(only.metrics.values()) == {0.0}


@pytest.mark.parametrize("ties", TRIO)
def test_queries_without_results_count_0_and_unjudged_ones_do_not_count(ties):
    qrels = {"q1": {"a": 1}, "q2": {"a": 1}, "q3": {"a": 1}, "q4": {"a": 0}}
    run = {"q1": {"a": 1.0}, "q2": {}, "other": {"a": 1.0}}
    result = evaluate_run(run, qrels, metrics=["recall@1", "mrr", "ndcg@10", "map"], ties=ties)
    assert result.query_ids == ("q1", "q2", "q3")
    assert result.metrics == pytest.approx(dict.fromkeys(result.metrics, 1 / 3))
    assert (result.counts["n_scored"], result.counts["n_unanswerable"]) == (3, 1)
    assert result.hits == {"q1": [("a", 1.0)], "q2": [], "q3": [], "q4": []}


def test_nothing_to_measure_is_an_error_that_says_so():
    for qrels in ({"q": {}}, {"q": {"a": 0}, "p": {"a": -1}}):
        with pytest.raises(DataError, match="answerable"):
            evaluate_run({"q": {"a": 1.0}}, qrels)
    with pytest.raises(DataError, match="no grade of 3 or more"):
        evaluate_run({"q": {"a": 1.0}}, {"q": {"a": 2}}, relevant_from=3)


def test_no_judgements_at_all_are_an_error_that_says_so():
    with pytest.raises(DataError, match=r"answerable|judged"):
        evaluate_run({"q": {"a": 1.0}}, {})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
@pytest.mark.parametrize("ties", TRIO)
def test_scores_that_are_no_numbers_are_an_error_that_names_query_and_document(bad, ties):
    run = {"p": {"a": 1.0}, "q": {"a": 1.0, "b": bad, "c": 0.0}}
    with pytest.raises(DataError, match=r"'q'.*'b'") as caught:
        evaluate_run(run, {"p": {"a": 1}, "q": {"a": 1}}, ties=ties)
    assert "'c'" not in str(caught.value)


def test_unknown_metrics_name_the_nearest():
    with pytest.raises(SettingError, match="recall@1"):
        evaluate_run({"q": {"a": 1.0}}, {"q": {"a": 1}}, metrics=["recal@1"])


# ---------------------------------------------------------------- order, files, use of the result


@pytest.mark.parametrize("ties", TRIO)
def test_the_order_of_dicts_changes_no_bit(ties):
    rng = random.Random(3)
    qrels = judgements(rng)
    run = tied_run(rng, qrels)
    first = evaluate_run(run, qrels, metrics=list(TREC), ties=ties)
    for seed in range(20):
        rng = random.Random(seed)
        other = evaluate_run(shuffled(run, rng), shuffled(qrels, rng), metrics=list(TREC), ties=ties)
        assert other.metrics == first.metrics
        for name in TREC:
            values = dict(zip(other.query_ids, other.per_query[name].tolist(), strict=True))
            assert values == dict(zip(first.query_ids, first.per_query[name].tolist(), strict=True)), name


def shuffled(table, rng):
    rows = [(key, shuffled(value, rng) if isinstance(value, dict) else value) for key, value in table.items()]
    rng.shuffle(rows)
    return dict(rows)


def test_files_give_the_numbers_of_the_dicts(tmp_path):
    rng = random.Random(1)
    qrels, run = judgements(rng), {}
    run = tied_run(rng, qrels)
    run_file, qrels_file = tmp_path / "run.trec", tmp_path / "qrels.txt"
    lines = [f"{q} Q0 {d} {i} {s!r} tag\n" for q, docs in run.items() for i, (d, s) in enumerate(docs.items())]
    run_file.write_text("".join(lines), encoding="utf-8")
    qrels_file.write_text(
        "".join(f"{q} 0 {d} {g}\n" for q, docs in qrels.items() for d, g in docs.items()), encoding="utf-8"
    )
    for ties in TRIO:
        from_dicts = evaluate_run(run, qrels, metrics=list(TREC), ties=ties)
        for a, b in ((run_file, qrels_file), (str(run_file), qrels), (run, str(qrels_file))):
            assert evaluate_run(a, b, metrics=list(TREC), ties=ties).metrics == from_dicts.metrics


def test_what_is_given_stays_as_it_is_and_hits_are_the_best():
    run = {"q": {"a": 0.5, "b": 0.75, "c": 0.25, "d": -1}}
    qrels = {"q": {"a": 1}}
    result = evaluate_run(run, qrels, list_length=2)
    assert result.hits == {"q": [("b", 0.75), ("a", 0.5)]}
    result.qrels["q"]["a"] = 7
    assert (run, qrels) == ({"q": {"a": 0.5, "b": 0.75, "c": 0.25, "d": -1}}, {"q": {"a": 1}})


def test_a_run_is_not_compared_with_a_full_ranking_by_an_uncut_metric():
    golden = GoldenSet({"q": "x"}, {"a": "y", "b": "z"}, {"q": {"a": 1}})
    rows = np.array([[1.0, 0.0], [0.5, 1.0]])
    full = evaluate_embeddings(rows[:1], rows, golden, metrics=["mrr"])
    run = evaluate_run({"q": {"a": 1.0}}, golden.qrels, metrics=["mrr"])
    with pytest.raises(DataError):
        compare(full, run, "mrr")


# ---------------------------------------------------------------- shared/cases.md


def ranked(*docs):
    return {"q": {d: float(-i) for i, d in enumerate(docs)}}


def test_case_3_trec_mode():
    run = {"q": {"a": 1.0, "b": 1.0, "c": 1.0}}
    for relevant, values in (("a", [1 / 3, 0.5, 0.0]), ("c", [1.0, 1.0, 1.0])):
        result = evaluate_run(run, {"q": {relevant: 1}}, metrics=["mrr", "ndcg@3", "hit@1"], ties="trec")
        assert list(result.metrics.values()) == pytest.approx(values, abs=1e-6)


CASES = {
    "11 recall, hit, capped": (
        ranked("a", "x", "y", "b"),
        {"a": 1, "b": 1, "c": 1},
        1,
        {
            "recall@1": 1 / 3,
            "recall@3": 1 / 3,
            "recall@4": 2 / 3,
            "hit@1": 1,
            "recall_cap@1": 1,
            "recall_cap@3": 1 / 3,
            "mrr@1": 1,
        },
    ),
    "13 first hit only": (
        ranked("a", "b", "c"),
        {"a": 1, "c": 1},
        1,
        {"mrr@10": 1.0, "ndcg@10": 0.9197208, "map": 0.8333333},
    ),
    "14 grades": (
        ranked("b", "x", "a"),
        {"a": 2, "b": 1},
        1,
        {
            "ndcg@1": 0.5,
            "ndcg@2": 0.3800938,
            "ndcg@3": 0.7601875,
            "ndcg_exp@1": 0.3333333,
            "ndcg_exp@2": 0.2754116,
            "ndcg_exp@3": 0.6885289,
        },
    ),
    "16 ideal from all judged": (
        ranked("a", "x", "y"),
        {"a": 1, "b": 1},
        1,
        {"ndcg@10": 0.6131472, "recall@10": 0.5},
    ),
    "17 grade 0": (
        ranked("d0", "d1"),
        {"d0": 0, "d1": 1},
        1,
        {"recall@1": 0, "mrr@10": 0.5, "ndcg@10": 0.6309298},
    ),
    "19 relevance level 2": (
        ranked("a", "b"),
        {"a": 1, "b": 2},
        2,
        {"recall@1": 0, "mrr": 0.5, "ndcg@10": 0.8597187},
    ),
}


@pytest.mark.parametrize("ties", TRIO)
@pytest.mark.parametrize("case", CASES)
def test_cases(case, ties):
    run, grades, level, expected = CASES[case]
    result = evaluate_run(run, {"q": grades}, metrics=list(expected), ties=ties, relevant_from=level)
    assert result.metrics == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("run", "qrels", "message"),
    [
        ({1: {"a": 1.0}}, {"1": {"a": 1}}, "query ids of the run must be strings"),
        ({"q": {1: 1.0}}, {"q": {"1": 1}}, "document ids in the run of query 'q' must be strings"),
        ({"q": {"a": 1.0}}, {1: {"a": 1}}, "ids that are strings"),
        ({"q": {"a": 1.0}}, {"q": {"a": math.inf}}, "grade of query 'q', document 'a' must be a finite number"),
        ({"q": {"a": 1.0}}, {"q": {"a": "1"}}, "must be a finite number"),
        ({"q": {"a": "high"}}, {"q": {"a": 1}}, "the run of query 'q' must be"),
        ({"q": ["a"]}, {"q": {"a": 1}}, "the run of query 'q' must be"),
        ([("q", "a")], {"q": {"a": 1}}, "run and qrels must be dicts of dicts"),
    ],
)
def test_runs_and_judgements_of_other_types_are_one_clear_error(run, qrels, message):
    with pytest.raises(DataError, match=message):
        evaluate_run(run, qrels)


def test_runs_against_other_judgements_are_not_compared():
    run = {"q1": {"a": 1.0, "b": 0.5}, "q2": {"a": 1.0, "b": 0.5}}
    first = evaluate_run(run, {"q1": {"a": 1}, "q2": {"a": 1}})
    second = evaluate_run(run, {"q1": {"b": 1}, "q2": {"b": 1}})
    with pytest.raises(DataError, match="differ in judgements"):
        compare(first, second, "recall@1")


def test_numpy_grades_can_be_stored(tmp_path):
    result = evaluate_run({"q": {"a": 1.0}}, {"q": {"a": np.int64(2), "b": np.float32(1)}})
    assert Result.load(result.save(tmp_path / "r.json")) == result
