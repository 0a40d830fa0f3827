"""What each rank of `test_distributed.py` runs: ``torchrun distributed_worker.py MODEL OUT``; results lie in OUT."""

import datetime
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

MODEL, OUT = Path(sys.argv[1]), Path(sys.argv[2])
WORDS = tuple(a + b + c for a in "bcdfghjklm" for b in "aio" for c in ("l", "n", "r", "s", "t"))
METRICS = ["recall@1", "recall@5", "hit@3", "precision@3", "mrr", "map", "ndcg@10", "ndcg_exp"]
RULES = ("expected", "worst", "trec")


# ---------------------------------------------------------------- data and models


def golden_set(n_documents=60, n_queries=9, *, seed=0):
    """Graded judgements, several relevant documents, equal texts, one query without an answer."""
    from fullrank import GoldenSet

    rng = np.random.default_rng(seed)

    def text(longest):
        return " ".join(rng.choice(WORDS, rng.integers(2, longest)))

    corpus = {f"d{i}": text(30) for i in range(n_documents)}
    for i in range(3, n_documents, 7):
        corpus[f"d{i}"] = corpus[f"d{i - 3}"]
    qrels = {
        f"q{i}": {f"d{j}": int(rng.integers(0, 4)) for j in rng.choice(n_documents, min(4, n_documents), replace=False)}
        | {"d0": 2}
        for i in range(n_queries)
    }
    qrels["q1"] = {}
    return GoldenSet({q: text(8) for q in qrels}, corpus, qrels, name="shared")


def tiny_st(*, normalize=False):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    modules = [Transformer(str(MODEL)), Pooling(32, pooling_mode="mean"), *([Normalize()] if normalize else [])]
    return SentenceTransformer(modules=modules, device="cpu").eval()


class Plain:
    """A model that is not tokenised by us: embeddings from a hash of the text."""

    def __init__(self, change: Callable | None = None):
        self.change, self.calls = change, 0

    def encode(self, texts):
        self.calls += 1
        rows = np.stack([np.random.default_rng(list(text.encode())).standard_normal(24) for text in texts])
        return rows.astype(np.float32) if self.change is None else self.change(self, texts, rows.astype(np.float32))


def collapsed(model, texts, rows):
    return np.ones_like(rows)


def some_nan(model, texts, rows):
    for row, text in zip(rows, texts, strict=True):
        if len(text) % 3 == 0 and len(text) > 40:  # queries are shorter
            row[0] = np.nan
    return rows


class UnpicklableError(RuntimeError):
    def __init__(self, text, hook):
        super().__init__(text)
        self.hook = hook


# ---------------------------------------------------------------- what is run, under the name of the test


def options(rank):
    """Returns evaluations that must be the same on every rank and in one process: ``{name: result}``."""
    from fullrank import evaluate, evaluate_dims
    from fullrank.encode import as_encoder

    golden, model = golden_set(), tiny_st()
    few, one = golden_set(2, 4), golden_set(1, 2)
    found = {f"ties-{ties}": evaluate(model, golden, metrics=METRICS, ties=ties) for ties in RULES}
    for tokens in (1, 40, 300):
        found[f"batch-{tokens}"] = evaluate(model, golden, metrics=METRICS, batch_tokens=tokens)
    found |= {"few": evaluate(model, few, metrics=METRICS), "one": evaluate(model, one, metrics=METRICS)}
    found |= {"few-plain": evaluate(Plain(), few), "one-plain": evaluate(Plain(), one)}
    for ties in RULES:
        found[f"collapsed-{ties}"] = evaluate(Plain(collapsed), golden, metrics=METRICS, ties=ties)
        found[f"plain-{ties}"] = evaluate(Plain(), golden, metrics=METRICS, ties=ties)
        found[f"worst-{ties}"] = evaluate(
            Plain(some_nan), golden, metrics=METRICS, ties=ties, on_nonfinite="worst", similarity="dot"
        )
    found["watched"] = evaluate(model, golden_set(60, 11), metrics=METRICS)
    found["own-one"] = evaluate(as_encoder(model, fast=False), one, metrics=METRICS)
    found["own-encode"] = evaluate(as_encoder(model, fast=False), golden, metrics=METRICS)
    found["euclidean"] = evaluate(model, golden, similarity="euclidean", exclude_self=True, list_length=3)
    found["pool"] = evaluate(model, golden, pool=30, competitors=[found["ties-trec"]])
    found["stopped"] = evaluate(model, golden_set(600), stop_below={"recall@1": 1.0, "mrr": 1.0})
    found |= {f"dims-{n}": result for n, result in evaluate_dims(tiny_st(normalize=True), golden, [32, 8]).items()}
    return found


def ddp(rank):
    from fullrank import evaluate

    model = torch.nn.parallel.DistributedDataParallel(tiny_st())
    return {"ddp": evaluate(model, golden_set(), metrics=METRICS)}


def alone(rank):
    from fullrank import evaluate

    return {"alone": evaluate(tiny_st(), golden_set(), metrics=METRICS, distributed=False)} if rank == 1 else {}


def errors(rank):
    """Returns, for each way to fail on one rank, the error that this rank saw, and an evaluation after them all."""
    from fullrank import evaluate

    def raises(error, at):
        def change(model, texts, rows):
            if rank == 1 and model.calls == at:
                raise error
            return rows

        return change

    def one_nan(model, texts, rows):
        for row, text in zip(rows, texts, strict=True):
            if text == golden_set().corpus["d20"]:
                row[:] = np.nan
        return rows

    seen, golden = {}, golden_set()
    failing = {
        "query": Plain(raises(ValueError("a query on rank 1"), 1)),
        "judged": Plain(raises(KeyError("a judged document on rank 1"), 2)),
        "middle": Plain(raises(ZeroDivisionError("a document on rank 1"), 3)),
        "unpicklable": Plain(raises(UnpicklableError("holds a lambda", lambda: 0), 3)),
        "nan": Plain(one_nan),
    }
    for name, model in failing.items():
        try:
            evaluate(model, golden)
            seen[name] = ["none", ""]
        except Exception as error:
            seen[name] = [type(error).__name__, str(error)]
    model = tiny_st()
    forward = type(model[0]).forward
    calls = 0

    def break_down(self, features, **kwargs):
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 4:
            raise RuntimeError("the model broke on rank 1")
        return forward(self, features, **kwargs)

    type(model[0]).forward = break_down
    try:
        evaluate(model, golden, batch_tokens=60)
        seen["model"] = ["none", ""]
    except Exception as error:
        seen["model"] = [type(error).__name__, str(error)]
    finally:
        type(model[0]).forward = forward
    (OUT / f"errors-{rank}.json").write_text(json.dumps(seen))
    return {"after-errors": evaluate(Plain(), golden, metrics=METRICS)}


@contextmanager
def watched(sent):
    """Notes name and shapes of what every collective sends; those that are not expected raise."""
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "gather", "scatter", "send", "all_to_all")
    kept = {name: getattr(dist, name) for name in names}

    def noting(name):
        def call(*args, **kwargs):
            tensor = args[1] if name == "all_gather" else args[0]
            sent.append([name, list(tensor.shape) if isinstance(tensor, torch.Tensor) else None])
            return kept[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, noting(name))
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def wire(rank):
    from fullrank import evaluate

    sent: list = []
    with watched(sent):
        result = evaluate(tiny_st(), golden_set(60, 11), metrics=METRICS, batch_tokens=100)
    (OUT / f"wire-{rank}.json").write_text(json.dumps(sent))
    return {"watched": result}


def sharded(rank):
    """Returns evaluations of models whose weights are spread over the ranks, and notes the forwards of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoTokenizer, BertModel

    from fullrank import Backbone, evaluate
    from fullrank.encode import as_encoder
    from fullrank.models import is_sharded

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    forwards = 0

    def count(*_):
        nonlocal forwards
        forwards += 1

    def spread(network, root):
        network.embeddings.register_forward_pre_hook(count)
        for layer in network.encoder.layer:
            fully_shard(layer, mesh=mesh)
        if root is not None:
            fully_shard(root, mesh=mesh)
        assert is_sharded(network)

    st, layers = tiny_st(), tiny_st()
    spread(st[0].auto_model, st)
    spread(layers[0].auto_model, None)
    bert = BertModel.from_pretrained(MODEL).eval()
    spread(bert, bert)
    backbone = Backbone(bert, AutoTokenizer.from_pretrained(MODEL))
    found, counts = {}, {}
    for name, model in {
        "st": st,
        "layers": layers,
        "backbone": backbone,
        "own": as_encoder(layers, fast=False),
    }.items():
        for kind, golden in {"all": golden_set(), "few": golden_set(1, 2)}.items():
            forwards = 0
            found[f"sharded-{name}-{kind}"] = evaluate(model, golden, metrics=METRICS, batch_tokens=100)
            counts[f"{name}-{kind}"] = forwards
    forwards = 0
    found["sharded-stopped"] = evaluate(st, golden_set(600), stop_below={"recall@1": 1.0, "mrr": 1.0})
    counts["stopped"] = forwards
    (OUT / f"forwards-{rank}.json").write_text(json.dumps(counts))
    return found


PARTS = (options, ddp, alone, errors, wire, sharded)


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    for part in PARTS:
        for name, result in part(rank).items():
            result.save(OUT / f"{name}-{rank}.json")
        (OUT / f"done-{part.__name__}-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
