"""Evaluation through the public doors: small cases, inputs, equal texts, no side effects, errors, real models."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from fullrank import GoldenSet, Result, anytime, evaluate, evaluate_embeddings, evaluate_run, load_golden
from fullrank._errors import DataError, EvaluationError, FullrankError, NonFiniteError, SettingError
from fullrank.encode import as_encoder
from fullrank.plan import EvaluationPlan

RULES = ("expected", "worst", "trec")
MANY = [
    "recall@1",
    "recall@5",
    "hit@3",
    "recall_cap@3",
    "precision@3",
    "mrr",
    "mrr@2",
    "map",
    "map@3",
    "ndcg",
    "ndcg@5",
]


def golden_of(n_documents, qrels, **options):
    """A golden set without interesting texts: documents d0, d1, ... unless given as ids."""
    ids = [f"d{i}" for i in range(n_documents)] if isinstance(n_documents, int) else list(n_documents)
    return GoldenSet({q: f"query {q}" for q in qrels}, {d: f"text of {d}" for d in ids}, qrels, **options)


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)


def by_query(result):
    return {
        name: dict(zip(result.query_ids, values.tolist(), strict=True)) for name, values in result.per_query.items()
    }


def graded_world(seed=0, n_queries=12, n_documents=40, d=3):
    """Small whole numbers, so that scores are exact and many tie; graded judgements, one query without any."""
    rng = np.random.default_rng(seed)
    queries = rng.integers(-2, 3, (n_queries, d)).astype(np.float32)
    documents = rng.integers(-2, 3, (n_documents, d)).astype(np.float32)
    qrels = {
        f"q{i}": {f"d{j}": int(rng.integers(-1, 4)) for j in rng.choice(n_documents, 4, replace=False)} | {"d0": 1}
        for i in range(n_queries)
    }
    qrels["q5"] = {}
    return queries, documents, golden_of(n_documents, qrels)


class Lookup:
    """A model that knows its embeddings by text, and remembers what it was asked for."""

    def __init__(self, table, **attributes):
        self.table, self.asked = table, []
        vars(self).update(attributes)

    def encode(self, texts):
        assert type(texts) is list
        self.asked.append(list(texts))
        return np.array([self.table[text] for text in texts], np.float32)


# ---------------------------------------------------------------- shared/cases.md


@pytest.mark.parametrize("relevant", ["a", "b", "c", "d"])
def test_case_1_a_collapsed_model_scores_chance(relevant):
    golden = golden_of("abcd", {"q": {relevant: 1}})
    same = rows([1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0])
    model = Lookup({text: [1.0, 0.0] for text in [*golden.query_texts, *golden.doc_texts]})
    expected = {"expected": [0.25, 0.5208333, 0.6404016], "worst": [0.0, 0.25, 0.4306766]}
    for ties, values in expected.items():
        options = {"metrics": ["recall@1", "mrr@4", "ndcg@4"], "ties": ties}
        for result in (evaluate_embeddings(same[:1], same, golden, **options), evaluate(model, golden, **options)):
            assert list(result.metrics.values()) == pytest.approx(values, abs=1e-6)
            assert result.collapsed is True
            assert result.tie_rate == 1.0
            assert "collapse" in {finding.kind for finding in result.findings}


@pytest.mark.parametrize(("n", "k"), [(9, 1), (12, 1), (25, 10), (67, 10), (67, 50), (500, 100)])
def test_a_model_that_has_not_collapsed_is_not_called_so(n, k):
    rng = np.random.default_rng(n)
    documents = rng.standard_normal((n, 64))
    golden = golden_of(n, {f"q{i}": {f"d{i}": 1} for i in range(5)})
    queries = documents[:5] + 0.1 * rng.standard_normal((5, 64))
    result = evaluate_embeddings(queries, documents, golden, metrics=["recall@1", f"recall@{k}"])
    assert result.metrics["recall@1"] == 1.0
    assert result.tie_rate == 0.0
    assert result.collapsed is False
    assert "collapse" not in {finding.kind for finding in result.findings}


def test_a_model_that_has_nearly_collapsed_is_called_so():
    # The scores differ from the sixth digit on: few tie, and still nothing is told apart.
    rng = np.random.default_rng(0)
    documents = rng.standard_normal(64) + 1e-5 * rng.standard_normal((500, 64))
    golden = golden_of(500, {f"q{i}": {f"d{i}": 1} for i in range(5)})
    result = evaluate_embeddings(documents[:5], documents, golden, similarity="dot")
    assert result.tie_rate < 0.2
    assert result.collapsed is True


@pytest.mark.parametrize("ties", RULES)
def test_case_4_order_does_not_matter(ties):
    queries, documents, golden = graded_world()
    first = evaluate_embeddings(queries, documents, golden, similarity="dot", metrics=MANY, ties=ties)
    for seed in range(20):
        rng = random.Random(seed)
        q_order, d_order = list(range(len(queries))), list(range(len(documents)))
        rng.shuffle(q_order)
        rng.shuffle(d_order)
        shuffled = GoldenSet(
            {golden.query_ids[i]: golden.query_texts[i] for i in q_order},
            {golden.doc_ids[i]: golden.doc_texts[i] for i in d_order},
            dict(
                rng.sample(
                    [(q, dict(rng.sample(sorted(g.items()), len(g)))) for q, g in golden.qrels.items()],
                    len(golden.qrels),
                )
            ),
        )
        other = evaluate_embeddings(
            queries[q_order], documents[d_order], shuffled, similarity="dot", metrics=MANY, ties=ties
        )
        assert by_query(other) == by_query(first)
        assert other.metrics == first.metrics
        assert other.provenance["data"] == first.provenance["data"]


def test_case_5_a_constant_row():
    golden = golden_of(64, {"q": {"d40": 1}})
    result = evaluate_embeddings(torch.ones(1, 1), torch.ones(64, 1), golden, similarity="dot", list_length=5)
    assert [d for d, _ in result.hits["q"]] == ["d0", "d1", "d2", "d3", "d4"]


def test_case_6_lists_do_not_depend_on_chunks(monkeypatch):
    golden = golden_of(7, {"q": {"d3": 1}})
    documents = rows([0.5], [0.9], [0.9], [0.1], [0.9], [0.5], [0.2])
    for size in range(1, 8):
        monkeypatch.setattr("fullrank.anytime.BLOCK", size)
        for k, top in ((3, "d1 d2 d4"), (5, "d1 d2 d4 d0 d5"), (7, "d1 d2 d4 d0 d5 d6 d3")):
            result = evaluate_embeddings(rows([1.0]), documents, golden, similarity="dot", list_length=k)
            assert " ".join(d for d, _ in result.hits["q"]) == top


CASE_7 = rows([1.0, 0.1], [1.0, 0.2], [math.nan, math.nan])


def test_case_7_a_relevant_document_that_is_nan():
    golden = golden_of(3, {"q": {"d2": 1}})
    options = {"metrics": ["recall@1", "mrr@10", "ndcg@10"]}
    with pytest.raises(NonFiniteError, match=r"1 of 3 document embeddings.*'d2'"):
        evaluate_embeddings(rows([1.0, 0.0]), CASE_7, golden, **options)
    for similarity in ("cosine", "dot", "euclidean"):
        result = evaluate_embeddings(
            rows([1.0, 0.0]), CASE_7, golden, **options, on_nonfinite="worst", similarity=similarity
        )
        assert list(result.metrics.values()) == pytest.approx([0.0, 0.3333333, 0.5], abs=1e-6)
        assert result.counts["n_nonfinite_documents"] == 1
        assert result.eligible is False
        assert sorted(d for d, _ in result.hits["q"]) == ["d0", "d1"]


def test_unusable_documents_tie_with_one_another_at_the_bottom():
    nan = math.nan
    documents = rows([nan, 1.0], [1.0, 0.0], [nan, nan], [-1.0, 0.0])
    result = evaluate_embeddings(
        rows([1.0, 0.0]), documents, golden_of(4, {"q": {"d0": 1}}), metrics=["mrr", "recall@3"], on_nonfinite="worst"
    )
    assert result.metrics == pytest.approx({"mrr": (1 / 3 + 1 / 4) / 2, "recall@3": 0.5})
    assert result.counts["n_nonfinite_documents"] == 2


def test_an_unjudged_document_that_is_nan_is_named_too():
    documents = torch.ones(20, 2)
    documents[13] = math.nan
    documents[17, 1] = math.inf
    golden = golden_of(20, {"q": {"d0": 1}})
    with pytest.raises(NonFiniteError, match=r"2 of 20 document embeddings.*'d13', 'd17'"):
        evaluate_embeddings(torch.ones(1, 2), documents, golden)
    model = Lookup(dict(zip(golden.doc_texts, documents.tolist(), strict=True)) | {golden.query_texts[0]: [1.0, 1.0]})
    with pytest.raises(NonFiniteError, match=r"'d13', 'd17'|'d17', 'd13'"):
        evaluate(model, golden)


@pytest.mark.parametrize(
    ("queries", "similarity"),
    [(torch.full((3, 2), math.nan), "dot"), (torch.full((3, 2), math.nan), "cosine"), (torch.zeros(3, 2), "cosine")],
)
def test_case_9_unusable_queries(queries, similarity):
    golden = golden_of(3, {"q0": {"d0": 1}, "q1": {"d1": 1}, "q2": {"d2": 1}})
    with pytest.raises(NonFiniteError, match=r"3 of 3 query embeddings.*'q0', 'q1', 'q2'"):
        evaluate_embeddings(queries, torch.eye(3)[:, :2] + 1, golden, similarity=similarity)
    for ties in RULES:
        result = evaluate_embeddings(
            queries, torch.eye(3)[:, :2] + 1, golden, similarity=similarity, on_nonfinite="worst", ties=ties
        )
        assert set(result.metrics.values()) == {0.0}
        assert result.counts["n_nonfinite_queries"] == 3
        assert result.counts["n_scored"] == 3
        assert result.eligible is False


def test_one_unusable_query_scores_0_and_leaves_the_others_alone():
    queries = rows([1.0, 0.0], [math.nan, 0.0], [0.0, 1.0])
    golden = golden_of(2, {"q0": {"d0": 1}, "q1": {"d0": 1}, "q2": {"d1": 1}})
    result = evaluate_embeddings(queries, torch.eye(2), golden, metrics=["mrr"], on_nonfinite="worst")
    assert by_query(result) == {"mrr": {"q0": 1.0, "q1": 0.0, "q2": 1.0}}
    assert result.counts["n_nonfinite_queries"] == 1


def test_case_10_bf16_embeddings_are_scored_in_fp32():
    q = torch.tensor([[1.0, 0.0625]], dtype=torch.bfloat16)
    documents = torch.tensor([[0.90234375, 0.0], [0.8984375, 0.05859375]], dtype=torch.bfloat16)
    golden = golden_of(["A", "B"], {"q": {"A": 1}})  # trec's rule puts B first where the two tie
    for ties in RULES:
        for order in ([0, 1], [1, 0]):
            golden = golden_of([["A", "B"][i] for i in order], {"q": {"A": 1}})
            result = evaluate_embeddings(q, documents[order], golden, similarity="dot", metrics=["recall@1"], ties=ties)
            assert result["recall@1"] == 1.0
    assert dict(result.hits["q"]) == {"A": 0.90234375, "B": pytest.approx(0.902099609375, abs=1e-9)}


def test_case_21_nothing_relevant():
    golden = golden_of(["a", "x"], {"q1": {"a": 1}, "q2": {}, "q3": {"x": 0}})
    result = evaluate_embeddings(torch.eye(2)[[0, 0, 0]], torch.eye(2), golden, metrics=["recall@1"])
    assert result.metrics == {"recall@1": 1.0}
    assert (result.counts["n_scored"], result.counts["n_unanswerable"]) == (1, 2)
    assert result.query_ids == ("q1",)
    assert set(result.hits) == {"q1", "q2", "q3"}  # their top scores are wanted for abstention
    none = golden_of(["a", "x"], {"q2": {}, "q3": {"x": 0}})
    with pytest.raises(DataError, match="none of the 2 queries is answerable"):
        evaluate_embeddings(torch.eye(2), torch.eye(2), none)
    model = Lookup({})
    with pytest.raises(ValueError, match="none of the 2 queries is answerable"):
        evaluate(model, none)
    assert model.asked == []


def test_case_22_a_judged_document_that_the_corpus_does_not_hold():
    parts = {"q": "x"}, {"d0": "y", "d1": "z"}, {"q": {"d0": 1, "zz": 1}}
    with pytest.raises(DataError, match="'zz'"):
        GoldenSet(*parts)
    for missing, values in (("keep", [0.5, 0.6131472]), ("drop", [1.0, 1.0])):
        for ties in RULES:
            result = evaluate_embeddings(
                rows([1.0, 0.0]),
                torch.eye(2),
                GoldenSet(*parts, missing=missing),
                metrics=["recall@1", "ndcg@10"],
                ties=ties,
            )
            assert list(result.metrics.values()) == pytest.approx(values, abs=1e-6)


def test_case_25_the_query_among_the_documents():
    golden = golden_of(["q", "a", "b", "c"], {"q": {"b": 1}})
    documents = rows([1.0, 0.0], [1.0, 0.2], [1.0, 0.5], [0.0, 1.0])
    model = Lookup(dict(zip(golden.doc_texts, documents.tolist(), strict=True)) | {"query q": [1.0, 0.0]})
    options = {"metrics": ["recall@2", "mrr@10"], "list_length": 2}
    for run in (
        lambda **o: evaluate_embeddings(documents[:1], documents, golden, **options, **o),
        lambda **o: evaluate(model, golden, **options, **o),
    ):
        off, on = run(), run(exclude_self=True)
        assert off.metrics == pytest.approx({"recall@2": 0.0, "mrr@10": 1 / 3})
        assert on.metrics == pytest.approx({"recall@2": 1.0, "mrr@10": 0.5})
        assert [d for d, _ in off.hits["q"]] == ["q", "a"]
        assert [d for d, _ in on.hits["q"]] == ["a", "b"]


def test_excluding_a_judged_document_is_refused():
    golden = golden_of(["q1", "a"], {"q1": {"q1": 1, "a": 1}})
    with pytest.raises(DataError, match="exclude_self would drop judged documents: 'q1'"):
        evaluate_embeddings(torch.ones(1, 2), torch.ones(2, 2), golden, exclude_self=True)


def test_case_27_more_asked_for_than_there_is():
    golden = golden_of(3, {"q": {"d2": 1}})
    result = evaluate_embeddings(
        rows([1.0]), rows([3.0], [2.0], [1.0]), golden, similarity="dot", metrics=["recall@10", "recall@100"]
    )
    assert result.metrics == {"recall@10": 1.0, "recall@100": 1.0}
    assert [d for d, _ in result.hits["q"]] == ["d0", "d1", "d2"]


def test_case_42_the_prompt_of_the_model():
    golden = GoldenSet({"q": "cat"}, {"A": "doc A", "B": "doc B"}, {"q": {"A": 1}})
    table = {"query: cat": [1.0, 0.0], "cat": [0.0, 1.0], "doc A": [1.0, 0.0], "doc B": [0.0, 1.0]}
    model = Lookup(table, prompts={"query": "query: "})
    with_prompt = evaluate(model, golden, metrics=["recall@1"])
    assert with_prompt["recall@1"] == 1.0
    assert with_prompt.provenance["prompts"]["query"] == "query: "
    assert "prompt-unused" not in {finding.kind for finding in with_prompt.findings}
    without = evaluate(model, golden, metrics=["recall@1"], query_prompt="")
    assert without["recall@1"] == 0.0
    assert without.provenance["prompts"]["query"] == ""
    (finding,) = (f for f in without.findings if f.kind == "prompt-unused")
    assert "query" in finding.examples
    other = evaluate(Lookup(table), golden, metrics=["recall@1"], query_prompt="query: ")
    assert other["recall@1"] == 1.0


# ---------------------------------------------------------------- inputs of evaluate_embeddings


def test_arrays_tensors_and_memory_maps_give_the_same(tmp_path, monkeypatch):
    queries, documents, golden = graded_world()
    expected = evaluate_embeddings(queries, documents, golden, metrics=MANY, similarity="dot")
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=documents.shape)
    mapped[:] = documents
    mapped.flush()
    read_only = np.memmap(tmp_path / "rows", np.float32, "r", shape=documents.shape)
    frozen = documents.copy()
    frozen.flags.writeable = False
    monkeypatch.setattr("fullrank.anytime.BLOCK", 7)
    for q, d in (
        (torch.from_numpy(queries), torch.from_numpy(documents)),
        (queries, torch.from_numpy(documents)),
        (torch.from_numpy(queries), documents),
        (queries, mapped),
        (queries, read_only),
        (queries, frozen),
        (queries.astype(np.float16), documents.astype(np.float64)),
        (torch.from_numpy(queries).bfloat16(), torch.from_numpy(documents).half()),
        (queries[:, ::-1], documents[:, ::-1]),
        (torch.from_numpy(queries).requires_grad_(), torch.from_numpy(documents).requires_grad_()),
    ):
        result = evaluate_embeddings(q, d, golden, metrics=MANY, similarity="dot")
        assert by_query(result) == by_query(expected)
        assert result.hits == expected.hits
    assert np.array_equal(mapped, documents)


@pytest.mark.parametrize("ties", RULES)
@pytest.mark.parametrize("similarity", ["dot", "cosine", "euclidean"])
def test_equal_to_the_run_that_it_implies(similarity, ties):
    queries, documents, golden = graded_world(seed=3)
    documents, queries = documents + np.float32([7, 0, 0]), queries + np.float32([7, 0, 0])  # no zero vector
    result = evaluate_embeddings(
        queries, documents, golden, similarity=similarity, metrics=MANY, ties=ties, list_length=40
    )
    run = {}
    for qid, q in zip(golden.query_ids, queries.astype(np.float64), strict=True):
        d = documents.astype(np.float64)
        if similarity == "euclidean":
            scores = -np.sqrt(((q - d) ** 2).sum(axis=1))
        elif similarity == "cosine":
            unit = (d / np.sqrt((d * d).sum(axis=1))[:, None]).astype(np.float32).astype(np.float64)
            scores = np.array([math.fsum(u * (q / math.sqrt(q @ q)).astype(np.float32)) for u in unit])
        else:
            scores = d @ q
        run[qid] = dict(zip(golden.doc_ids, scores.astype(np.float32).tolist(), strict=True))
    assert result.counts["n_tied"] > 5
    assert by_query(result) == by_query(evaluate_run(run, golden.qrels, metrics=MANY, ties=ties))
    listed = {qid: dict(hits) for qid, hits in result.hits.items()}
    assert listed == run
    if ties == "expected":  # the full list that the result holds is a run with the same numbers
        assert by_query(evaluate_run(listed, golden.qrels, metrics=MANY)) == by_query(result)


def test_trec_ties_go_by_the_bytes_of_ids():
    ids = ["a", "Z", "é", "z", "日本", "😀"]  # by bytes: Z a z é 日本 😀
    for relevant, rank in zip(["😀", "日本", "é", "z", "a", "Z"], range(1, 7), strict=True):
        golden = golden_of(ids, {"q": {relevant: 1}})
        result = evaluate_embeddings(torch.ones(1, 2), torch.ones(6, 2), golden, metrics=["mrr"], ties="trec")
        assert result["mrr"] == 1 / rank


def test_wrong_shapes_name_the_table_and_what_is_needed():
    golden = golden_of(3, {"q": {"d0": 1}})
    good_q, good_d = torch.ones(1, 4), torch.ones(3, 4)
    for q, d, words in (
        (torch.ones(2, 4), good_d, r"query_embeddings has the shape \(2, 4\).*\[1, d\]"),
        (good_q, torch.ones(2, 4), r"document_embeddings has the shape \(2, 4\).*\[3, d\]"),
        (torch.ones(4), good_d, r"query_embeddings has the shape \(4,\)"),
        (good_q, torch.ones(3, 4, 1), r"document_embeddings has the shape \(3, 4, 1\)"),
        (good_q, torch.ones(3, 5), "queries have 4 dimensions and documents 5"),
    ):
        with pytest.raises(EvaluationError, match=words):
            evaluate_embeddings(q, d, golden)
        with pytest.raises(EvaluationError, match=words):
            evaluate_embeddings(q.numpy(), d.numpy(), golden)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ["recal@1"]}, "recall@1"),
        ({"metrics": ["recall"]}, "needs a cut-off"),
        ({"metrics": "recall@1"}, "must be a non-empty list"),
        ({"metrics": []}, "must be a non-empty list"),
        ({"similarity": "manhattan"}, "manhattan"),
        ({"list_length": 0}, "list_length=0"),
        ({"ties": "average"}, "average"),
        ({"on_nonfinite": "ignore"}, "ignore"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    golden = golden_of(2, {"q": {"d0": 1}})
    table = {text: [1.0, 1.0] for text in [*golden.doc_texts, *golden.query_texts]}
    with pytest.raises(SettingError, match=words):
        evaluate_embeddings(torch.ones(1, 2), torch.ones(2, 2), golden, **options)
    with pytest.raises(SettingError, match=words):
        evaluate(Lookup(table), golden, **options)


def test_an_unknown_precision_is_refused():
    golden = golden_of(1, {"q": {"d0": 1}})
    with pytest.raises(SettingError, match="precision='fp8' is unknown"):
        evaluate(Lookup({"query q": [1.0], "text of d0": [1.0]}), golden, precision="fp8")


def test_an_empty_corpus_is_an_error():
    with pytest.raises(DataError, match="empty corpus"):
        GoldenSet({"q": "x"}, {}, {"q": {}})


# ---------------------------------------------------------------- what stands in a result


def test_vacuous_cutoffs_are_found():
    golden = golden_of(40, {"q": {"d0": 1}})
    kinds = {}
    for k in (1, 2, 10):
        result = evaluate_embeddings(
            torch.ones(1, 2),
            torch.rand(40, 2, generator=torch.Generator().manual_seed(0)) + 0.1,
            golden,
            metrics=[f"recall@{k}"],
        )
        kinds[k] = [f.examples for f in result.findings if f.kind == "vacuous-k"]
    assert kinds == {1: [], 2: [("@2",)], 10: [("@10",)]}
    wide = golden_of(41, {"q": {"d0": 1}})
    result = evaluate_embeddings(torch.ones(1, 2), torch.eye(41)[:, :2] + 1, wide, metrics=["recall@2"])
    assert "vacuous-k" not in {f.kind for f in result.findings}


def test_lists_are_as_long_as_the_largest_cut_off_but_10_at_least():
    golden = golden_of(40, {"q": {"d0": 1}})
    documents = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    for metrics, length, expected in (
        (["recall@1"], None, 10),
        (["recall@25"], None, 25),
        (["recall@25"], 3, 3),
        (["mrr"], 99, 40),
    ):
        result = evaluate_embeddings(torch.ones(1, 3), documents, golden, metrics=metrics, list_length=length)
        assert len(result.hits["q"]) == expected
        scores = [s for _, s in result.hits["q"]]
        assert scores == sorted(scores, reverse=True)


def test_a_real_result_is_saved_and_read_back(tmp_path, tiny_st, tiny_golden):
    result = evaluate(tiny_st(), tiny_golden)
    read = Result.load(result.save(tmp_path / "r.json"))
    for field in dataclasses.fields(result):
        mine, other = getattr(result, field.name), getattr(read, field.name)
        if field.name == "per_query":
            mine, other = ({k: v.tolist() for k, v in table.items()} for table in (mine, other))
        assert mine == other, field.name
    bad = evaluate_embeddings(
        rows([1.0, 0.0]), CASE_7, golden_of(3, {"q": {"d2": 1}}), on_nonfinite="worst", list_length=3
    )
    assert Result.load(bad.save(tmp_path / "bad.json")).hits == bad.hits


def test_groups_and_texts_reach_the_result():
    golden = GoldenSet(
        {"q1": "one", "q2": "two"},
        {"a": "x", "b": "y"},
        {"q1": {"a": 1}, "q2": {"a": 1}},
        groups={"q1": "g", "q2": "h"},
    )
    result = evaluate_embeddings(torch.eye(2), torch.eye(2), golden, metrics=["recall@1"])
    assert result.by_group() == {"g": {"n": 1.0, "recall@1": 1.0}, "h": {"n": 1.0, "recall@1": 0.0}}
    assert result.queries == {"q1": "one", "q2": "two"}
    assert result.provenance["similarity"] == "cosine"


# ---------------------------------------------------------------- equal texts


def with_equal_texts():
    """Text "T" stands three times, one copy judged; "U" stands twice, not judged; the query "Q" twice."""
    texts = {"d0": "T", "d1": "V", "d2": "T", "d3": "U", "d4": "T", "d5": "U", "d6": "W"}
    return GoldenSet({"q0": "Q", "q1": "Q", "q2": "R"}, texts, {"q0": {"d2": 1}, "q1": {"d1": 1}, "q2": {"d6": 1}})


def test_equal_texts_are_encoded_once():
    golden = with_equal_texts()
    table = {"T": [1.0, 0.0], "V": [0.5, 1.0], "U": [0.2, 1.0], "W": [0.0, 1.0], "Q": [1.0, 0.1], "R": [0.0, 1.0]}
    model = Lookup(table)
    result = evaluate(model, golden, metrics=["recall@1", "mrr"])
    asked = [text for call in model.asked for text in call]
    assert sorted(asked) == sorted(table)
    assert result.counts["n_equal_texts"] == 5
    # q0: "T" is best, three copies, one of them right. q1: "V" comes after the three.
    assert by_query(result)["recall@1"] == {"q0": pytest.approx(1 / 3), "q1": 0.0, "q2": 1.0}
    assert by_query(result)["mrr"]["q0"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert by_query(result)["mrr"]["q1"] == pytest.approx(1 / 4)


class Noisy:
    """A model whose embeddings differ a little from call to call, as those of any model do from batch to batch."""

    def __init__(self):
        self.calls = 0

    def encode(self, texts):
        self.calls += 1
        return np.array([[1.0 + 1e-5 * self.calls, (ord(text[0]) - ord("A")) / 26] for text in texts], np.float32)


@pytest.mark.parametrize("block", [1, 2, 8192])
def test_equal_texts_tie_by_construction(block, monkeypatch):
    monkeypatch.setattr("fullrank.anytime.BLOCK", block)
    golden = with_equal_texts()
    result = evaluate(Noisy(), golden, metrics=["recall@1", "mrr"], similarity="dot", list_length=7)
    scores = dict(result.hits["q0"])
    assert scores["d0"] == scores["d2"] == scores["d4"]
    assert scores["d3"] == scores["d5"]


def test_equal_texts_of_a_real_model_tie(tiny_st, tiny_golden):
    texts = list(tiny_golden.corpus.values())
    corpus = {f"d{i}": texts[i // 3] for i in range(120)}  # each text three times
    qrels = {q: {f"d{3 * int(d[1:]) + 1}": 1 for d in grades} for q, grades in tiny_golden.qrels.items()}
    result = evaluate(tiny_st(), GoldenSet(tiny_golden.queries, corpus, qrels), metrics=["recall@1"])
    assert result.counts["n_tied"] == 15
    single = evaluate(tiny_st(), tiny_golden, metrics=["recall@1"])
    assert result["recall@1"] == pytest.approx(single["recall@1"] / 3)


def test_rows_given_are_ranked_as_given():
    golden = with_equal_texts()
    documents = torch.arange(7.0)[:, None] + 1
    result = evaluate_embeddings(torch.ones(3, 1), documents, golden, similarity="dot", metrics=["recall@1"])
    assert by_query(result) == {"recall@1": {"q0": 0.0, "q1": 0.0, "q2": 1.0}}
    assert result.counts["n_tied"] == 0


# ---------------------------------------------------------------- models


def test_anything_with_encode_gives_what_its_embeddings_give():
    golden = golden_of(30, {f"q{i}": {f"d{i}": 1} for i in range(6)})
    rng = np.random.default_rng(0)
    table = {text: rng.standard_normal(5).astype(np.float32) for text in [*golden.doc_texts, *golden.query_texts]}
    expected = evaluate_embeddings(
        np.stack([table[t] for t in golden.query_texts]), np.stack([table[t] for t in golden.doc_texts]), golden
    )

    class Both:
        similarity = "cosine"

        def encode_queries(self, texts):
            return torch.stack([torch.from_numpy(table[t]) for t in texts])

        def encode_documents(self, texts):
            return torch.stack([torch.from_numpy(table[t]) for t in texts])

    class Kind:
        def __init__(self, convert):
            self.convert = convert

        def encode(self, texts):
            return self.convert([table[t] for t in texts])

    converts = (
        np.stack,
        lambda vectors: [v.tolist() for v in vectors],
        list,
        lambda vectors: [torch.from_numpy(v) for v in vectors],
        lambda vectors: torch.from_numpy(np.stack(vectors)).double().requires_grad_(),
        lambda vectors: np.stack(vectors)[:, ::-1][:, ::-1],
    )
    for model in (Both(), *map(Kind, converts)):
        result = evaluate(model, golden)
        assert by_query(result) == by_query(expected)
        assert result.hits == expected.hits


@pytest.mark.parametrize("ties", RULES)
def test_each_document_keeps_its_own_embedding(ties):
    # Texts of many lengths, so that the order of encoding is not the order of the corpus; many equal scores.
    rng = np.random.default_rng(1)
    ids = [f"d{i}" for i in range(29)] + ["q0"]
    corpus = {d: f"document {d} " + "x" * int(rng.integers(50)) for d in ids}
    queries = {f"q{i}": "query" + "?" * i for i in range(5)}
    golden = GoldenSet(queries, corpus, {f"q{i}": {f"d{5 * i}": 2, f"d{5 * i + 1}": 1} for i in range(5)})
    table = {text: rng.integers(1, 4, 2).tolist() for text in [*golden.doc_texts, *golden.query_texts]}
    options = {"ties": ties, "metrics": MANY, "similarity": "dot", "exclude_self": True, "list_length": 30}
    expected = evaluate_embeddings(
        np.array([table[text] for text in golden.query_texts], np.float32),
        np.array([table[text] for text in golden.doc_texts], np.float32),
        golden,
        **options,
    )
    result = evaluate(Lookup(table), golden, **options)
    assert result.hits == expected.hits
    assert by_query(result) == by_query(expected)


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def encode(self, texts):
        return self.answer(texts)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda t: np.ones((len(t) + 1, 2)), r"encode returned the shape \(\d+, 2\) for \d+ texts"),
        (lambda t: np.ones(len(t)), r"encode returned the shape \(\d+,\) for \d+ texts"),
        (lambda t: [1.0] * len(t), r"encode returned the shape \(\d+,\)"),
        (lambda t: [[1.0, 2.0], *[[1.0]] * (len(t) - 1)], r"encode returned a list"),
        (lambda t: None, r"encode returned"),
        (lambda t: "no", r"encode returned"),
        (lambda t: [torch.ones(2)] * (len(t) - 1), r"encode returned"),
        (lambda t: [torch.ones(2), *[torch.ones(3)] * (len(t) - 1)], r"encode returned"),
        (lambda t: torch.ones(len(t), 2, 1), r"encode returned the shape \(\d+, 2, 1\)"),
    ],
)
def test_answers_that_are_no_table_are_errors_that_name_encode(answer, words):
    with pytest.raises(EvaluationError, match=words):
        evaluate(Answers(answer), golden_of(4, {"q": {"d0": 1}, "p": {"d1": 1}}))


def test_a_query_side_of_other_width_is_an_error_that_names_both():
    model = Answers(lambda texts: np.ones((len(texts), 3 if texts[0].startswith("query") else 2)))
    with pytest.raises(EvaluationError, match="queries have 3 dimensions and documents 2"):
        evaluate(model, golden_of(4, {"q": {"d0": 1}}))


def test_the_exception_of_a_model_comes_through():
    class Broken:
        def encode(self, texts):
            raise KeyError("the model's own")

    with pytest.raises(KeyError, match="the model's own"):
        evaluate(Broken(), golden_of(1, {"q": {"d0": 1}}))


def test_a_sentence_transformer_gives_what_its_encode_gives(tiny_st, tiny_golden):
    for options in ({}, {"normalize": True}, {"similarity_fn_name": "dot"}, {"similarity_fn_name": "euclidean"}):
        model = tiny_st(**options)
        result = evaluate(model, tiny_golden, metrics=MANY)
        expected = evaluate_embeddings(
            model.encode(tiny_golden.query_texts),
            model.encode(tiny_golden.doc_texts),
            tiny_golden,
            similarity=model.similarity_fn_name,
            metrics=MANY,
        )
        assert result.provenance["similarity"] == model.similarity_fn_name
        assert by_query(result) == by_query(expected)
        for qid, hits in expected.hits.items():
            assert [d for d, _ in result.hits[qid]] == [d for d, _ in hits]
            assert [s for _, s in result.hits[qid]] == pytest.approx([s for _, s in hits], abs=1e-5, rel=1e-5)
    assert 0 < result["recall@1"] < 1  # the numbers above could have told a wrong embedding


def test_batches_and_blocks_of_any_size_give_the_same_numbers(tiny_st, tiny_golden, monkeypatch):
    expected = by_query(evaluate(tiny_st(), tiny_golden, metrics=MANY))
    for batch_tokens, block in ((1, 8192), (33, 8192), (None, 5), (64, 1)):
        monkeypatch.setattr(anytime, "BLOCK", block)
        assert by_query(evaluate(tiny_st(), tiny_golden, metrics=MANY, batch_tokens=batch_tokens)) == expected


def test_shuffling_the_texts_of_a_real_model_changes_no_number(tiny_st, tiny_golden):
    model = tiny_st()
    first = evaluate(model, tiny_golden, metrics=MANY)
    for seed in range(3):
        rng = random.Random(seed)
        corpus, queries = (dict(rng.sample(list(t.items()), len(t))) for t in (tiny_golden.corpus, tiny_golden.queries))
        other = evaluate(model, GoldenSet(queries, corpus, tiny_golden.qrels), metrics=MANY)
        assert by_query(other) == by_query(first)


def test_truncated_texts_are_counted(tiny_st):
    golden = GoldenSet(
        {"q": "bal ban bar", "p": "bal"},
        {"a": "bal ban bar bas", "b": "bal ban bar", "c": "bal " * 50, "d": "bal " * 4},
        {"q": {"a": 1}, "p": {"b": 1}},
    )
    model = tiny_st()
    assert evaluate(model, golden).counts["n_truncated"] == 0
    model.max_seq_length = 5  # [CLS] and [SEP] among them
    result = evaluate(model, golden)
    assert result.counts["n_truncated"] == 3
    assert result.counts["n_truncated_queries"] == 0
    model.max_seq_length = 4
    assert evaluate(model, golden).counts["n_truncated_queries"] == 1


def test_bf16_runs_and_is_recorded(tiny_st, tiny_golden):
    model = tiny_st()
    plain, bf16, stated = (evaluate(model, tiny_golden, precision=p) for p in (None, "bf16", "fp32"))
    assert bf16.provenance["precision"] == "bf16"
    assert stated.provenance["precision"] == "fp32"
    assert plain.hits == stated.hits
    assert bf16.hits != plain.hits
    best = {q: hits[0][1] for q, hits in plain.hits.items()}
    assert {q: hits[0][1] for q, hits in bf16.hits.items()} == pytest.approx(best, abs=0.05)


def test_an_autocast_around_the_evaluation_does_not_reach_it(tiny_st, tiny_golden):
    model = tiny_st()
    expected = evaluate(model, tiny_golden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for precision in (None, "fp32"):
            assert evaluate(model, tiny_golden, precision=precision).hits == expected.hits
        assert torch.is_autocast_enabled("cpu")


def test_prompts_of_a_sentence_transformer_are_used_and_recorded(tiny_st, tiny_golden):
    model = tiny_st(prompts={"query": "query : ", "document": "document : "})
    result = evaluate(model, tiny_golden)
    assert result.provenance["prompts"] == {"query": "query : ", "document": "document : "}
    plain = evaluate(model, tiny_golden, query_prompt="", document_prompt="")
    assert plain.hits != result.hits
    assert plain.hits == evaluate(tiny_st(), tiny_golden).hits
    (finding,) = (f for f in plain.findings if f.kind == "prompt-unused")
    assert finding.count == 2


def test_progress_is_told_until_all_is_done(tiny_st, tiny_golden):
    for model in (tiny_st(), as_encoder(tiny_st(), fast=False)):
        told = []
        evaluate(model, tiny_golden, progress=lambda *step, told=told: told.append(step), batch_tokens=64)
        for phase, total in (("queries", 15), ("documents", 40)):
            done = [d for p, d, t in told if p == phase and t == total]
            assert done == sorted(done)
            assert done[-1] == total


def test_timing_is_told(tiny_st, tiny_golden):
    timing = evaluate(tiny_st(), tiny_golden).timing
    assert timing["total"] > 0
    assert timing["documents_per_second"] > 0
    assert timing["queries_per_second"] > 0


# ---------------------------------------------------------------- a plan that runs again and again


def test_a_plan_runs_again_on_the_model_as_it_stands(tiny_st, tiny_golden):
    model = tiny_st()
    plan = EvaluationPlan(as_encoder(model), tiny_golden)
    first = plan.run(metrics=MANY)
    assert first.hits == evaluate(model, tiny_golden, metrics=MANY).hits
    assert plan.run(metrics=MANY).hits == first.hits
    before = plan.probe(3)
    assert before.shape == (6, 32)
    assert before.dtype == torch.float32
    texts = [*tiny_golden.query_texts[:3], *tiny_golden.doc_texts[:3]]
    assert torch.allclose(before, model.encode(texts, convert_to_tensor=True), atol=1e-5)
    with torch.no_grad():
        for weight in model[0].model.encoder.parameters():
            weight.mul_(0.5)
    changed = plan.run(metrics=MANY)
    assert changed.hits != first.hits
    assert changed.hits == evaluate(model, tiny_golden, metrics=MANY).hits
    assert not torch.allclose(plan.probe(3), before, atol=1e-2)


def test_a_probe_of_more_texts_than_there_are(tiny_st):
    golden = GoldenSet({"q": "bal"}, {"a": "ban", "b": "ban"}, {"q": {"a": 1}})
    assert EvaluationPlan(as_encoder(tiny_st()), golden).probe(8).shape == (3, 32)


# ---------------------------------------------------------------- no side effects


class Rude(nn.Module):
    """A model that draws from every random state, needs eval mode and no gradients, and fails when told to."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
        self.calls, self.fail_at, self.modes = 0, fail_at, []

    def encode(self, texts):
        self.calls += 1
        random.random()
        np.random.rand()  # noqa: NPY002  # a model may
        torch.rand(3)
        self.modes.append((self.training, self.inner[1].training, torch.is_grad_enabled()))
        if self.calls == self.fail_at:
            raise ZeroDivisionError
        return self.inner(torch.tensor([[len(text), 1.0 + ord(text[-1])] for text in texts]))


def everything(model):
    return {
        "python": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],  # noqa: NPY002
        "torch": torch.get_rng_state().tolist(),
        "modes": [module.training for module in model.modules()],
        "requires_grad": [weight.requires_grad for weight in model.parameters()],
        "grads": [weight.grad is None for weight in model.parameters()],
        "weights": [weight.tolist() for weight in model.state_dict().values()],
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "attributes": sorted(vars(model).keys() - {"_similarity", "_similarity_pairwise"}),  # a cache of its own
        "precision": (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision),
        "threads": torch.get_num_threads(),
    }


def in_a_mixed_state(model):
    """Train mode, but one part frozen in eval mode and one weight without gradient."""
    model.train()
    list(model.modules())[-1].eval()
    next(iter(model.parameters())).requires_grad_(False)
    return model


@pytest.mark.parametrize("grad", [True, False])
def test_an_evaluation_leaves_no_trace(grad, tiny_st, tiny_golden):
    for model in (Rude(), tiny_st(prompts={"query": "query : "})):
        in_a_mixed_state(model)
        with torch.set_grad_enabled(grad):
            before = everything(model)
            evaluate(model, tiny_golden, precision="bf16")
            EvaluationPlan(as_encoder(model), tiny_golden).probe()
            assert everything(model) == before
    assert Rude().modes == []


def test_models_are_evaluated_in_eval_mode_without_gradients(tiny_golden):
    model = in_a_mixed_state(Rude())
    evaluate(model, tiny_golden)
    assert set(model.modes) == {(False, False, False)}


def test_dropout_does_not_reach_the_numbers(tiny_st, tiny_golden):
    model = tiny_st()
    expected = evaluate(model.eval(), tiny_golden).hits
    assert evaluate(model.train(), tiny_golden).hits == expected


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_an_evaluation_that_fails_leaves_no_trace_either(fail_at, tiny_golden):
    model = in_a_mixed_state(Rude(fail_at))
    before = everything(model)
    with pytest.raises(ZeroDivisionError):
        evaluate(model, tiny_golden)
    assert model.calls == fail_at
    assert everything(model) == before


def test_a_refused_evaluation_leaves_no_trace_either(tiny_st, tiny_golden):
    model = in_a_mixed_state(tiny_st())
    with torch.no_grad():
        next(iter(model[0].model.encoder.parameters())).fill_(math.nan)
    state = everything(model)
    state.pop("weights")  # NaN is not equal to itself
    with pytest.raises(NonFiniteError, match="15 of 15 query embeddings"):
        evaluate(model, tiny_golden)
    after = everything(model)
    after.pop("weights")
    assert after == state


def test_what_the_caller_gave_stays_as_it_is(tiny_golden):
    queries, documents, golden = graded_world()
    copies = queries.copy(), documents.copy(), {q: dict(g) for q, g in golden.qrels.items()}
    result = evaluate_embeddings(torch.from_numpy(queries), torch.from_numpy(documents), golden, similarity="dot")
    result.qrels["q0"]["d0"] = 99
    assert np.array_equal(queries, copies[0])
    assert np.array_equal(documents, copies[1])
    assert golden.qrels == copies[2]


def test_every_error_is_a_fullrank_error_and_the_builtin_that_fits():
    for error, builtin in ((DataError, ValueError), (SettingError, ValueError), (EvaluationError, RuntimeError)):
        assert issubclass(error, FullrankError)
        assert issubclass(error, builtin)


# ---------------------------------------------------------------- the real thing


@pytest.mark.timeout(1200)
def test_scifact_with_minilm_gives_the_published_number(minilm, shared_data):
    golden = load_golden(shared_data / "scifact")
    assert (len(golden.corpus), golden.n_answerable) == (5183, 300)
    result = evaluate(minilm, golden, metrics=["ndcg@10", "recall@10"], precision="fp32")
    assert result["ndcg@10"] == pytest.approx(0.645, abs=0.0015)
    assert result.eligible
    assert not result.collapsed


def test_the_fingerprint_tells_weights_apart_and_only_weights(tiny_st, tiny_golden):
    model = tiny_st()
    first = evaluate(model, tiny_golden).provenance["model_fingerprint"]
    assert evaluate(tiny_st(), tiny_golden).provenance["model_fingerprint"] == first
    with torch.no_grad():
        model[0].model.encoder.layer[1].output.dense.weight.add_(1e-4)
    assert evaluate(model, tiny_golden).provenance["model_fingerprint"] != first


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_complex_embeddings_are_refused(tiny_golden, kind):
    tables = [np.ones((len(part), 3)) + 1j for part in (tiny_golden.queries, tiny_golden.corpus)]
    with pytest.raises(EvaluationError, match=r"embeddings are .*complex128; expected real numbers"):
        evaluate_embeddings(*(map(torch.from_numpy, tables) if kind == "tensor" else tables), tiny_golden)


def test_reprs_are_short_whatever_the_size(tiny_golden):
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(len(part), 3)) for part in (tiny_golden.queries, tiny_golden.corpus)]
    result = evaluate_embeddings(*rows, tiny_golden, metrics=["recall@40"])
    assert repr(tiny_golden) == "GoldenSet('tiny', 15 queries, 40 documents)"
    assert repr(result) == "Result(recall@40=1.0000; 15 queries)"
