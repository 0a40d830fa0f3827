"""What the losses of sentence-transformers see: guided, gathered, sampled, wrapped; in loops and in a real trainer."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from torch import nn
from transformers import TrainerCallback

from fullrank.hooks import TrainerLink
from fullrank.in_batch import InBatchMonitor

SYLLABLES = [a + b + c for a in "bcdfghjklm" for b in "aio" for c in "lnrst"]
RNG = random.Random(3)
WORDS = [RNG.sample(SYLLABLES, 9) for _ in range(12)]
QUERIES = [" ".join(words[:4]) for words in WORDS]
POSITIVES = [" ".join(words[3:7]) for words in WORDS]
NEGATIVES = [" ".join(words[6:]) for words in WORDS]


def batch(model, *columns):
    return [model.preprocess(list(texts)) for texts in columns]


def vectors_of(model, *columns):
    return [model.encode(list(texts), convert_to_tensor=True) for texts in columns]


def guide_of(model):
    guide = copy.deepcopy(model).eval()
    guide[1] = type(guide[1])(32, pooling_mode="cls")
    return guide


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def by_hand(queries, columns, texts, *, offset=0, taken_out=lambda i, j: False):
    """Returns accuracy, MRR and candidates, counted one pair at a time.

    ``columns``: vectors of positives, then of each column of negatives, all processes; ``texts``: theirs. The positive
    of query i is row ``offset + i`` of the first column; ``taken_out(i, j)``: candidate j is none for query i.
    """
    documents, names = torch.cat(columns), [name for column in texts for name in column]
    hits = reciprocal = candidates = 0.0
    for i, query in enumerate(queries):
        own = offset + i
        pool = [j for j in range(len(documents)) if not taken_out(i, j)]
        scores = {j: cosine(query, documents[j]) for j in pool}
        best = max(scores[j] for j in pool if names[j] == names[own])
        rank = 1 + sum(scores[j] > best for j in pool if names[j] != names[own])
        hits, reciprocal, candidates = hits + (rank == 1), reciprocal + 1 / rank, candidates + len(pool)
    n = len(queries)
    return {"in_batch_acc": hits / n, "in_batch_mrr": reciprocal / n, "in_batch_candidates": candidates / n}


def guided(queries, columns, *, offset=0, margin=0.0, relative=False):
    """Returns ``taken_out`` from the vectors of a guide: documents that it finds nearer than the positive."""
    documents = torch.cat(columns)

    def taken_out(i, j):
        own = cosine(queries[i], documents[offset + i])
        bar = own - (abs(own) * margin if relative else margin)
        return j != offset + i and cosine(queries[i], documents[j]) > bar

    return taken_out


def close(expected, **more):
    return {**{name: pytest.approx(value) for name, value in expected.items()}, **more}


def numbers(loss, columns, model, *, monitor=None):
    monitor = monitor or InBatchMonitor()
    assert monitor.watch_loss(loss) is True
    loss(batch(model, *columns), None)
    return monitor.flush()


# ------------------------------------------------------------------------------------------------ what a guide leaves


@pytest.mark.parametrize("columns", [(QUERIES, POSITIVES), (QUERIES, POSITIVES, NEGATIVES)], ids=["pairs", "triplets"])
@pytest.mark.parametrize(("anchors", "positives"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("cached", [False, True])
def test_guided_losses_rank_the_documents_that_the_guide_has_left(tiny_st, cached, anchors, positives, columns):
    model = tiny_st().eval()
    guide = guide_of(model)
    options = {"contrast_anchors": anchors, "contrast_positives": positives}
    if cached:
        loss = losses.CachedGISTEmbedLoss(model, guide, mini_batch_size=5, **options)
    else:
        loss = losses.GISTEmbedLoss(model, guide, **options)
    own, others = vectors_of(model, *columns), vectors_of(guide, *columns)
    expected = by_hand(own[0], own[1:], columns[1:], taken_out=guided(others[0], others[1:]))
    full = by_hand(own[0], own[1:], columns[1:])
    assert expected["in_batch_mrr"] != full["in_batch_mrr"], "the guide must change the ranks"
    assert expected["in_batch_candidates"] < full["in_batch_candidates"]
    assert numbers(loss, columns, model) == close(expected)


@pytest.mark.parametrize(("strategy", "margin"), [("absolute", 0.1), ("relative", 0.1), ("absolute", -0.1)])
@pytest.mark.parametrize("cached", [False, True])
def test_margins_of_the_guide(tiny_st, cached, strategy, margin):
    model = tiny_st().eval()
    guide = guide_of(model)
    kind = losses.CachedGISTEmbedLoss if cached else losses.GISTEmbedLoss
    loss = kind(model, guide, margin_strategy=strategy, margin=margin)
    columns = (QUERIES, POSITIVES, NEGATIVES)
    own, others = vectors_of(model, *columns), vectors_of(guide, *columns)
    taken_out = guided(others[0], others[1:], margin=margin, relative=strategy == "relative")
    assert numbers(loss, columns, model) == close(by_hand(own[0], own[1:], columns[1:], taken_out=taken_out))


def test_a_cached_guided_loss_takes_several_columns_of_negatives(tiny_st):
    model = tiny_st().eval()
    guide = guide_of(model)
    columns = (QUERIES, POSITIVES, NEGATIVES, list(reversed(QUERIES)))
    own, others = vectors_of(model, *columns), vectors_of(guide, *columns)
    expected = by_hand(own[0], own[1:], columns[1:], taken_out=guided(others[0], others[1:]))
    assert numbers(losses.CachedGISTEmbedLoss(model, guide, mini_batch_size=5), columns, model) == close(expected)


@pytest.mark.parametrize("cached", [False, True])
def test_guided_losses_know_equal_positives(tiny_st, cached):
    model = tiny_st().eval()
    kind = losses.CachedGISTEmbedLoss if cached else losses.GISTEmbedLoss
    columns = (QUERIES[:4], [POSITIVES[0], POSITIVES[1], POSITIVES[0], POSITIVES[1]])
    found = numbers(kind(model, guide_of(model), margin=-5.0), columns, model)
    own = vectors_of(model, *columns)
    assert found == close(by_hand(own[0], own[1:], columns[1:]))
    # The guide may take the equal ones out: they are no negatives then either.
    found = numbers(kind(model, guide_of(model), margin=5.0), columns, model)
    assert found == {"in_batch_acc": 1.0, "in_batch_mrr": 1.0, "in_batch_candidates": 1.0}


# ------------------------------------------------------------------------------------------------ settings, wrappers

SETTINGS = [
    {"directions": ("query_to_doc", "doc_to_query")},
    {"directions": ("doc_to_query", "query_to_doc"), "partition_mode": "per_direction"},
    {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    {"hardness_mode": "hard_negatives", "hardness_strength": 9.0},
    {"hardness_mode": "all_negatives", "hardness_strength": 9.0, "directions": ("query_to_doc", "doc_to_doc")},
    {"scale": 1.0},
    {"gather_across_devices": True},  # in one process: nothing to gather
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_every_setting_gives_the_ranks_of_documents_for_queries(tiny_st, cached, options):
    model = tiny_st().eval()
    if cached:
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=5, **options)
    else:
        loss = losses.MultipleNegativesRankingLoss(model, **options)
    columns = (QUERIES, POSITIVES, NEGATIVES, list(reversed(QUERIES)))
    own = vectors_of(model, *columns)
    expected = by_hand(own[0], own[1:], columns[1:])
    assert 0 < expected["in_batch_mrr"] < 1
    assert numbers(loss, columns, model) == close(expected)


@pytest.mark.parametrize("cached", [False, True])
def test_symmetric_losses(tiny_st, cached):
    model = tiny_st().eval()
    name = f"{'Cached' if cached else ''}MultipleNegativesSymmetricRankingLoss"
    with pytest.warns(DeprecationWarning, match="deprecated"):
        loss = getattr(losses, name)(model, **({"mini_batch_size": 5} if cached else {}))
    own = vectors_of(model, QUERIES, POSITIVES)
    assert numbers(loss, (QUERIES, POSITIVES), model) == close(by_hand(own[0], own[1:], [POSITIVES]))


def test_a_similarity_that_is_a_module(tiny_st):
    class Dot(nn.Module):
        def forward(self, a, b):
            return a @ b.T

    model = tiny_st(normalize=True).eval()
    loss = losses.MultipleNegativesRankingLoss(model, similarity_fct=Dot())
    before = loss.similarity_fct
    own = vectors_of(model, QUERIES, POSITIVES)
    assert numbers(loss, (QUERIES, POSITIVES), model) == close(by_hand(own[0], own[1:], [POSITIVES]))
    assert loss.similarity_fct is before
    assert "Dot" in str(loss)


@pytest.mark.parametrize("kind", ["plain", "cached", "gist", "cached gist"])
def test_a_loss_is_as_it_was_after_a_batch(tiny_st, kind):
    """Its description goes into the model card."""
    model = tiny_st().eval()
    loss = make(kind, model)
    before = {name: str(value) for name, value in loss.get_config_dict().items()}
    numbers(loss, (QUERIES, POSITIVES), model)
    assert {name: str(value) for name, value in loss.get_config_dict().items()} == before


def make(kind, model):
    if kind == "plain":
        return losses.MultipleNegativesRankingLoss(model)
    if kind == "cached":
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=5)
    if kind == "gist":
        return losses.GISTEmbedLoss(model, guide_of(model))
    return losses.CachedGISTEmbedLoss(model, guide_of(model), mini_batch_size=5)


def expected_at(kind, model, dim):
    own = [vectors[:, :dim] for vectors in vectors_of(model, QUERIES, POSITIVES)]
    others = vectors_of(guide_of(model), QUERIES, POSITIVES)
    taken_out = guided(others[0], others[1:]) if "gist" in kind else lambda i, j: False
    return by_hand(own[0], own[1:], [POSITIVES], taken_out=taken_out)


@pytest.mark.parametrize("kind", ["plain", "cached", "gist", "cached gist"])
def test_matryoshka_names_the_largest_dimension_that_the_loss_sees(tiny_st, kind):
    model = tiny_st().eval()
    loss = losses.MatryoshkaLoss(model, make(kind, model), [2, 5, 3])  # 32 is not among them
    assert expected_at(kind, model, 5) != expected_at(kind, model, 32)
    found = numbers(loss, (QUERIES, POSITIVES), model)
    assert found == close(expected_at(kind, model, 5), in_batch_dim=5.0)
    assert type(found["in_batch_dim"]) is float


@pytest.mark.parametrize("kind", ["plain", "cached", "gist", "cached gist"])
def test_where_dimensions_are_drawn_the_batches_at_the_largest_one_count(tiny_st, kind):
    model = tiny_st().eval()
    loss = losses.MatryoshkaLoss(model, make(kind, model), [32, 5, 2], n_dims_per_step=1)
    monitor = InBatchMonitor()
    random.seed(5)
    single = [numbers(loss, (QUERIES, POSITIVES), model, monitor=monitor) for _ in range(12)]
    drawn = [found["in_batch_dim"] for found in single]
    assert set(drawn) == {32.0, 5.0, 2.0}
    assert drawn[0] < 32, "the largest must not come first"
    for found in single:
        assert found == close(expected_at(kind, model, int(found["in_batch_dim"])), in_batch_dim=found["in_batch_dim"])
    random.seed(5)
    for _ in range(12):
        loss(batch(model, QUERIES, POSITIVES), None)
    assert monitor.flush() == close(expected_at(kind, model, 32), in_batch_dim=32.0)


@pytest.mark.parametrize("kind", ["plain", "gist"])
def test_of_several_layers_the_last_one_counts(tiny_st, kind):
    model = tiny_st().eval()
    loss = losses.AdaptiveLayerLoss(model, make(kind, model), n_layers_per_step=-1)
    assert numbers(loss, (QUERIES, POSITIVES), model) == close(expected_at(kind, model, 32))


@pytest.mark.parametrize("kind", ["plain", "gist"])
def test_matryoshka_2d_counts_the_last_layer_also_where_another_one_is_wider(tiny_st, kind):
    model = tiny_st().eval()
    loss = losses.Matryoshka2dLoss(model, make(kind, model), [32, 5, 2], n_layers_per_step=-1, n_dims_per_step=1)
    monitor = InBatchMonitor()
    for seed in range(8):
        random.seed(seed)
        found = numbers(loss, (QUERIES, POSITIVES), model, monitor=monitor)
        dim = int(found["in_batch_dim"])
        assert found == close(expected_at(kind, model, dim), in_batch_dim=float(dim))
        random.seed(seed)
        assert [32, 5, 2][random.sample(range(3), 1)[0]] == dim, "the first draw is that of the last layer"


def test_matryoshka_around_layers(tiny_st):
    model = tiny_st().eval()
    inner = losses.AdaptiveLayerLoss(model, make("plain", model), n_layers_per_step=-1, kl_temperature=0)
    monitor = InBatchMonitor()
    assert monitor.watch_loss(inner)
    inner(batch(model, QUERIES, POSITIVES), None)
    inner(batch(model, QUERIES, POSITIVES), None)
    assert monitor.flush() == close(expected_at("plain", model, 32))
    # The loss inside serves by itself as well.
    assert numbers(inner.loss, (QUERIES, POSITIVES), model, monitor=monitor) == close(expected_at("plain", model, 32))
    assert numbers(inner.loss, (QUERIES, POSITIVES), model, monitor=monitor) == close(expected_at("plain", model, 32))


class Sum(nn.Module):
    """A wrapper that nobody knows: two losses of the same batch."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, sentence_features, labels):
        sentence_features = list(sentence_features)
        return sum(part(sentence_features, labels) for part in self.parts)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_wrapper_that_is_unknown_counts_a_batch_once(tiny_st, lazy):
    model = tiny_st().eval()
    loss = Sum(losses.TripletLoss(model), Sum(make("plain", model)), make("cached", model))
    monitor = InBatchMonitor()
    assert monitor.watch_loss(loss)
    columns = batch(model, QUERIES, POSITIVES, NEGATIVES)
    loss(iter(columns) if lazy else columns, None)
    own = vectors_of(model, QUERIES, POSITIVES, NEGATIVES)
    assert monitor.flush() == close(by_hand(own[0], own[1:], [POSITIVES, NEGATIVES]))


def test_a_loss_inside_another_and_by_itself(tiny_st):
    """As two losses of a dict: one inside a MatryoshkaLoss, the same one bare."""
    model = tiny_st().eval()
    inner = make("plain", model)
    outer = losses.MatryoshkaLoss(model, inner, [5, 2])
    monitor = InBatchMonitor()
    for loss in (inner, outer, inner):
        assert monitor.watch_loss(loss)
    outer(batch(model, QUERIES, POSITIVES), None)
    assert monitor.flush() == close(expected_at("plain", model, 5), in_batch_dim=5.0)
    inner(batch(model, QUERIES, POSITIVES), None)
    assert monitor.flush() == close(expected_at("plain", model, 32))


def test_columns_of_negatives_may_differ_from_batch_to_batch_and_a_batch_may_be_one(tiny_st):
    model = tiny_st().eval()
    loss, monitor = make("plain", model), InBatchMonitor()
    assert monitor.watch_loss(loss)
    loss(batch(model, QUERIES[:1], POSITIVES[:1]), None)
    assert monitor.flush() == {"in_batch_acc": 1.0, "in_batch_mrr": 1.0, "in_batch_candidates": 1.0}
    loss(batch(model, QUERIES, POSITIVES), None)
    loss(batch(model, QUERIES[:4], POSITIVES[:4], NEGATIVES[:4], QUERIES[4:8]), None)
    assert monitor.flush()["in_batch_candidates"] == pytest.approx((12 * 12 + 4 * 12) / 16)


def test_autocast_ranks_by_the_scores_that_the_loss_has_rounded(tiny_st):
    model = tiny_st().eval()
    loss, monitor = make("plain", model), InBatchMonitor()
    seen = []
    inner = loss.similarity_fct
    loss.similarity_fct = lambda a, b: seen.append(inner(a, b)) or seen[-1]
    assert monitor.watch_loss(loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(batch(model, QUERIES, POSITIVES), None)
    found = monitor.flush()
    assert seen[0].dtype == torch.bfloat16
    ranks = [1 + float((row > row[i]).sum()) for i, row in enumerate(seen[0])]
    tied = [int((row == row[i]).sum()) for i, row in enumerate(seen[0])]
    values = [sum(1 / (r + t) for t in range(ties)) / ties for r, ties in zip(ranks, tied, strict=True)]
    assert found["in_batch_mrr"] == pytest.approx(sum(values) / 12)


def test_losses_of_cross_encoders_have_the_same_names_and_are_left_alone():
    from sentence_transformers.cross_encoder import losses as other

    for name in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        loss = object.__new__(getattr(other, name))
        nn.Module.__init__(loss)
        assert InBatchMonitor().watch_loss(loss) is False


def test_a_subclass_that_scores_in_another_way_gives_no_numbers(tiny_st):
    class PairsOnly(losses.MultipleNegativesRankingLoss):
        def compute_loss_from_embeddings(self, embeddings, labels):
            return -self.similarity_fct(embeddings[0][:1], embeddings[1][1:2]).mean() + embeddings[0].diag().mean()

    class Flat(losses.MultipleNegativesRankingLoss):
        def compute_loss_from_embeddings(self, embeddings, labels):
            return -self.similarity_fct(embeddings[0], embeddings[1]).mean()

    model = tiny_st().eval()
    pairwise = Flat(model, similarity_fct=lambda a, b: torch.cosine_similarity(a, b))
    for loss in (pairwise, PairsOnly(model, directions=("query_to_doc", "doc_to_query"))):
        monitor = InBatchMonitor()
        assert monitor.watch_loss(loss)
        assert torch.isfinite(loss(batch(model, QUERIES, POSITIVES), None))
        assert monitor.flush() == {}


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("kind", ["plain", "cached", "gist", "cached gist"])
@pytest.mark.parametrize("matryoshka", [False, True])
def test_trained_weights_are_bit_equal_with_and_without(tiny_st, kind, matryoshka):
    outcomes = []
    for watched in (False, True):
        model = tiny_st().train()  # with dropout
        loss = make(kind, model)
        if matryoshka:
            loss = losses.MatryoshkaLoss(model, loss, [32, 8, 4], n_dims_per_step=2)
        monitor = InBatchMonitor()
        if watched:
            assert monitor.watch_loss(loss)
        torch.manual_seed(0)
        random.seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        values = []
        for _ in range(3):
            value = loss(batch(model, QUERIES, POSITIVES, NEGATIVES), None)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.detach())
        assert bool(monitor.flush()) is watched
        outcomes.append((torch.stack(values), model.state_dict(), torch.get_rng_state(), random.getstate()))
    bare, seen = outcomes
    assert torch.equal(bare[0], seen[0])
    assert len(set(bare[0].tolist())) == 3
    assert all(torch.equal(bare[1][name], seen[1][name]) for name in bare[1])
    assert torch.equal(bare[2], seen[2])
    assert bare[3] == seen[3]


def still(model):
    """Returns the model without dropout: its forwards in training are those of `encode`."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for layer in model[0].model.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    return model


def arguments(out, **options):
    return SentenceTransformerTrainingArguments(
        output_dir=str(out),
        report_to=[],
        save_strategy="no",
        learning_rate=0.0,
        per_device_train_batch_size=4,
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        **options,
    )


def train(model, out, data, loss, **options):
    """Trains with the monitor; returns the loss lines and the columns of ids of every training batch, by loss."""
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments(out, **options), train_dataset=data, loss=loss, eval_dataset=data
    )
    monitor, seen = InBatchMonitor(), []
    for each in {id(x): x for x in (loss.values() if isinstance(loss, dict) else [loss])}.values():

        def remember(module, args):
            if module.training and torch.is_grad_enabled():
                seen.append((module, [dict(features) for features in args[0]]))

        each.register_forward_pre_hook(remember)
    TrainerLink(trainer).register(TrainerCallback(), monitor)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], seen, trainer


def expected_of(model, batches):
    """Returns the numbers of the batches at the model as it stands, weighted by their queries."""
    sums, n = {}, 0
    for _, columns in batches:
        with torch.no_grad():
            own = [model({k: v for k, v in f.items() if "embed" not in k})["sentence_embedding"] for f in columns]
        texts = [[str(row[row > 0].tolist()) for row in f["input_ids"]] for f in columns]
        found = by_hand(own[0], own[1:], texts[1:])
        n += len(own[0])
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value * len(own[0])
    return {name: value / n for name, value in sums.items()}


def test_a_dict_of_losses_is_averaged_over_the_window_by_queries(tiny_st, tmp_path):
    model = still(tiny_st())
    data = {
        "pairs": Dataset.from_dict({"anchor": QUERIES[:10], "positive": POSITIVES[:10]}),  # batches of 4, 4, 2
        "triplets": Dataset.from_dict({"anchor": QUERIES[:8], "positive": POSITIVES[:8], "negative": NEGATIVES[:8]}),
        "scored": Dataset.from_dict({"a": QUERIES[:4], "b": POSITIVES[:4], "score": [0.1, 0.9, 0.5, 0.3]}),
    }
    cached = make("cached", model)
    loss = {"pairs": make("plain", model), "triplets": cached, "scored": losses.CoSENTLoss(model)}
    lines, seen, _ = train(model, tmp_path, data, loss, max_steps=6, logging_steps=3)
    assert [line["step"] for line in lines] == [3, 6]
    assert {type(module).__name__ for module, _ in seen} == {type(each).__name__ for each in loss.values()}
    ranking = [[(m, f) for m, f in seen[at : at + 3] if m is not loss["scored"]] for at in (0, 3)]
    assert len({len(columns[0]["input_ids"]) for part in ranking for _, columns in part}) > 1, "sizes must differ"
    for line, part in zip(lines, ranking, strict=True):
        expected = expected_of(model, part)
        assert {name: line[name] for name in expected} == close(expected)
        assert all(type(line[name]) is float for name in expected)
        assert "in_batch_dim" not in line


def test_one_loss_object_serves_two_datasets_beside_a_matryoshka(tiny_st, tmp_path):
    model = still(tiny_st())
    pairs = Dataset.from_dict({"anchor": QUERIES[:8], "positive": POSITIVES[:8]})
    shared = make("plain", model)
    loss = {"a": shared, "b": shared, "c": losses.MatryoshkaLoss(model, make("gist", model), [8, 4])}
    lines, seen, _ = train(model, tmp_path, {"a": pairs, "b": pairs, "c": pairs}, loss, max_steps=6, logging_steps=6)
    assert len(seen) == 6
    assert lines[0]["in_batch_dim"] == 8.0
    assert lines[0]["in_batch_candidates"] <= 4.0


def test_a_loss_that_ranks_nothing_adds_nothing_to_the_log(tiny_st, tmp_path):
    model = still(tiny_st())
    data = Dataset.from_dict({"a": QUERIES[:8], "b": POSITIVES[:8], "score": [0.5] * 8})
    lines, _, _ = train(model, tmp_path, data, losses.CosineSimilarityLoss(model), max_steps=2, logging_steps=1)
    assert len(lines) == 2
    assert not [name for line in lines for name in line if name.startswith("in_batch")]


def test_accumulation_counts_every_batch_and_the_trainers_evaluation_none(tiny_st, tmp_path):
    model = still(tiny_st())
    data = Dataset.from_dict({"anchor": QUERIES, "positive": POSITIVES})
    prompts = {"anchor": "query: ", "positive": "document: "}
    options = {"max_steps": 2, "logging_steps": 1, "gradient_accumulation_steps": 3, "prompts": prompts}
    lines, seen, trainer = train(
        model, tmp_path, data, make("plain", model), eval_strategy="steps", eval_steps=1, **options
    )
    assert len(seen) == 6
    assert [line for line in trainer.state.log_history if "eval_loss" in line]
    for at, line in enumerate(lines):
        expected = expected_of(model, seen[3 * at : 3 * at + 3])
        assert {name: line[name] for name in expected} == close(expected)


# ------------------------------------------------------------------------------------------------ several processes

WORKER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[3])
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "/store", rank=rank, world_size=2)
from sentence_transformers import SentenceTransformer
import test_taps as t
from fullrank.in_batch import InBatchMonitor
from sentence_transformers.sentence_transformer import losses

model = SentenceTransformer(sys.argv[2] + "/model", device="cpu").eval()
out = {}
for kind in json.loads(sys.argv[4]):
    for watched in (False, True):
        loss = t.gathering(kind, model)
        monitor = InBatchMonitor()
        if watched:
            assert monitor.watch_loss(loss)
        columns = [part[4 * rank : 4 * rank + 4] for part in t.shared_columns(kind)]
        value = loss(t.batch(model, *columns), None)
        value.backward()
        gradient = float(sum(p.grad.double().abs().sum() for p in model.parameters() if p.grad is not None))
        model.zero_grad()
        out.setdefault(kind, []).append({"loss": float(value), "gradient": gradient, "found": monitor.flush()})
print(json.dumps(out))
dist.destroy_process_group()
"""


def shared_columns(kind):
    """Returns the texts of both processes; one positive of the first is one of the second, behind padding."""
    positives = [*POSITIVES[:7], POSITIVES[1]]
    return (QUERIES[:8], positives, NEGATIVES[:8]) if "triplets" in kind else (QUERIES[:8], positives)


def gathering(kind, model):
    options = {"gather_across_devices": True}
    cached = {"mini_batch_size": 3} if "cached" in kind else {}
    if "gist" in kind:
        cls = losses.CachedGISTEmbedLoss if cached else losses.GISTEmbedLoss
        loss = cls(model, guide_of(model), margin=-0.05, **options, **cached)
    else:
        cls = losses.CachedMultipleNegativesRankingLoss if cached else losses.MultipleNegativesRankingLoss
        directions = ("query_to_doc", "doc_to_query") if "both ways" in kind else ("query_to_doc",)
        loss = cls(model, directions=directions, **options, **cached)
    return losses.MatryoshkaLoss(model, loss, [5, 2]) if "matryoshka" in kind else loss


GATHERED = [
    "plain pairs",
    "plain triplets both ways",
    "cached triplets",
    "gist triplets",
    "cached gist triplets",
    "matryoshka plain triplets",
    "matryoshka cached triplets",
]


def test_gathered_losses_give_the_numbers_of_the_pool_of_all_processes(tiny_st, tmp_path):
    model = tiny_st().eval()
    model.save(str(tmp_path / "model"))
    command = [sys.executable, "-c", WORKER]
    rest = [str(tmp_path), str(Path(__file__).parent), json.dumps(GATHERED)]
    workers = [subprocess.Popen([*command, str(rank), *rest], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    outs = [json.loads(worker.communicate(timeout=120)[0].splitlines()[-1]) for worker in workers]
    for kind in GATHERED:
        texts = shared_columns(kind)
        dim = 5 if "matryoshka" in kind else 32
        own = [vectors[:, :dim] for vectors in vectors_of(model, *texts)]
        others = vectors_of(guide_of(model), *texts)
        for rank, out in enumerate(outs):
            part = slice(4 * rank, 4 * rank + 4)
            taken_out = guided(others[0][part], others[1:], offset=4 * rank, margin=-0.05)
            options = {"taken_out": taken_out} if "gist" in kind else {}
            expected = by_hand(own[0][part], own[1:], texts[1:], offset=4 * rank, **options)
            more = {"in_batch_dim": 5.0} if "matryoshka" in kind else {}
            bare, watched = out[kind]
            assert bare["found"] == {}
            assert watched["found"] == close(expected, **more), (kind, rank)
            assert (bare["loss"], bare["gradient"]) == (watched["loss"], watched["gradient"])
            if "gist" not in kind:
                assert expected["in_batch_candidates"] == 8.0 * (len(texts) - 1)
