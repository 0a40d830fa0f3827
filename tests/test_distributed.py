"""Several processes are as one: the same numbers, one error for all, nothing large on the wire. Real gloo, torchrun."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from fullrank import Result
from fullrank._errors import EvaluationError
from fullrank.models import is_sharded
from fullrank.ranks import ALONE, current_ranks

WORKER = Path(__file__).with_name("distributed_worker.py")
SIZES = (2, 3)


def load_worker(model, out):
    """The worker's module in this process, without a process group: what one process gives."""
    spec = importlib.util.spec_from_file_location("distributed_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    argv, sys.argv = sys.argv, [str(WORKER), str(model), str(out)]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = argv
    return module


@pytest.fixture(scope="module")
def alone(tiny_bert_path, tmp_path_factory):
    """What one process gives: ``{name: result}``."""
    worker = load_worker(tiny_bert_path, tmp_path_factory.mktemp("alone"))
    found = worker.options(0)
    everything = found["ties-expected"]
    few = found["one"]
    return found | {
        **dict.fromkeys(("ddp", "alone"), everything),
        **{f"sharded-{name}-all": everything for name in ("st", "layers", "backbone")},
        **{f"sharded-{name}-few": few for name in ("st", "layers", "backbone")},
        "sharded-own-all": found["own-encode"],
        "sharded-own-few": found["own-one"],
        "after-errors": found["plain-expected"],
        "sharded-stopped": found["stopped"],
    }


@pytest.fixture(scope="module", params=SIZES)
def together(request, tiny_bert_path, tmp_path_factory):
    """A folder with what each rank of a real run gave, and how many ranks there were."""
    out = tmp_path_factory.mktemp(f"ranks{request.param}")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={request.param}"),
            *(str(WORKER), str(tiny_bert_path), str(out)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, f"{sorted(path.name for path in out.iterdir())}\n{run.stderr[-6000:]}"
    return out, request.param


def of_all_ranks(together, name):
    out, size = together
    return [Result.load(out / f"{name}-{rank}.json") for rank in range(size)]


def assert_same(found, expected):
    """Counts and metrics exactly, scores to 1e-6."""
    assert found.metrics == expected.metrics
    for name, values in expected.per_query.items():
        np.testing.assert_array_equal(found.per_query[name], values)
    assert found.counts == expected.counts
    assert (found.tie_rate, found.collapsed, found.eligible, found.bound) == (
        expected.tie_rate,
        expected.collapsed,
        expected.eligible,
        expected.bound,
    )
    assert found.mean_cosine == pytest.approx(expected.mean_cosine, abs=1e-6)
    assert {q: [d for d, _ in hits] for q, hits in found.hits.items()} == {
        q: [d for d, _ in hits] for q, hits in expected.hits.items()
    }
    for q, hits in expected.hits.items():
        assert [s for _, s in found.hits[q]] == pytest.approx([s for _, s in hits], abs=1e-6)


RULES = ("expected", "worst", "trec")
SHARED = [
    *(f"{kind}-{ties}" for kind in ("ties", "collapsed", "plain", "worst") for ties in RULES),
    *("batch-1", "batch-40", "batch-300", "few", "one", "few-plain", "one-plain"),
    *("own-encode", "euclidean", "pool", "stopped", "dims-32", "dims-8", "ddp", "watched", "after-errors"),
]


@pytest.mark.parametrize("name", SHARED)
def test_every_rank_gets_what_one_process_gets(name, together, alone):
    for found in of_all_ranks(together, name):
        assert_same(found, alone[name])


def test_the_cases_are_what_their_names_say(alone):
    assert alone["collapsed-trec"].collapsed
    assert alone["worst-trec"].counts["n_nonfinite_documents"] > 3
    assert not alone["worst-trec"].eligible
    assert alone["stopped"].bound
    assert alone["stopped"].coverage < 1
    assert alone["pool"].bound
    assert alone["ties-trec"].metrics["mrr"] < 1
    assert alone["few"].counts["n_documents"] < 3


def test_one_rank_may_evaluate_by_itself(together, alone):
    out, size = together
    assert_same(Result.load(out / "alone-1.json"), alone["alone"])
    assert not any((out / f"alone-{rank}.json").exists() for rank in range(size) if rank != 1)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("query", "ValueError", "a query on rank 1"),
        ("judged", "KeyError", "'a judged document on rank 1'"),
        ("middle", "ZeroDivisionError", "a document on rank 1"),
        ("model", "RuntimeError", "the model broke on rank 1"),
    ],
)
def test_an_error_on_one_rank_is_the_error_of_all(name, kind, text, together):
    out, size = together
    for rank in range(size):
        assert json.loads((out / f"errors-{rank}.json").read_text())[name] == [kind, text]


def test_an_error_that_cannot_travel_keeps_its_text(together):
    out, size = together
    for rank in range(size):
        kind, text = json.loads((out / f"errors-{rank}.json").read_text())["unpicklable"]
        if rank == 1:
            assert (kind, text) == ("UnpicklableError", "holds a lambda")
        else:
            assert (kind, text) == (EvaluationError.__name__, "rank 1 stopped with UnpicklableError: holds a lambda")


def test_non_finite_embeddings_on_one_rank_stop_all_ranks(together):
    out, size = together
    for rank in range(size):
        kind, text = json.loads((out / f"errors-{rank}.json").read_text())["nan"]
        assert kind == "NonFiniteError"
        assert "1 of 60 document embeddings are NaN or infinite" in text
        assert "'d20'" in text


def test_no_embedding_of_a_document_is_sent(together):
    out, size = together
    for rank in range(size):
        sent = json.loads((out / f"wire-{rank}.json").read_text())
        reduced = [shape for name, shape in sent if name == "all_reduce"]
        gathered = [shape for name, shape in sent if name == "all_gather"]
        assert len(reduced) + len(gathered) == len(sent)
        judged = max(shape[-1] for shape in reduced if len(shape) == 2)
        assert {tuple(shape) for shape in reduced} == {(1,), (2,), (32,), (judged,), (3, judged)}
        assert reduced.count([32]) == 1  # the sum of the cosine sample
        queries = [shape for shape in gathered if shape[-1] == 32]
        assert len(queries) == 1
        assert queries[0][0] <= 11
        assert all(shape in ([1], [11, 10]) for shape in gathered if shape not in queries)  # lists of 10


@pytest.mark.parametrize("kind", ["all", "few"])
@pytest.mark.parametrize("name", ["st", "layers", "backbone", "own"])
def test_sharded_models_give_what_whole_ones_give(name, kind, together, alone):
    for found in of_all_ranks(together, f"sharded-{name}-{kind}"):
        assert_same(found, alone[f"sharded-{name}-{kind}"])
        if name != "backbone":  # which has other names for its weights
            expected = alone[f"sharded-{name}-{kind}"].provenance["model_fingerprint"]
            assert found.provenance["model_fingerprint"] == expected


def test_a_sharded_model_stops_early_on_all_ranks(together, alone):
    for found in of_all_ranks(together, "sharded-stopped"):
        assert_same(found, alone["sharded-stopped"])


def test_every_rank_runs_the_same_number_of_forwards_of_a_sharded_model(together):
    out, size = together
    counts = [json.loads((out / f"forwards-{rank}.json").read_text()) for rank in range(size)]
    assert all(found == counts[0] for found in counts)
    assert all(n > 0 for n in counts[0].values())


# ---------------------------------------------------------------- without a process group


def test_without_a_process_group_nothing_collective_is_called(tiny_st, tiny_golden, monkeypatch):
    from fullrank import evaluate

    def refuse(*_, **__):
        raise AssertionError("a collective call")

    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    assert current_ranks() is ALONE
    model = tiny_st()
    assert not is_sharded(model)
    assert evaluate(model, tiny_golden).metrics


def test_a_model_of_zero_3_is_sharded(tiny_bert, tmp_path):
    """Its weights carry an id of their own on every rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert not is_sharded(tiny_bert)
        assert not is_sharded(types.SimpleNamespace())
        next(tiny_bert.parameters()).ds_id = 0
        assert is_sharded(tiny_bert)
    finally:
        torch.distributed.destroy_process_group()
