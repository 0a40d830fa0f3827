"""Two processes that train together (gloo): one decision, one writer, the same state, one error."""

import json
import os
import socket
import subprocess
import sys

import pytest

from fullrank import RetrievalCallback
from training import make_trainer, write_beir

CHILD = """
import hashlib, json, os, sys
from pathlib import Path

import peft
import torch
from sentence_transformers import SentenceTransformer
from training import Crash, crash, make_trainer, scripted
from transformers import TrainerCallback

from fullrank import GoldenSet, Guard, load_golden

model_path, data, where, reports = sys.argv[1:]
rank = int(os.environ["RANK"])
golden = load_golden(data)
pairs = {"anchor": [" ".join(t.split()[:4]) for t in golden.doc_texts[:24]], "positive": golden.doc_texts[:24]}


class Different(TrainerCallback):
    "At the end one process holds other weights, as if it had missed a step."

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 6 and rank == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)


class InTheWay(TrainerCallback):
    "The folder that the best weights are written to cannot be made."

    def __init__(self, out):
        self.out = out

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and rank == 0:
            (self.out / "fullrank" / "best" / f".step-2.{os.getpid()}.partial").write_text("in the way")


def other(name):
    "Other queries, and for a guard other documents: the texts backwards."
    texts = {"x" + d: " ".join(reversed(t.split())) for d, t in zip(golden.doc_ids, golden.doc_texts)}
    return GoldenSet({"y" + d: t[:20] for d, t in texts.items()}, texts, {"y" + d: {d: 1} for d in texts}, name=name)


def train(what):
    out = Path(where) / ("resumed" if what in ("crash", "resume") else what)
    if what == "nodes":
        out = out / f"node-{rank}"
    model = SentenceTransformer(model_path, device="cpu")
    if what == "lora":
        torch.manual_seed(0)
        model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(r=4, target_modules=["query", "value"]))
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "ddp_backend": "gloo"}
    if what in ("crash", "resume"):
        options |= {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(
        model, pairs, out, callbacks=[Crash(5)] if what == "crash" else None, ddp_find_unused_parameters=True, **options
    )
    scores = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.2}
    if rank == 1:
        scores |= {
            "one fails": {4: ValueError("only here")},
            "one fails at once": {0: ValueError("only here")},
            "nan on one": {4: float("nan")},
            "unlike": {2: 0.2, 4: 0.8},
        }.get(what, {})
    extra = {"guards": Guard(other("general")), "confirm": other("test")} if what == "plain" else {}
    if what == "pool":
        extra = {"pool": 20}
    callback = scripted(trainer, golden, scores, patience=2, **extra)
    if what == "nodes":
        trainer.add_callback(Different())
    if what == "full disk":
        trainer.callback_handler.callbacks.insert(0, InTheWay(out))
    if what == "crash":
        crash(trainer)
    else:
        trainer.train(resume_from_checkpoint=what == "resume")
    digest = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        digest.update(value.numpy().tobytes())
    state = trainer.state
    return {
        "history": [[h.step, h.status, h.score] for h in callback.history],
        "metrics": [h.metrics for h in callback.history],
        "best": callback.best and [callback.best.step, callback.best.score],
        "state": [state.best_metric, state.best_global_step, state.best_model_checkpoint, state.global_step],
        "improved": callback.improved,
        "best_result": callback.best_result and callback.best_result.metrics,
        "comparison": callback.comparison and [callback.comparison.delta, callback.comparison.p_value],
        "confirmed": callback.ending.confirmed and callback.ending.confirmed.metrics,
        "confirmation": callback.ending.confirmation and callback.ending.confirmation.delta,
        "logged": [row["step"] for row in state.log_history if "eval_recall@1" in row],
        "weights": digest.hexdigest(),
        "files": sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) if out.exists() else [],
    }


found = {}
for what in (
    "plain", "lora", "nodes", "one fails", "one fails at once", "nan on one", "unlike", "full disk", "crash", "resume",
    "pool"
):
    try:
        found[what] = train(what)
    except Exception as error:
        found[what] = {"error": f"{type(error).__name__}: {error}"}
Path(reports, f"{rank}.json").write_text(json.dumps(found))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def reports(tmp_path_factory, tiny_bert_path, tiny_golden):
    """What each of two processes reports of each run; they train one after another, as starting them takes longest."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder, here, port = tmp_path_factory.mktemp("ranks"), os.path.dirname(__file__), free_port()
    SentenceTransformer(modules=[Transformer(str(tiny_bert_path)), Pooling(32)], device="cpu").save(
        str(folder / "model")
    )
    write_beir(tiny_golden, folder / "data")
    (folder / "child.py").write_text(CHILD)
    arguments = [str(folder / name) for name in ("model", "data", "runs")] + [str(folder)]
    processes = []
    for rank in ("0", "1"):
        env = os.environ | {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([here, *sys.path]),
        }
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(folder / "child.py"), *arguments]
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "".join((folder / f"{rank}.log").read_text()[-3000:] for rank in (0, 1))
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def same_on_both(reports, what):
    """Returns what the writing process reports, after a look at whether the other one says the same."""
    first, second = (report[what] for report in reports[1])
    assert {k: v for k, v in first.items() if k != "files"} == {k: v for k, v in second.items() if k != "files"}
    return first


def test_guards_and_the_second_set_are_measured_by_both_and_written_by_one(reports):
    first = same_on_both(reports, "plain")
    assert all("guard/general/ndcg@10" in metrics for metrics in first["metrics"])
    assert first["confirmed"] is not None
    assert first["confirmation"] is not None
    written = [name for name in first["files"] if name.endswith(".json") and name.startswith("fullrank/")]
    assert {"fullrank/confirm.json", "fullrank/confirm-base.json", "fullrank/guard-step-6.general.json"} <= set(written)


@pytest.mark.parametrize("what", ["plain", "lora"])
def test_one_decision_one_writer_and_the_same_state_on_both(reports, what):
    first = same_on_both(reports, what)
    assert first["history"] == [[0, "ok", 0.1], [2, "ok", 0.9], [4, "ok", 0.3], [6, "ok", 0.2]]
    assert first["best"] == [2, 0.9]
    assert first["state"] == [0.9, 2, str(reports[0] / "runs" / what / "fullrank" / "best" / "step-2"), 6]
    assert first["improved"]
    assert first["best_result"]["recall@1"] == 0.9
    assert first["logged"] == [0, 2, 4, 6]


def test_ranks_without_a_common_disk_get_the_weights_of_the_writer(reports):
    first = same_on_both(reports, "nodes")
    assert "fullrank/history.jsonl" in first["files"]
    assert not [name for name in reports[1][1]["nodes"]["files"] if name.startswith("fullrank/")]


@pytest.mark.parametrize("what", ["one fails", "nan on one"])
def test_an_evaluation_that_fails_on_one_has_failed_on_both_and_training_goes_on(reports, what):
    first = same_on_both(reports, what)
    assert [status for _, status, _ in first["history"]] == ["ok", "ok", "failed", "ok"]
    lines = (reports[0] / "runs" / what / "fullrank" / "history.jsonl").read_text().splitlines()
    assert "process 1: " in json.loads(lines[2])["error"]


def test_case_29_an_error_of_one_at_step_0_ends_both_with_that_error(reports):
    first, second = (report["one fails at once"] for report in reports[1])
    assert first["error"] == "EvaluationError: process 1: ValueError: only here"
    assert second["error"] == "ValueError: only here"


def test_ranks_that_score_unlike_follow_the_writer(reports):
    first = same_on_both(reports, "unlike")
    assert first["best"] == [2, 0.9]


def test_weights_that_cannot_be_stored_do_not_stop_either(reports):
    first = same_on_both(reports, "full disk")
    assert first["state"][3] == 6
    assert first["best"][0] != 2


def test_a_broken_off_run_of_two_goes_on(reports):
    assert [step for step, _, _ in same_on_both(reports, "crash")["history"]] == [0, 2, 4]
    first = same_on_both(reports, "resume")
    assert [step for step, _, _ in first["history"]] == [0, 2, 4, 6]
    assert (first["best"], first["improved"]) == ([2, 0.9], True)


def test_both_rank_one_pool_and_complete_what_is_kept_together(reports):
    first = same_on_both(reports, "pool")
    assert [step for step, _, _ in first["history"]] == [0, 2, 4, 6]
    assert all("recall@1_pool" in metrics for metrics in first["metrics"])
    assert (first["best"], first["improved"]) == ([2, 0.2], True)  # at the end the script gives the score of its step
    assert {"fullrank/pool.json", "fullrank/full-step-0.json", "fullrank/full-step-2.json"} <= set(first["files"])


def test_one_process_makes_no_collective_call(tiny_st, tiny_golden, pairs, tmp_path, monkeypatch):
    from torch import distributed

    def refuse(*args, **options):
        raise AssertionError("a collective call in a run of one process")

    for name in ("all_gather_object", "broadcast_object_list", "broadcast", "barrier", "all_reduce"):
        monkeypatch.setattr(distributed, name, refuse)
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=2)
    callback = RetrievalCallback(tiny_golden, every=1).attach(trainer)
    trainer.train()
    assert callback.best is not None
