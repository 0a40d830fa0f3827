"""In-batch diagnostics: the numbers by hand and by brute force, and the taps on real losses and models."""

import copy
import gc
import itertools
import math
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fullrank
from fullrank import in_batch_metrics
from fullrank._errors import DataError, SettingError
from fullrank.in_batch import InBatchMonitor
from fullrank.taps import text_keys

CASE_47 = torch.tensor([[0.9, 0.2, 0.1, 0.3], [0.5, 0.4, 0.2, 0.1], [0.1, 0.2, 0.7, 0.3], [0.6, 0.7, 0.8, 0.5]])
QUERIES = ["bal can", "dis fot gir", "hal jan kil", "lor mas bit"]
POSITIVES = ["bal can fis", "dis fot gir han", "hal jan kil lor mit", "lor mas bit cos dan"]
NEGATIVES = ["bir bir", "dal fan", "gos hon jis", "kan lil"]


def by_hand(queries, documents, positives):
    """Returns (accuracy, MRR) of cosine scores, from ranks counted one pair at a time; ``positives``: sets."""
    hits, reciprocal = 0.0, 0.0
    for query, right in zip(queries, positives, strict=True):
        scores = [float(query @ document / (query.norm() * document.norm())) for document in documents]
        rank = 1 + sum(s > max(scores[p] for p in right) for i, s in enumerate(scores) if i not in right)
        hits += rank == 1
        reciprocal += 1 / rank
    return hits / len(queries), reciprocal / len(queries)


def features(model, *columns):
    return [model.preprocess(list(texts)) for texts in columns]


def losses():
    from sentence_transformers.sentence_transformer import losses

    return losses


# ------------------------------------------------------------------------------------------------ the numbers


def test_case_47_ranks_1_2_1_4():
    # Ranks 1, 2, 1, 4: accuracy 2/4; MRR (1 + 1/2 + 1 + 1/4) / 4 = 0.6875.
    found = in_batch_metrics(CASE_47)
    assert found == {"acc": 0.5, "mrr": 0.6875, "candidates": 4}
    assert {type(value) for value in found.values()} == {float, int}


def test_case_47_constant_scores_are_chance():
    found = in_batch_metrics(torch.ones(4, 4))
    assert found["acc"] == pytest.approx(0.25)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert in_batch_metrics(torch.ones(4, 4), ties="worst") == {"acc": 0.0, "mrr": 0.25, "candidates": 4}


def test_case_47_equal_positives_are_not_negatives_of_each_other():
    scores = torch.tensor([[0.9, 0.1, 0.9], [0.2, 0.8, 0.2], [0.9, 0.1, 0.9]])
    same = torch.tensor([[True, False, True], [False, True, False], [True, False, True]])
    assert in_batch_metrics(scores, positives=same) == {"acc": 1.0, "mrr": 1.0, "candidates": 3}
    assert in_batch_metrics(scores)["acc"] == pytest.approx(2 / 3)  # (1/2 + 1 + 1/2) / 3


def test_case_47_two_devices_give_the_same_in_either_order_of_candidates():
    scores = torch.tensor([[0.8, 0.3, 0.9, 0.1], [0.2, 0.7, 0.1, 0.5]])  # p0 p1 n0 n1
    gathered = in_batch_metrics(scores, positives=torch.tensor([0, 1]))
    interleaved = in_batch_metrics(scores[:, [0, 2, 1, 3]], positives=torch.tensor([0, 2]))  # p0 n0 p1 n1
    assert gathered == interleaved == {"acc": 0.5, "mrr": 0.75, "candidates": 4}


@pytest.mark.parametrize("n_negs", [0, 1, 3])
def test_positives_at_column_i_times_1_plus_k(n_negs):
    n, width = 3, 3 * (1 + n_negs)
    scores = torch.rand(n, width, generator=torch.Generator().manual_seed(n_negs)) * 0.5
    for i in range(n):
        scores[i, i * (1 + n_negs)] = 0.9
    assert in_batch_metrics(scores, n_negs) == {"acc": 1.0, "mrr": 1.0, "candidates": width}
    scores[1, -1] = 0.95  # one competitor above the positive of query 1
    assert in_batch_metrics(scores, n_negs)["acc"] == pytest.approx(2 / 3)
    assert in_batch_metrics(scores, n_negs)["mrr"] == pytest.approx((1 + 1 / 2 + 1) / 3)


def test_both_layouts_of_the_same_batch_give_the_same():
    n, n_negs = 4, 2
    interleaved = torch.rand(n, n * (1 + n_negs), generator=torch.Generator().manual_seed(0))
    # sentence-transformers: all positives, then the first negative of every query, then the second.
    order = [i * (1 + n_negs) + j for j in range(1 + n_negs) for i in range(n)]
    assert in_batch_metrics(interleaved, n_negs) == in_batch_metrics(interleaved[:, order])
    assert in_batch_metrics(interleaved, n_negs) != in_batch_metrics(interleaved)


@st.composite
def small_batches(draw):
    n = draw(st.integers(1, 3))
    width = draw(st.integers(n, 5))
    cells = st.integers(-1, 2)
    scores = draw(st.lists(st.lists(cells, min_size=width, max_size=width), min_size=n, max_size=n))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=n, max_size=n))
    for i, row in enumerate(mask):
        row[i] = True
    return scores, mask


@settings(deadline=None, max_examples=150)
@given(small_batches())
def test_ties_against_all_orders_of_the_tied(batch):
    scores, mask = batch
    expected_acc, expected_mrr, worst_acc, worst_mrr = [], [], [], []
    for row, right in zip(scores, mask, strict=True):
        target = max(s for s, r in zip(row, right, strict=True) if r)
        pool = [("positive", target)] + [("other", s) for s, r in zip(row, right, strict=True) if not r]
        ranks = set()
        all_ranks = []
        for order in itertools.permutations(pool):
            ranked = sorted(order, key=lambda entry: -entry[1])
            all_ranks.append([name for name, _ in ranked].index("positive") + 1)
            ranks.add(all_ranks[-1])
        expected_acc.append(sum(rank == 1 for rank in all_ranks) / len(all_ranks))
        expected_mrr.append(sum(1 / rank for rank in all_ranks) / len(all_ranks))
        worst_acc.append(float(max(ranks) == 1))
        worst_mrr.append(1 / max(ranks))
    n = len(scores)
    table, positives = torch.tensor(scores, dtype=torch.float32), torch.tensor(mask)
    found = in_batch_metrics(table, positives=positives)
    assert found["acc"] == pytest.approx(sum(expected_acc) / n)
    assert found["mrr"] == pytest.approx(sum(expected_mrr) / n)
    worst = in_batch_metrics(table, positives=positives, ties="worst")
    assert worst["acc"] == pytest.approx(sum(worst_acc) / n)
    assert worst["mrr"] == pytest.approx(sum(worst_mrr) / n)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_batch_without_one_finite_score_looks_no_better_than_chance(value, dtype):
    found = in_batch_metrics(torch.full((4, 4), value, dtype=dtype))
    assert found["acc"] <= 0.25
    assert found["mrr"] <= (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4 + 1e-12
    assert in_batch_metrics(torch.full((4, 4), value, dtype=dtype), ties="worst")["acc"] == 0.0


def test_a_nan_positive_ranks_last():
    scores = torch.eye(3)
    scores[0, 0] = math.nan
    found = in_batch_metrics(scores)
    assert found["acc"] == pytest.approx(2 / 3)
    assert found["mrr"] == pytest.approx((1 / 3 + 1 + 1) / 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_or_infinite_competitor_ranks_first(value):
    scores = torch.eye(3)
    scores[0, 2] = value
    found = in_batch_metrics(scores)
    assert found["acc"] == pytest.approx(2 / 3)
    assert found["mrr"] == pytest.approx((1 / 2 + 1 + 1) / 3)


def test_overflow_of_positive_and_competitor_is_a_tie_at_best():
    scores = torch.tensor([[math.inf, math.inf], [0.0, 1.0]])
    assert in_batch_metrics(scores)["acc"] <= 0.75


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_and_double_input(dtype):
    assert in_batch_metrics(CASE_47.to(dtype)) == {"acc": 0.5, "mrr": 0.6875, "candidates": 4}


def test_bf16_scores_that_round_to_one_value_tie():
    scores = torch.tensor([[1.0, 1.001], [0.0, 1.0]], dtype=torch.bfloat16)
    assert scores[0, 0] == scores[0, 1]
    assert in_batch_metrics(scores)["acc"] == pytest.approx(0.75)  # (1/2 + 1) / 2


def test_large_batch_of_equal_scores_is_exact():
    n = 2_000
    found = in_batch_metrics(torch.ones(2, n), positives=torch.tensor([0, n - 1]))
    assert found["acc"] == pytest.approx(1 / n)
    assert found["mrr"] == pytest.approx(math.fsum(1 / r for r in range(1, n + 1)) / n, rel=1e-12)


def test_the_scores_are_not_changed():
    scores = torch.tensor([[1.0, math.nan], [0.0, 1.0]])
    before = scores.clone()
    in_batch_metrics(scores)
    assert torch.equal(scores.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("scores", "options", "text"),
    [
        (torch.ones(4), {}, "[queries, candidates]"),
        (torch.ones(2, 2, 2), {}, "[queries, candidates]"),
        (torch.ones(0, 4), {}, "not empty"),
        (torch.ones(4, 0), {}, "not empty"),
        (torch.ones(4, 3), {}, "(4, 3)"),
        (torch.ones(4, 4), {"n_negs": 1}, "n_negs=1"),
        (torch.ones(4, 4), {"n_negs": -1}, "0 or more"),
        (torch.ones(4, 4), {"positives": torch.tensor([0, 1])}, "positives"),
        (torch.ones(2, 4), {"positives": torch.tensor([0, 4])}, "positives"),
        (torch.ones(2, 4), {"positives": torch.tensor([0, -1])}, "positives"),
        (torch.ones(2, 4), {"positives": torch.ones(2, 3, dtype=torch.bool)}, "(2, 4)"),
        (torch.ones(2, 2), {"positives": torch.tensor([[True, False], [False, False]])}, "every row"),
    ],
)
def test_shapes_that_do_not_fit(scores, options, text):
    with pytest.raises(DataError) as found:
        in_batch_metrics(scores, **options)
    assert text in str(found.value)
    assert isinstance(found.value, ValueError)


def test_unknown_tie_rule():
    with pytest.raises(SettingError, match="'trec' is unknown; choose expected or worst"):
        in_batch_metrics(CASE_47, ties="trec")


def test_the_package_exports_it():
    assert fullrank.in_batch_metrics is in_batch_metrics


def test_equal_texts_are_equal_ids_under_the_mask():
    def groups(*columns):
        keys = text_keys(columns).flatten()
        return torch.eq(keys[:, None], keys[None, :])

    ids = torch.tensor([[5, 6, 0], [5, 6, 9], [5, 0, 0], [5, 6, 0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 0, 0]])
    # Rows 0 and 1 read "5 6"; row 2 reads "5 0"; row 3 reads "5".
    expected = torch.eye(4, dtype=torch.bool)
    expected[0, 1] = expected[1, 0] = True
    positives = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(groups(positives), expected)
    # A column of negatives that is padded to another width: "5", "5 6", "7", "5 0".
    ids = torch.tensor([[5, 0, 0, 0], [5, 6, 0, 0], [7, 0, 0, 0], [5, 0, 0, 0]])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    found = groups(positives, {"input_ids": ids, "attention_mask": mask})
    assert torch.equal(found[:4, :4], expected)
    assert found[:4, 4:].tolist() == [
        [False, True, False, False],
        [False, True, False, False],
        [False, False, False, True],
        [True, False, False, False],
    ]
    # The same texts with the padding in front are the same texts.
    flipped = {
        "input_ids": torch.tensor([[0, 5, 6], [9, 5, 6]]),
        "attention_mask": torch.tensor([[0, 1, 1], [0, 1, 1]]),
    }
    assert bool(torch.eq(text_keys([flipped])[0], text_keys([positives])[0][0]).all())
    # An order of tokens is part of a text.
    turned = {"input_ids": torch.tensor([[5, 6], [6, 5]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)}
    assert not bool(groups(turned)[0, 1])


def test_texts_that_cannot_be_told_have_no_keys():
    ids = torch.ones(2, 3, dtype=torch.int64)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert text_keys([text]).shape == (1, 2)
    assert text_keys([{**text, "token_embeddings": torch.ones(2, 3, 4)}]) is not None
    assert text_keys([]) is None
    assert text_keys([{"input_ids": ids}]) is None
    assert text_keys([text, {"input_ids": ids[:1], "attention_mask": ids[:1]}]) is None
    assert text_keys([{**text, "pixel_values": torch.ones(2, 3)}]) is None, "two images behind one prompt are not equal"
    assert text_keys(["a text"]) is None


def test_keys_tell_many_texts_apart():
    ids = torch.randint(0, 30_000, (20_000, 12), generator=torch.Generator().manual_seed(0))
    ids[1::2] = ids[::2]
    ids[1::2, 5] += 1 << torch.arange(10_000) % 16  # pairs that differ in one token
    (keys,) = text_keys([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    assert len(keys.unique()) == 20_000


# ------------------------------------------------------------------------------------------------ the monitor by itself


def test_flush_gives_means_over_queries_and_empties():
    monitor = InBatchMonitor()
    assert monitor.flush() == {}
    monitor.record(CASE_47)  # 4 queries: .5, .6875, 4 candidates
    monitor.record(torch.eye(2))  # 2 queries: 1, 1, 2
    monitor.record(1 - torch.eye(2))  # 2 queries: 0, .5, 2
    found = monitor.flush()
    assert found == {
        "in_batch_acc": pytest.approx((4 * 0.5 + 2 * 1 + 2 * 0) / 8),
        "in_batch_mrr": pytest.approx((4 * 0.6875 + 2 * 1 + 2 * 0.5) / 8),
        "in_batch_candidates": pytest.approx((4 * 4 + 2 * 2 + 2 * 2) / 8),
    }
    assert {type(value) for value in found.values()} == {float}
    assert monitor.flush() == {}
    monitor.record(torch.eye(2))
    assert monitor.flush()["in_batch_acc"] == 1.0


def test_record_takes_negatives_and_positives_as_the_function_does():
    monitor = InBatchMonitor()
    scores = torch.tensor([[0.8, 0.3, 0.9, 0.1], [0.2, 0.7, 0.1, 0.5]])
    monitor.record(scores[:, [0, 2, 1, 3]], n_negs=1)
    by_width = monitor.flush()
    monitor.record(scores, positives=torch.tensor([0, 1]))
    assert by_width == monitor.flush() == {"in_batch_acc": 0.5, "in_batch_mrr": 0.75, "in_batch_candidates": 4.0}


def test_record_keeps_no_graph_alive():
    monitor = InBatchMonitor()
    weight = torch.ones(4, 4, requires_grad=True)
    middle = weight.exp()  # its backward needs its result: while the graph lives, so does this tensor's storage
    scores = middle * 2
    alive = [weakref.ref(scores), weakref.ref(scores.untyped_storage()), weakref.ref(middle.untyped_storage())]
    monitor.record(scores)
    del scores, middle
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    assert monitor.flush()["in_batch_candidates"] == 4.0


# ------------------------------------------------------------------------------------------------ real losses


def make_loss(kind, model):
    module = losses()
    if kind == "plain":
        return module.MultipleNegativesRankingLoss(model)
    if kind == "cached":
        return module.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    if kind in ("gist", "cached gist"):
        guide = copy.deepcopy(model).eval()
        guide[1] = type(guide[1])(32, pooling_mode="cls")
        if kind == "gist":
            return module.GISTEmbedLoss(model, guide, margin=-5.0)  # the guide takes nothing out
        return module.CachedGISTEmbedLoss(model, guide, mini_batch_size=3, margin=-5.0)
    if kind == "adaptive plain":
        return module.AdaptiveLayerLoss(model, make_loss("plain", model))
    inner = make_loss(kind.removeprefix("matryoshka "), model)
    return module.MatryoshkaLoss(model, inner, [8, 32, 16])


KINDS = ("plain", "cached", "matryoshka plain", "matryoshka cached")
GUIDED = ("gist", "cached gist", "matryoshka gist", "matryoshka cached gist")
ALL_KINDS = (*KINDS, *GUIDED, "adaptive plain")


@pytest.mark.parametrize("columns", [(QUERIES, POSITIVES), (QUERIES, POSITIVES, NEGATIVES)], ids=["pairs", "triplets"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_record_what_the_embeddings_say(tiny_st, kind, columns):
    model = tiny_st().eval()  # no dropout
    monitor, loss = InBatchMonitor(), make_loss(kind, model)
    assert monitor.watch_loss(loss) is True
    loss(features(model, *columns), None)
    found = monitor.flush()
    vectors = [model.encode(list(texts), convert_to_tensor=True) for texts in columns]
    documents = torch.cat(vectors[1:])
    acc, mrr = by_hand(vectors[0], documents, [{i} for i in range(4)])
    assert 0 < mrr < 1, "the batch must be able to tell"
    assert found == {
        "in_batch_acc": pytest.approx(acc),
        "in_batch_mrr": pytest.approx(mrr),
        "in_batch_candidates": 4.0 * (len(columns) - 1),
        **({"in_batch_dim": 32.0} if "matryoshka" in kind else {}),
    }


def test_matryoshka_records_the_largest_dimension_that_it_sees(tiny_st):
    model = tiny_st().eval()
    loss = losses().MatryoshkaLoss(model, losses().MultipleNegativesRankingLoss(model), [2, 3])
    monitor = InBatchMonitor()
    assert monitor.watch_loss(loss)
    texts = [QUERIES + NEGATIVES, POSITIVES + list(reversed(NEGATIVES))]
    loss(features(model, *texts), None)
    vectors = [model.encode(part, convert_to_tensor=True) for part in texts]
    at_3 = by_hand(vectors[0][:, :3], vectors[1][:, :3], [{i} for i in range(8)])
    at_2 = by_hand(vectors[0][:, :2], vectors[1][:, :2], [{i} for i in range(8)])
    assert at_3 != at_2, "the batch must be able to tell"
    found = monitor.flush()
    assert (found["in_batch_acc"], found["in_batch_mrr"]) == (pytest.approx(at_3[0]), pytest.approx(at_3[1]))
    assert found["in_batch_candidates"] == 8.0


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_one_batch_counts_once_and_several_are_averaged(tiny_st, kind):
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss(kind, model)
    monitor.watch_loss(loss)
    single = []
    for cut in (2, 4):
        loss(features(model, QUERIES[:cut], POSITIVES[:cut]), None)
        single.append(monitor.flush())
    for cut in (2, 4):
        loss(features(model, QUERIES[:cut], POSITIVES[:cut]), None)
    both = monitor.flush()
    assert both == {name: pytest.approx((2 * single[0][name] + 4 * single[1][name]) / 6) for name in single[0]}
    assert both["in_batch_candidates"] == pytest.approx((2 * 2 + 4 * 4) / 6)
    assert monitor.flush() == {}


def test_a_loss_that_is_watched_twice_counts_a_batch_once(tiny_st):
    """The same loss object may serve several datasets of a trainer."""
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss("plain", model)
    monitor.watch_loss(loss)
    monitor.watch_loss(loss)
    loss(features(model, QUERIES, POSITIVES), None)
    loss(features(model, QUERIES[:2], POSITIVES[:2]), None)
    assert monitor.flush()["in_batch_candidates"] == pytest.approx((4 * 4 + 2 * 2) / 6)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_equal_positives_are_recognised(tiny_st, kind):
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss(kind, model)
    monitor.watch_loss(loss)
    positives = [POSITIVES[0], POSITIVES[1], POSITIVES[0], POSITIVES[1]]
    loss(features(model, QUERIES, positives), None)
    vectors = [model.encode(texts, convert_to_tensor=True) for texts in (QUERIES, positives)]
    acc, mrr = by_hand(*vectors, [{0, 2}, {1, 3}, {0, 2}, {1, 3}])
    found = monitor.flush()
    assert (found["in_batch_acc"], found["in_batch_mrr"]) == (pytest.approx(acc), pytest.approx(mrr))


def test_equal_positives_all_round_are_always_right(tiny_st):
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss("plain", model)
    monitor.watch_loss(loss)
    loss(features(model, QUERIES, [POSITIVES[0]] * 4), None)
    assert monitor.flush() == {"in_batch_acc": 1.0, "in_batch_mrr": 1.0, "in_batch_candidates": 4.0}


def test_a_hard_negative_that_is_the_positive_of_the_query_is_not_a_negative(tiny_st):
    """Mined negatives of one query are often the answers of another: equal texts are not negatives of each other."""
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss("plain", model)
    monitor.watch_loss(loss)
    negatives = [POSITIVES[1], POSITIVES[0]]  # of queries 0 and 1: each the positive of the other
    loss(features(model, QUERIES[:2], POSITIVES[:2], negatives), None)
    vectors = [model.encode(texts, convert_to_tensor=True) for texts in (QUERIES[:2], POSITIVES[:2] + negatives)]
    acc, mrr = by_hand(*vectors, [{0, 3}, {1, 2}])
    found = monitor.flush()
    assert (found["in_batch_acc"], found["in_batch_mrr"]) == (pytest.approx(acc), pytest.approx(mrr))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_loss_gradients_and_random_state_are_bit_equal_with_and_without(tiny_st, kind):
    outcomes = []
    for watched in (False, True):
        model = tiny_st().train()  # with dropout
        loss = make_loss(kind, model)
        if watched:
            InBatchMonitor().watch_loss(loss)
        torch.manual_seed(0)
        random.seed(0)  # which layer AdaptiveLayerLoss takes
        value = loss(features(model, QUERIES, POSITIVES, NEGATIVES), None)
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        outcomes.append((value.detach(), gradients, torch.get_rng_state()))
    (bare, bare_gradients, bare_state), (value, gradients, state) = outcomes
    assert torch.equal(bare, value)
    assert bare_gradients.keys() == gradients.keys()
    assert any(bool(g.any()) for g in bare_gradients.values())
    assert all(torch.equal(bare_gradients[name], gradients[name]) for name in gradients)
    assert torch.equal(bare_state, state)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_nothing_is_recorded_without_gradients(tiny_st, kind):
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss(kind, model)
    monitor.watch_loss(loss)
    with torch.no_grad():
        loss(features(model, QUERIES, POSITIVES), None)
    assert monitor.flush() == {}
    loss(features(model, QUERIES, POSITIVES), None)
    assert monitor.flush()["in_batch_candidates"] == 4.0


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_no_graph_is_kept_alive(tiny_st, kind):
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss(kind, model)
    monitor.watch_loss(loss)
    seen = []

    def remember(_module, _args, output):
        seen.append(weakref.ref(output["sentence_embedding"]))

    handle = model[1].register_forward_hook(remember)
    value = loss(features(model, QUERIES, POSITIVES), None)
    handle.remove()
    assert seen
    del value  # never sent backward: the graph hangs on what the monitor may hold
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)
    assert monitor.flush()["in_batch_candidates"] == 4.0


def test_a_batch_that_fails_leaves_the_next_one_whole(tiny_st):
    model = tiny_st().eval()
    monitor, loss = InBatchMonitor(), make_loss("plain", model)
    monitor.watch_loss(loss)
    with pytest.raises(ValueError, match="at least 2 embeddings"):
        loss(features(model, QUERIES), None)
    assert monitor.flush() == {}
    loss(features(model, QUERIES, POSITIVES), None)
    assert monitor.flush()["in_batch_candidates"] == 4.0


@pytest.mark.parametrize(
    ("name", "n_columns", "labels"),
    [
        ("CosineSimilarityLoss", 2, torch.tensor([1.0, 0.0, 0.5, 1.0])),
        ("CoSENTLoss", 2, torch.tensor([1.0, 0.0, 0.5, 1.0])),
        ("AnglELoss", 2, torch.tensor([1.0, 0.0, 0.5, 1.0])),
        ("ContrastiveLoss", 2, torch.tensor([1, 0, 1, 1])),
        ("OnlineContrastiveLoss", 2, torch.tensor([1, 0, 1, 1])),
        ("TripletLoss", 3, None),
        ("MarginMSELoss", 3, torch.tensor([0.1, 0.2, 0.3, 0.4])),
        ("BatchAllTripletLoss", 1, torch.tensor([0, 0, 1, 1])),
    ],
)
def test_losses_that_rank_nothing_in_the_batch_are_left_alone(tiny_st, name, n_columns, labels):
    model = tiny_st().eval()
    loss = getattr(losses(), name)(model)
    columns = (QUERIES, POSITIVES, NEGATIVES)[:n_columns]
    bare = loss(features(model, *columns), labels).detach()
    monitor = InBatchMonitor()
    assert monitor.watch_loss(loss) is False
    assert torch.equal(loss(features(model, *columns), labels).detach(), bare)
    assert monitor.flush() == {}


@pytest.mark.parametrize("name", ["MegaBatchMarginLoss", "GlobalOrthogonalRegularizationLoss"])
def test_other_losses_still_work(tiny_st, name):
    model = tiny_st().eval()
    loss = getattr(losses(), name)(model)
    bare = loss(features(model, QUERIES, POSITIVES), None)
    monitor = InBatchMonitor()
    monitor.watch_loss(loss)
    found = loss(features(model, QUERIES, POSITIVES), None)
    assert str(found) == str(bare)


def test_a_similarity_of_the_users_own_is_used(tiny_st):
    from sentence_transformers.util import dot_score

    model = tiny_st().eval()
    loss = losses().MultipleNegativesRankingLoss(model, similarity_fct=lambda a, b: -dot_score(a, b))
    monitor = InBatchMonitor()
    monitor.watch_loss(loss)
    loss(features(model, QUERIES, POSITIVES), None)
    queries, documents = (model.encode(texts, convert_to_tensor=True) for texts in (QUERIES, POSITIVES))
    expected = in_batch_metrics(-(queries @ documents.T))
    assert expected != in_batch_metrics(queries @ documents.T), "the batch must be able to tell"
    found = monitor.flush()
    assert (found["in_batch_acc"], found["in_batch_mrr"]) == (
        pytest.approx(expected["acc"]),
        pytest.approx(expected["mrr"]),
    )


# ------------------------------------------------------------------------------------------------ models with scores


class BiEncoder(nn.Module):
    """As in a plain Trainer: queries and documents in, loss and scores out."""

    def __init__(self, form=dict):
        super().__init__()
        self.project, self.form = nn.Linear(4, 3, bias=False), form

    def forward(self, queries, documents):
        scores = self.project(queries) @ self.project(documents).T
        n_negs = documents.shape[0] // queries.shape[0] - 1
        labels = torch.arange(len(queries)) * (1 + n_negs)
        return self.form(loss=nn.functional.cross_entropy(scores, labels), scores=scores)


def output_type():
    from dataclasses import dataclass

    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):
        loss: torch.Tensor | None = None
        scores: torch.Tensor | None = None

    return Output


@pytest.mark.parametrize("n_negs", [0, 2])
@pytest.mark.parametrize("form", ["dict", "ModelOutput", "object"])
def test_watch_model_reads_the_scores_that_the_model_returns(n_negs, form):
    from types import SimpleNamespace

    torch.manual_seed(0)
    model = BiEncoder({"dict": dict, "ModelOutput": output_type(), "object": SimpleNamespace}[form])
    monitor = InBatchMonitor()
    monitor.watch_model(model)
    queries, documents = torch.randn(3, 4), torch.randn(3 * (1 + n_negs), 4)
    out = model(queries, documents)
    scores = out["scores"] if form == "dict" else out.scores
    expected = in_batch_metrics(scores.detach(), n_negs)
    assert monitor.flush() == {
        "in_batch_acc": pytest.approx(expected["acc"]),
        "in_batch_mrr": pytest.approx(expected["mrr"]),
        "in_batch_candidates": 3.0 * (1 + n_negs),
    }


def test_watch_model_leaves_loss_and_gradients_as_they_are():
    queries, documents = torch.randn(3, 4), torch.randn(3, 4)
    outcomes = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = BiEncoder()
        if watched:
            InBatchMonitor().watch_model(model)
        loss = model(queries, documents)["loss"]
        loss.backward()
        outcomes.append((loss.detach(), model.project.weight.grad))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert outcomes[0][1].any()


def test_watch_model_records_nothing_without_gradients_and_keeps_no_graph():
    model, monitor = BiEncoder(), InBatchMonitor()
    monitor.watch_model(model)
    with torch.no_grad():
        model(torch.randn(3, 4), torch.randn(3, 4))
    assert monitor.flush() == {}
    out = model(torch.randn(3, 4), torch.randn(3, 4))
    alive = weakref.ref(out["scores"])
    del out
    gc.collect()
    assert alive() is None
    assert monitor.flush()["in_batch_candidates"] == 3.0


@pytest.mark.parametrize(
    "output",
    [
        {"loss": torch.tensor(1.0)},
        {"loss": torch.tensor(1.0), "scores": None},
        {"loss": torch.tensor(1.0), "scores": torch.ones(5)},
        {"loss": torch.tensor(1.0), "scores": torch.ones(3, 4)},
        {"loss": torch.tensor(1.0), "scores": torch.ones(0, 0)},
        (torch.tensor(1.0), torch.ones(3, 3)),
        torch.tensor(1.0),
    ],
    ids=["no scores", "None", "flat", "ragged", "empty", "tuple", "tensor"],
)
def test_watch_model_passes_by_what_it_cannot_read(output):
    class Fixed(nn.Module):
        def forward(self):
            return output

    model, monitor = Fixed(), InBatchMonitor()
    monitor.watch_model(model)
    assert model() is output
    assert monitor.flush() == {}


def test_record_takes_lists_and_refuses_what_is_no_table():
    monitor = InBatchMonitor()
    monitor.record([[0.9, 0.1], [0.8, 0.2]])
    assert monitor.flush()["in_batch_acc"] == 0.5
    with pytest.raises(DataError, match=r"scores must be a tensor \[queries, candidates\], got a str"):
        monitor.record("scores")
