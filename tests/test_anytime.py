"""An evaluation that may stop: its metrics only fall as documents come, never below the exact values, and end there."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullrank import GoldenSet, Result, compare, evaluate, evaluate_dims, evaluate_embeddings
from fullrank._errors import DataError, SettingError
from fullrank.anytime import Anytime, Documents, extend_until
from fullrank.clock import Clock
from fullrank.competitors import Rivals, hard_first, pool_positions
from fullrank.measure import Measurement
from fullrank.metrics import Metric
from fullrank.outcome import Settings
from fullrank.report import comparison_table, result_table

RULES = ("expected", "worst", "trec")
EVERY = [
    *(f"{name}@{k}" for name in ("recall", "hit", "recall_cap", "precision") for k in (1, 3, 10)),
    *(f"{name}{at}" for name in ("mrr", "map", "ndcg", "ndcg_exp") for at in ("", "@1", "@3", "@10")),
]


def golden_of(n, qrels, **options):
    corpus = {f"d{i}": f"text {i}" for i in range(n)} | {q: f"text of {q}" for q in qrels}
    return GoldenSet({q: f"query {q}" for q in qrels}, corpus, qrels, **options)


def graded_world(seed, n=45, n_queries=7, d=3):
    """Small whole numbers, so that many tie; rows that are copies; documents that have the id of a query."""
    rng = np.random.default_rng(seed)
    qrels = {
        f"q{i}": {f"d{j}": int(rng.integers(-1, 4)) for j in rng.choice(n, 5, replace=False)} for i in range(n_queries)
    }
    qrels["q0"] |= {"d1": 1, "d2": 2}
    qrels["q3"] = {}
    golden = golden_of(n, qrels)
    size = len(golden.corpus)
    same_text = np.arange(size)
    copies = rng.choice(size, size // 4, replace=False)
    same_text[copies] = rng.choice(size, len(copies))
    same_text = same_text[same_text]
    documents = rng.integers(-2, 3, (size, d)).astype(np.float32)[same_text]
    documents[:, 0] += 0.5  # no row without a direction
    queries = rng.integers(-2, 3, (n_queries, d)).astype(np.float32) + np.float32([0.5, 0, 0])
    return golden, queries, documents, same_text


def session_of(golden, queries, documents, same_text, **options):
    """An evaluation of rows that lie in memory, and the list of the document positions that were asked for."""
    wanted = {"metrics": EVERY, "ties": "expected", "similarity": "dot", "list_length": None, "exclude_self": False}
    wanted |= {"on_nonfinite": "raise"} | options
    asked = []

    def rows(block):
        asked.extend(block.tolist())
        return block, torch.from_numpy(documents[block])

    measurement = Measurement(
        golden,
        Settings(**{**wanted, "metrics": [Metric.parse(m) for m in wanted["metrics"]]}),
        torch.from_numpy(queries),
        Clock(),
    )
    order = np.lexsort((np.arange(len(same_text)), same_text))
    session = Anytime({None: measurement}, Documents(rows, order, same_text), lambda m: m.result({}))
    return session, asked


# ---------------------------------------------------------------- the bound


@pytest.mark.parametrize("similarity", ["dot", "cosine", "euclidean"])
@pytest.mark.parametrize("ties", RULES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bound_only_falls_and_ends_at_the_exact_value(ties, similarity, data):
    golden, queries, documents, same_text = graded_world(data.draw(st.integers(0, 10_000), label="world"))
    exclude_self = data.draw(st.booleans(), label="exclude_self")
    options = {"ties": ties, "similarity": similarity, "exclude_self": exclude_self}
    exact = evaluate_embeddings(queries, documents, golden, metrics=EVERY, **options)
    session, asked = session_of(golden, queries, documents, same_text, **options)
    order = data.draw(st.permutations(range(len(documents))), label="order")
    before = session.result()
    while session.n_seen < len(documents):
        size = data.draw(st.integers(1, 20), label="size")
        session.extend(np.array(order[:size], dtype=np.int64))
        order = order[size:]
        now = session.result()
        assert session.means() == now.metrics
        assert now.bound == (session.n_seen < len(documents))
        assert now.eligible != now.bound
        assert now.coverage == session.n_seen / len(documents)
        for name, values in now.per_query.items():  # also query by query
            assert (values <= before.per_query[name]).all(), name
            assert (values >= exact.per_query[name]).all(), name
            assert now.metrics[name] <= before.metrics[name]
        before = now
    assert sorted(asked) == list(range(len(documents)))  # each once
    assert before.metrics == exact.metrics
    assert before.counts == exact.counts
    assert before.hits == exact.hits
    for name, values in exact.per_query.items():
        np.testing.assert_array_equal(before.per_query[name], values)


def test_positions_that_come_again_or_in_any_form_are_ranked_once():
    golden, queries, documents, same_text = graded_world(3)
    session, asked = session_of(golden, queries, documents, same_text)
    for _ in range(3):
        session.extend(np.array([5, 5, 7], dtype=np.int64))
    session.extend(np.array([], dtype=np.int64))
    assert len(asked) == len(set(asked)) == session.n_seen
    assert not set(session.remaining.tolist()) & set(asked)
    session.extend(session.remaining)
    assert session.n_seen == len(documents)
    assert len(session.remaining) == 0


def test_a_text_brings_its_copies_along():
    golden, queries, documents, same_text = graded_world(5)
    session, asked = session_of(golden, queries, documents, same_text)
    for _ in range(100):
        assert set(np.flatnonzero(np.isin(same_text, same_text[asked])).tolist()) == set(asked)
        if not len(session.remaining):
            break
        session.extend(session.remaining[:1])
    assert session.n_seen == len(documents)


def test_copies_of_a_text_are_never_cut_into_two_blocks(monkeypatch):
    monkeypatch.setattr("fullrank.anytime.BLOCK", 2)
    golden = golden_of(12, {"q0": {"d0": 1}})
    same_text = np.array([0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6])
    blocks = []

    def rows(block):
        blocks.append(set(block.tolist()))
        return block, torch.from_numpy(np.eye(13, dtype=np.float32)[same_text[block]])

    settings_ = Settings([Metric.parse("recall@1")], "expected", "dot", None, False, "raise")
    measurement = Measurement(golden, settings_, torch.ones(1, 13), Clock())
    session = Anytime({None: measurement}, Documents(rows, np.arange(13), same_text), lambda m: m.result({}))
    session.extend(session.remaining)
    assert sorted(map(sorted, blocks)) == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11], [12]]


def far_world(n=3_000):
    """One query that stands at rank 3 of ``n`` + 1: d8 and d9 are nearer than its answer."""
    golden = golden_of(n, {"q": {"d5": 1}})
    documents = np.zeros((n + 1, 2), np.float32)
    documents[:, 1] = 1
    documents[[8, 9, 5], 0] = [3, 3, 2]
    return golden, np.float32([[1, 0]]), documents, np.arange(n + 1)


def rivals_in(golden, positions):
    """Competitors that an earlier result listed above the answer of each query."""
    above = [(golden.doc_ids[i], 2.0) for i in positions]
    hits = {qid: [*above, *((doc_id, 1.0) for doc_id in grades)] for qid, grades in golden.qrels.items()}
    return Rivals([Result({}, {}, (), {}, hits=hits, qrels=golden.qrels)], golden)


def run(session, first, **stop_below):
    values = {Metric.parse(name.replace("_at_", "@")): value for name, value in stop_below.items()}
    golden = session.measurements[None].golden
    extend_until(session, rivals_in(golden, first), values)
    return session


def test_it_stops_only_where_every_metric_is_proved_below():
    world = far_world()
    assert run(session_of(*world)[0], [8, 9], recall_at_1=0.5).n_seen == 3
    assert run(session_of(*world)[0], [8], mrr=0.6).n_seen == 2  # one competitor is enough to be under 0.6
    assert run(session_of(*world)[0], [8, 9], recall_at_1=0.5, recall_at_3=1.0).n_seen == len(world[2])
    assert run(session_of(*world)[0], [8, 9]).n_seen == len(world[2])


def test_a_value_that_is_met_exactly_is_never_rejected():
    world = far_world()
    third = 1 / 3
    assert run(session_of(*world)[0], [8, 9], mrr=third).n_seen == len(world[2])
    assert run(session_of(*world)[0], [8, 9], mrr=third + 0.9e-12).n_seen == len(world[2])
    assert run(session_of(*world)[0], [8, 9], mrr=third + 2e-12).n_seen == 3
    assert run(session_of(*world)[0], [8, 9], mrr=third - 1e-9).n_seen == len(world[2])


def test_blocks_between_two_looks_grow():
    golden, queries, documents, same_text = far_world(6_000)
    seen = []
    session, _ = session_of(golden, queries, documents, same_text)
    means = session.means
    session.means = lambda dimensions=None: (seen.append(session.n_seen), means(dimensions))[1]
    extend_until(session, Rivals([], golden), {Metric.parse("recall@3"): 0.5})
    assert seen == [1, 65, 193, 449, 961, 1985, 4033]
    assert session.n_seen == len(documents)


def test_a_pool_is_not_left():
    world = far_world()
    session, asked = session_of(*world)
    extend_until(session, rivals_in(world[0], [8, 20]), {}, within=np.arange(4, 10))
    assert sorted(asked) == list(range(4, 10))
    session, asked = session_of(*world)
    extend_until(session, rivals_in(world[0], [8, 20]), {Metric.parse("recall@1"): 0.0}, within=np.arange(4, 10))
    assert sorted(asked) == list(range(4, 10))
    assert session.result().bound


# ---------------------------------------------------------------- competitors and pools


def test_what_stands_alone_above_an_answer_comes_first():
    listed = {"a": ["d3", "d1", "d0"], "b": ["d4", "d1"], "c": ["d1", "d5"]}
    result = Result(
        {"recall@1": 0.0},
        {"recall@1": np.zeros(3)},
        ("a", "b", "c"),
        {},
        hits={qid: [(doc_id, 1.0 - i / 10) for i, doc_id in enumerate(ids)] for qid, ids in listed.items()},
        qrels={"a": {"d0": 1}, "b": {"d1": 1}, "c": {"d1": 1}},
    )
    golden = golden_of(7, result.qrels)
    # d4 alone above an answer: 1. d3 and d1 above d0: 1/2 each, d1 listed elsewhere too. d5 second, d0 third in a list.
    assert hard_first([result], golden).tolist() == [4, 1, 3, 5, 0]
    assert hard_first([], golden).tolist() == []
    other = golden_of(3, {"q": {"d0": 1}})
    assert hard_first([result], other).tolist() == [1, 0]  # documents that are not there are passed over


@given(n=st.integers(1, 60), more=st.integers(0, 60), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_a_pool_holds_the_judged_and_a_larger_one_only_adds(n, more, seed):
    golden, *_ = graded_world(seed)
    competitors = np.random.default_rng(seed).permutation(52)[:4]
    pool = pool_positions(golden, n, competitors)
    larger = pool_positions(golden, n + more, competitors)
    judged = {golden.doc_ids.index(d) for grades in golden.qrels.values() for d in grades}
    assert judged <= set(pool.tolist())
    assert len(set(pool.tolist())) == len(pool) == min(max(n, len(judged)), 52)
    assert set(pool.tolist()) <= set(larger.tolist())
    assert pool.tolist() == sorted(pool.tolist()) == pool_positions(golden, n, competitors).tolist()
    if len(pool) >= len(judged | set(competitors.tolist())):
        assert set(competitors.tolist()) <= set(pool.tolist())


# ---------------------------------------------------------------- through `evaluate`, with a real model


@pytest.fixture(scope="module")
def long_golden(tiny_golden):
    """The tiny golden set with 400 more documents, some of them equal."""
    words = " ".join(tiny_golden.corpus.values()).split()
    rng = np.random.default_rng(0)
    more = {f"x{i}": " ".join(rng.choice(words, rng.integers(3, 20))) for i in range(400)}
    more |= {"y0": more["x0"], "y1": tiny_golden.corpus["d3"]}
    return GoldenSet(tiny_golden.queries, {**tiny_golden.corpus, **more}, tiny_golden.qrels, name="long")


def forwards_of(model):
    """Counts texts that go through the model, in a list of one."""
    texts = [0]
    model[0].register_forward_hook(
        lambda _, features, __: texts.__setitem__(0, texts[0] + len(features[0]["input_ids"]))
    )
    return texts


def test_a_model_that_cannot_reach_the_value_is_stopped(tiny_st, long_golden, tmp_path):
    model = tiny_st()
    exact = evaluate(model, long_golden)
    assert 0 < exact.metrics["recall@1"] < 1
    texts = forwards_of(model)
    bound = evaluate(model, long_golden, stop_below={"recall@1": 1.0}, competitors=[exact])
    assert bound.bound
    assert not bound.eligible
    assert exact.metrics["recall@1"] <= bound.metrics["recall@1"] < 1.0
    assert bound.counts["n_documents"] == 442
    assert bound.counts["n_ranked"] < 442
    assert bound.coverage == bound.counts["n_ranked"] / 442
    assert texts[0] < 300
    for name, value in exact.metrics.items():
        assert bound.metrics[name] >= value
    again = Result.load(bound.save(tmp_path / "bound.json"))
    assert again == bound
    assert again.bound is True
    assert json.loads((tmp_path / "bound.json").read_text())["counts"]["n_ranked"] == bound.counts["n_ranked"]


def test_a_model_that_may_reach_the_value_is_evaluated_to_the_end(tiny_st, long_golden):
    model = tiny_st()
    exact = evaluate(model, long_golden)
    for value in (0.0, exact.metrics["recall@1"], -1):
        found = evaluate(model, long_golden, stop_below={"recall@1": value})
        assert found.metrics == exact.metrics
        assert found.counts == exact.counts
        for q, hits in exact.hits.items():  # other batches: the last bit of an embedding may differ
            assert [d for d, _ in found.hits[q]] == [d for d, _ in hits]
            assert [s for _, s in found.hits[q]] == pytest.approx([s for _, s in hits], abs=1e-6)
        assert (found.bound, found.eligible, found.coverage) == (False, True, 1.0)


def test_a_metric_to_stop_by_is_computed_even_if_not_asked_for(tiny_st, long_golden):
    found = evaluate(tiny_st(), long_golden, metrics=["ndcg@10"], stop_below={"eval_recall@1": 0})
    assert list(found.metrics) == ["ndcg@10", "recall@1"]


@pytest.mark.parametrize(
    ("stop_below", "words"),
    [
        ({"recal@1": 0.5}, "recal@1"),
        ({"recall@1": "0.5"}, r"stop_below\['recall@1'\]='0.5' must be a number"),
        ({"recall@1": float("nan")}, r"stop_below\['recall@1'\]=nan must be a number"),
        ({"recall@1": float("inf")}, r"=inf must be a number"),
        ({"recall@1": None}, r"=None must be a number"),
        ({"recall@1": True}, r"=True must be a number"),
        (0.6, r"stop_below=0.6 must map metrics to values, for example \{'recall@1': 0.61\}"),
        (["recall@1"], r"stop_below=\['recall@1'\] must map metrics to values"),
    ],
)
def test_values_to_stop_by_that_cannot_work_are_refused(stop_below, words, tiny_st, tiny_golden):
    with pytest.raises(SettingError, match=words):
        evaluate(tiny_st(), tiny_golden, stop_below=stop_below)


@pytest.mark.parametrize("competitors", [5, "result.json", ["result.json"]])
def test_competitors_must_be_results(competitors, tiny_st, tiny_golden):
    with pytest.raises(SettingError, match="competitors must be a list of results"):
        evaluate(tiny_st(), tiny_golden, competitors=competitors)


def test_a_result_that_is_not_in_a_list_is_refused(tiny_st, tiny_golden):
    with pytest.raises(SettingError, match="competitors must be a list of results"):
        evaluate(tiny_st(), tiny_golden, competitors=evaluate(tiny_st(), tiny_golden))


def test_a_pool_is_a_bound_and_grows_towards_the_exact_value(tiny_st, long_golden):
    model = tiny_st()
    exact, before = evaluate(model, long_golden), None
    for n in (1, 60, 200, 441):
        found = evaluate(model, long_golden, pool=n, competitors=[exact])
        assert found.bound
        assert not found.eligible
        assert found.counts["n_ranked"] <= max(n, 15) + 3  # copies of a text come along
        assert found.hits == evaluate(model, long_golden, pool=n, competitors=[exact]).hits
        for name, value in exact.metrics.items():
            assert found.metrics[name] >= value
            assert before is None or found.metrics[name] <= before.metrics[name]
        before = found
    for n in (442, 10_000):
        assert evaluate(model, long_golden, pool=n).metrics == exact.metrics
        assert not evaluate(model, long_golden, pool=n).bound
    with pytest.raises(SettingError, match="pool=0 must be a whole number of documents from 1 or None"):
        evaluate(model, long_golden, pool=0)


def test_a_bound_is_never_compared_with_a_score(tiny_st, long_golden):
    exact = evaluate(tiny_st(), long_golden)
    bound = evaluate(tiny_st(), long_golden, pool=50)
    for pair in ((exact, bound), (bound, exact), (bound, bound)):
        for options in ({}, {"allow_other_data": True}):
            with pytest.raises(DataError, match="is a bound: it saw only a part of the corpus"):
                compare(*pair, "recall@1", **options)
    with pytest.raises(DataError, match="a bound has no interval"):
        bound.ci("recall@1")
    with pytest.raises(DataError, match="is a bound"):
        comparison_table(exact, bound)


def test_a_table_says_that_its_values_are_bounds(tiny_st, long_golden):
    exact = evaluate(tiny_st(), long_golden)
    bound = evaluate(tiny_st(), long_golden, pool=50)
    table = " ".join(result_table(bound, title="long").split())
    assert "upper bounds: 51 of 442 documents were ranked" in table  # a copy came along
    assert f"<= {bound.metrics['recall@1']:.4f}" in table
    assert "bound" not in result_table(exact, title="long")
    assert "<=" not in result_table(exact)


# ---------------------------------------------------------------- several truncations from one pass


@pytest.mark.parametrize("kind", ["dot", "cosine", "euclidean", "normalize"])
def test_dimensions_kept_are_those_of_truncate_dim(kind, tiny_st, long_golden):
    how = {"normalize": True} if kind == "normalize" else {"similarity_fn_name": kind}
    model = tiny_st(**how)
    texts = forwards_of(model)
    found = evaluate_dims(model, long_golden, [32, 16, 5, 1], metrics=EVERY)
    distinct = len(set(long_golden.corpus.values())) + len(set(long_golden.queries.values()))
    assert texts[0] == distinct
    assert list(found) == [32, 16, 5, 1]
    for n, result in found.items():
        expected = evaluate(tiny_st(truncate_dim=n, **how), long_golden, metrics=EVERY)
        assert result.metrics == pytest.approx(expected.metrics, abs=1e-6)
        assert result.counts == expected.counts
        for q, hits in expected.hits.items():
            assert [s for _, s in result.hits[q]] == pytest.approx([s for _, s in hits], abs=1e-6, rel=1e-6)
        assert (result.bound, result.eligible) == (False, True)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ([], r"dims=\[\] must be whole numbers from 1"),
        ([0], r"dims=\[0\] must be"),
        ([8, True], "must be whole numbers"),
        (["8"], "must be whole numbers"),
        ([8.0], "must be whole numbers"),
        (8, "dims=8 must be whole numbers from 1"),
        ([8, 33], "the model gives 32 dimensions; 33 cannot be kept"),
    ],
)
def test_dimensions_that_cannot_work_are_refused(dims, words, tiny_st, tiny_golden):
    with pytest.raises(SettingError, match=words):
        evaluate_dims(tiny_st(), tiny_golden, dims)


# ---------------------------------------------------------------- timing


def test_timing_holds_every_phase_and_tokenising_in_the_first_run_alone(tiny_st, tiny_golden):
    from fullrank.encode import as_encoder
    from fullrank.plan import EvaluationPlan

    plan = EvaluationPlan(as_encoder(tiny_st()), tiny_golden)
    first, second = plan.run().timing, plan.run().timing
    phases = {"encode", "encode_queries", "search", "metrics"}
    rates = {"total", "documents_per_second", "queries_per_second", "padding"}
    assert set(first) == phases | rates | {"tokenise"}
    assert set(second) == phases | rates
    for timing in (first, second):
        assert all(timing[name] > 0 for name in timing if name != "padding")
        assert 0 <= timing["padding"] < 1
        assert timing["total"] >= sum(timing[name] for name in phases)
        assert timing["documents_per_second"] == pytest.approx(len(set(tiny_golden.doc_texts)) / timing["encode"])
        assert timing["queries_per_second"] == pytest.approx(
            len(set(tiny_golden.query_texts)) / timing["encode_queries"]
        )


def test_padding_is_the_share_of_tokens_that_are_none(tiny_st):
    golden = GoldenSet({"q": "bal ban"}, {"a": "bal " * 8, "b": "bal bal", "c": "ban ban"}, {"q": {"b": 1}})
    timing = evaluate(tiny_st(), golden, batch_tokens=1_000).timing
    # Tokens with [CLS] and [SEP]: b first and alone, as judged (4 of 4); then a and c (10 + 4 of 20); the query 4.
    assert timing["padding"] == pytest.approx(1 - (4 + 14 + 4) / (4 + 20 + 4))
    assert evaluate(tiny_st(), golden, batch_tokens=1).timing["padding"] == 0


def test_a_precision_that_the_weights_do_not_have_is_refused(tiny_st, tiny_golden):
    half = tiny_st().bfloat16()
    with pytest.raises(SettingError, match=r"the model's weights are bfloat16: call model.float\(\) first"):
        evaluate(half, tiny_golden, precision="fp32")
    assert evaluate(half, tiny_golden).provenance["precision"] == "as the model stands bfloat16"
    assert evaluate(half.float(), tiny_golden, precision="fp32").provenance["precision"] == "fp32"


def test_results_of_kept_dimensions_name_them(tiny_st, tiny_golden):
    found = evaluate_dims(tiny_st(), tiny_golden, [16, 4])
    assert {n: result.provenance["dimensions"] for n, result in found.items()} == {16: 16, 4: 4}
