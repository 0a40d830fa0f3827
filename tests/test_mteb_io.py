"""mteb: results in its form, golden sets as its tasks, and the same numbers as its own evaluator."""

import json
import random
import warnings

import numpy as np
import pytest

from fullrank import GoldenSet, Result, evaluate, load_golden, mteb_task, to_mteb
from fullrank._errors import DataError, SettingError
from fullrank.mteb_io import MTEB_METRICS

mteb = pytest.importorskip("mteb")

WORDS = [a + b + c for a in "bcdfghjklm" for b in "aio" for c in "lnrst"]  # those of the tiny model
# What trec_eval calls the metrics; mteb rounds them only after averaging.
TREC = {"ndcg": "ndcg_cut", "recall": "recall", "map": "map_cut", "precision": "P", "hit": "success"}


def run_mteb(model, task):
    """Returns (TaskResult, {query: {trec_eval name: value}}) of mteb's own evaluator."""
    values = {}
    task.task_specific_scores = lambda scores, *_, **__: values.update(scores) or {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mteb 2.26 calls names that sentence-transformers 6.2 has deprecated
        found = mteb.evaluate(model, [task], cache=None, show_progress_bar=False, co2_tracker=False)
    return found.task_results[0], values


def compare_with_mteb(model, golden, *, exclude_self=False):
    """Asserts that every metric of every query is that of mteb, and returns both."""
    task_result, values = run_mteb(model, mteb_task(golden, exclude_self=exclude_self))
    result = evaluate(model, golden, metrics=MTEB_METRICS, ties="trec", list_length=10, exclude_self=exclude_self)
    assert set(values) == set(result.query_ids)
    for name, per_query in result.per_query.items():
        kind, _, k = name.partition("@")
        if kind in TREC:
            theirs = np.array([values[qid][f"{TREC[kind]}_{k}"] for qid in result.query_ids])
            np.testing.assert_allclose(per_query, theirs, atol=1e-6, err_msg=name)
    (scores,) = task_result.scores["test"]
    for k in (1, 3, 5, 10, 20, 100, 1000):
        assert result.metrics[f"mrr@{k}"] == pytest.approx(scores[f"mrr_at_{k}"], abs=1e-6)
        assert result.metrics[f"ndcg@{k}"] == pytest.approx(scores[f"ndcg_at_{k}"], abs=5.1e-6)  # it rounds to 5 digits
    return result, task_result


@pytest.fixture
def graded():
    """60 documents (two of equal text), 12 queries: several answers, grades 0 to 3, one without an answer."""
    rng = random.Random(3)
    corpus = {f"d{i}": " ".join(rng.choices(WORDS, k=rng.randint(4, 20))) for i in range(60)}
    corpus["d7"] = corpus["d8"]
    ids = sorted(corpus)
    queries = {f"q{i}": corpus[ids[4 * i]].rsplit(" ", 2)[0] for i in range(12)}
    qrels = {q: {d: rng.randint(0, 3) for d in rng.sample(ids, 5)} | {ids[4 * i]: 2} for i, q in enumerate(queries)}
    qrels["q3"] = dict.fromkeys(qrels["q3"], 0)
    qrels["q4"]["d7"] = 1
    return GoldenSet(queries, corpus, qrels, name="graded")


# ------------------------------------------------------------------------------------------------ golden set as a task


def test_mteb_evaluates_a_golden_set_and_finds_our_numbers(tiny_st, tiny_golden):
    result, task_result = compare_with_mteb(tiny_st(), tiny_golden)
    assert 0.1 < result.metrics["ndcg@10"] < 1, "the data must be able to tell"
    assert task_result.task_name == "tiny"
    assert task_result.dataset_revision == tiny_golden.fingerprint()


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": True}, {"pooling": "cls"}, {"prompts": {"query": "query : ", "document": "document : "}}],
)
def test_graded_judgements_ties_and_prompts(tiny_st, graded, options):
    result, _ = compare_with_mteb(tiny_st(**options), graded)
    assert result.counts["n_unanswerable"] == 1
    assert result.counts["n_tied"] >= 1, "equal texts must tie"


def test_the_self_match_rule_of_mteb(tiny_st, tiny_golden):
    """Queries that are documents themselves, as in ArguAna: the document of the same id is no answer."""
    clashing = {q: f"d{i}" for i, q in enumerate(tiny_golden.queries)}
    assert not any(clashing[q] in tiny_golden.qrels[q] for q in clashing), "the data must allow it"
    golden = GoldenSet(
        {clashing[q]: text for q, text in tiny_golden.queries.items()},
        tiny_golden.corpus | {clashing[q]: text for q, text in tiny_golden.queries.items()},
        {clashing[q]: grades for q, grades in tiny_golden.qrels.items()},
        name="self",
    )
    with_self, _ = compare_with_mteb(tiny_st(), golden)
    without, _ = compare_with_mteb(tiny_st(), golden, exclude_self=True)
    assert without["ndcg@10"] > with_self["ndcg@10"], "the rule must make a difference"


def test_a_real_model_on_a_real_collection(minilm, shared_data):
    """A slice of Cranfield, graded: the beginnings of 100 documents, 20 queries that have an answer among them."""
    whole = load_golden(shared_data / "cranfield")
    corpus = {doc_id: text[:400] for doc_id, text in list(whole.corpus.items())[:100]}
    qrels = {q: {d: g for d, g in grades.items() if d in corpus} for q, grades in whole.qrels.items()}
    kept = [q for q, grades in qrels.items() if any(g > 0 for g in grades.values())][:20]
    golden = GoldenSet({q: whole.queries[q] for q in kept}, corpus, {q: qrels[q] for q in kept}, name="slice")
    result, _ = compare_with_mteb(minilm, golden)
    assert 0.3 < result.metrics["ndcg@10"] < 0.95


def test_a_task_can_be_unloaded_and_loaded_again(tiny_golden):
    task = mteb_task(tiny_golden, name="my set", languages=["deu-Latn"])
    task.load_data()
    task.unload_data()
    task.load_data()
    assert len(task.dataset["default"]["test"]["corpus"]) == 40
    assert task.metadata.name == "my set"
    assert task.metadata.eval_langs == ["deu-Latn"]
    assert type(task) is not type(mteb_task(tiny_golden))


def test_what_mteb_cannot_hold_is_refused():
    half = GoldenSet({"q": "a"}, {"d": "a"}, {"q": {"d": 1.5}}, name="half")
    with pytest.raises(DataError, match=r"whole grades only; golden set 'half' has .*\('q', 'd', 1.5\)"):
        mteb_task(half)
    strict = GoldenSet({"q": "a"}, {"d": "a"}, {"q": {"d": 2}}, name="strict", relevant_from=2)
    with pytest.raises(DataError, match=r"'strict' has relevant_from=2; for mteb every grade above 0 is relevant"):
        mteb_task(strict)
    with pytest.raises(DataError, match="none of the 1 queries is answerable"):
        mteb_task(GoldenSet({"q": "a"}, {"d": "a"}, {"q": {}}))
    with pytest.raises(DataError, match="golden must be a GoldenSet, got str"):
        mteb_task("scifact")


# ------------------------------------------------------------------------------------------------ the JSON


def test_the_json_is_read_by_mteb(tiny_st, tiny_golden, tmp_path):
    from mteb.results import TaskResult

    result = evaluate(tiny_st(), tiny_golden, metrics=[*MTEB_METRICS, "recall_cap@5", "ndcg"], ties="trec")
    path = tmp_path / "SciFact.json"
    path.write_text(json.dumps(to_mteb(result, task="SciFact")))
    for historic in (True, False):
        loaded = TaskResult.from_disk(path, load_historic_data=historic)
        assert loaded.get_score() == result.metrics["ndcg@10"]
    assert (loaded.task_name, loaded.hf_subsets, loaded.eval_splits) == ("SciFact", ["default"], ["test"])
    assert loaded.dataset_revision == tiny_golden.fingerprint()
    assert loaded.mteb_version == mteb.__version__
    assert loaded.evaluation_time == result.timing["total"]
    (scores,) = loaded.scores["test"]
    assert scores["hit_rate_at_3"] == result.metrics["hit@3"]
    assert scores["accuracy"] == result.metrics["recall@1"]
    assert scores["languages"] == ["eng-Latn"]
    assert not [name for name in scores if "cap" in name or name == "ndcg"]


def test_the_json_has_the_scores_that_mteb_writes_itself(tiny_st, tiny_golden):
    result, task_result = compare_with_mteb(tiny_st(), tiny_golden)
    ours, theirs = to_mteb(result), task_result.to_dict()
    assert set(ours) == set(theirs)
    (ours,), (theirs,) = ours["scores"]["test"], theirs["scores"]["test"]
    assert {name for name in theirs if not name.startswith("nauc_")} == set(ours)
    assert all(ours[name] == pytest.approx(theirs[name], abs=5.1e-6) for name in ours if "_at_" in name)


def test_what_is_no_mteb_result_is_refused(tiny_golden):
    values = np.array([1.0])
    result = Result({"recall@1": 1.0}, {"recall@1": values}, ("q",), {})
    with pytest.raises(SettingError, match="the result does not name its data"):
        to_mteb(result)
    with pytest.raises(SettingError, match="metric 'ndcg@10' was not computed; there are recall@1"):
        to_mteb(result, task="mine")
    (scores,) = to_mteb(result, task="mine", main="recall@1")["scores"]["test"]
    assert scores["main_score"] == 1.0
    bound = Result({"ndcg@10": 1.0}, {"ndcg@10": values}, ("q",), {}, bound=True)
    with pytest.raises(DataError, match="a bound is no score"):
        to_mteb(bound, task="mine")
