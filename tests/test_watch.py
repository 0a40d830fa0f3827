"""Watching a run from elsewhere: half-written folders, kills, a second watcher; each checkpoint once, the best kept."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fullrank import select_checkpoint, watching
from fullrank._errors import DataError, SettingError
from fullrank.discover import Candidate
from fullrank.watch import WATCH, stored_best, watch
from fullrank.watching import Sightings, held_lock

pytest.importorskip("peft")
FULLRANK = Path(sys.executable).with_name("fullrank")
STEPS = (4, 8, 12, 16, 20)
FAST = {"quiet": 0.05, "poll": 0.02}
ONCE = {"idle_exit": 0.01, **FAST}


@pytest.fixture
def golden(make_golden):
    return make_golden(3, name="dev")


@pytest.fixture
def arrive(tiny_runs, tmp_path):
    """Factory: copies a checkpoint of a finished run into the one that is watched."""
    (tmp_path / "run").mkdir()

    def copy(*steps, how="full"):
        for step in steps:
            shutil.copytree(tiny_runs[how] / f"checkpoint-{step}", tmp_path / "run" / f"checkpoint-{step}")
        return tmp_path / "run"

    return copy


def journal(run):
    file = run / WATCH / "history.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def scalars(run, tag="eval/recall@1"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / WATCH / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


# ------------------------------------------------------------------------------------- what is due


def checkpoint(folder, step, problem=None):
    path = folder / f"checkpoint-{step}"
    path.mkdir(exist_ok=True)
    (path / "file").write_text("x")
    return Candidate(path.name, path, step, "model", False, "checkpoint", problem=problem)


def test_due_is_what_is_whole_and_quiet_the_earliest_first(tmp_path):
    sightings = Sightings(quiet=10, attempts=3)
    late, early = checkpoint(tmp_path, 20), checkpoint(tmp_path, 10)
    assert sightings.due([late, early], (), now=100) is None
    assert sightings.due([late, early], (), now=109) is None
    assert sightings.due([late, early], (), now=110) is early
    assert sightings.due([late, early], (10,), now=110) is late
    assert sightings.due([late, early], (10, 20), now=110) is None


def test_a_folder_that_changes_or_is_not_whole_waits_anew(tmp_path):
    sightings = Sightings(quiet=10, attempts=3)
    one = checkpoint(tmp_path, 10)
    sightings.due([one], (), now=100)
    (one.path / "more").write_text("y")
    assert sightings.due([one], (), now=111) is None
    broken = checkpoint(tmp_path, 10, problem="half-written")
    assert sightings.due([broken], (), now=121) is None
    assert sightings.due([one], (), now=130) is None  # it became whole at 121 at the earliest
    assert sightings.due([one], (), now=131) is one


def test_a_failure_waits_longer_each_time_and_ends(tmp_path):
    sightings = Sightings(quiet=0, attempts=3)
    one = checkpoint(tmp_path, 10)
    sightings.due([one], (), now=0)
    assert sightings.due([one], (), now=1) is one
    assert sightings.failed(one, now=1) is False
    assert sightings.due([one], (), now=5) is None
    assert sightings.due([one], (), now=6) is one
    assert sightings.failed(one, now=6) is False
    assert sightings.due([one], (), now=15) is None
    assert sightings.due([one], (), now=16) is one
    assert sightings.failed(one, now=16) is True


# ------------------------------------------------------------------------------------- the lock


HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom fullrank.watching import held_lock\n"
    "with held_lock(Path(sys.argv[1]), sys.argv[2]):\n    print('held', flush=True)\n    time.sleep(60)\n"
)


def test_a_second_watcher_is_refused_and_the_lock_of_a_killed_one_is_free(tmp_path):
    lock = tmp_path / "run" / WATCH / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock), "run is watched"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline().strip() == "held"
        expected = rf"run is watched already by process {holder.pid} on .*; stop that one first"
        with pytest.raises(SettingError, match=expected), held_lock(lock, "run is watched"):
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with held_lock(lock, "run is watched"):
        assert lock.is_file()


# ------------------------------------------------------------------------------------- in this process


def test_each_checkpoint_once_with_scalars_at_its_step_and_the_best_stored(arrive, golden, tiny_base_path):
    run = arrive(4, 8)
    seen = []
    first = watch(run, golden, base=str(tiny_base_path), until=8, on_line=lambda line, best: seen.append(line), **FAST)
    assert [line.step for line in first] == [0, 4, 8] == [line.step for line in seen]
    arrive_later = watch(run, golden, base=str(tiny_base_path), until=8, **FAST)
    assert arrive_later == first  # a restart evaluates nothing twice
    assert {step: pytest.approx(value) for step, value in scalars(run).items()} == {
        line.step: line.score for line in first
    }
    whole = select_checkpoint(run, golden, base=str(tiny_base_path), exhaustive=True)
    assert {line.step: line.score for line in first} == {row.step: row.score for row in whole.rows}
    stored = json.loads((run / WATCH / "best" / "manifest.json").read_text())["kept"]
    assert [entry["step"] for entry in stored] == [whole.winner.step]


@pytest.mark.parametrize("how", ["full", "peft"])
def test_the_order_of_arrival_changes_nothing(arrive, golden, tiny_base_path, how):
    run = arrive(20, 12, how=how)
    watch(run, golden, base=str(tiny_base_path), until=20, **FAST)
    arrive(16, 4, 8, how=how)
    lines = watch(run, golden, base=str(tiny_base_path), until=20, **FAST)
    assert sorted(line.step for line in lines) == [0, *STEPS]
    whole = select_checkpoint(run, golden, base=str(tiny_base_path), exhaustive=True)
    kept = json.loads((run / WATCH / "best" / "manifest.json").read_text())["kept"][0]
    assert (kept["step"], kept["score"]) == (whole.winner.step, whole.winner.score)
    assert {line.step: line.score for line in lines} == {row.step: row.score for row in whole.rows}


def test_what_cannot_be_evaluated_is_tried_again_then_failed_and_the_others_go_on(arrive, golden, monkeypatch):
    monkeypatch.setattr(watching, "FIRST_WAIT", 0.01)
    run = arrive(4, 8)
    config = run / "checkpoint-4" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))
    lines = watch(run, golden, until=8, attempts=2, **FAST)
    status = {line.step: line.status for line in lines}
    assert status == {4: "failed", 8: "ok"}
    failed = next(line for line in lines if line.step == 4)
    assert failed.score is None
    assert "Traceback" in failed.error
    assert watch(run, golden, until=8, attempts=2, **FAST) == lines


def test_a_checkpoint_that_the_trainer_rotates_away_is_skipped(arrive, golden, monkeypatch):
    monkeypatch.setattr(watching, "FIRST_WAIT", 0.05)
    run = arrive(4, 8)
    config = run / "checkpoint-4" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))

    def rotate(line, best):
        shutil.rmtree(run / "checkpoint-4", ignore_errors=True)

    lines = watch(run, golden, idle_exit=0.01, attempts=5, on_line=rotate, **FAST)
    assert {line.step: (line.status, line.note) for line in lines} == {
        4: ("skipped", "it has vanished"),
        8: ("ok", None),
    }


def test_no_news_ends_the_watch(arrive, golden):
    started = time.monotonic()
    assert watch(arrive(), golden, idle_exit=0.005, **FAST) == []
    assert time.monotonic() - started < 20


def test_bad_input(arrive, golden, make_golden, tmp_path):
    with pytest.raises(DataError, match=r"run folder '.*none' does not exist"):
        watch(tmp_path / "none", golden)
    with pytest.raises(SettingError, match="quiet=-1 must be a number from 0"):
        watch(tmp_path, golden, quiet=-1)
    run = arrive(4)
    watch(run, golden, until=4, **FAST)
    other = {
        "data": ({}, make_golden(9, name="dev")),
        "objective": ({"metric": "ndcg@10"}, golden),
        "metrics": ({"metrics": ["mrr"]}, golden),
        "ties": ({"ties": "trec"}, golden),
        "precision": ({"precision": "bf16"}, golden),
        "base": ({"base": str(tmp_path)}, golden),
    }
    for what, (options, data) in other.items():
        with pytest.raises(DataError, match=rf"was begun with other settings \(.*{what}.*\), and its scores cannot be"):
            watch(run, data, until=4, **options, **FAST)
    (run / WATCH / "settings.json").write_text("[")
    with pytest.raises(DataError, match=r"settings.json cannot be read \(.*\); move .* away to begin anew"):
        watch(run, golden, until=4, **FAST)


def test_a_base_that_fails_is_tried_again_and_also_after_a_restart(
    arrive, golden, tiny_base_path, tmp_path, monkeypatch
):
    monkeypatch.setattr(watching, "FIRST_WAIT", 0.05)
    run, base = arrive(4), tmp_path / "base"
    seen = []

    def comes(line, best):
        seen.append(line.step)
        if line.step == 4 and not base.exists():
            shutil.copytree(tiny_base_path, base)

    lines = watch(run, golden, base=str(base), until=4, attempts=50, on_line=comes, **FAST)
    assert seen == [4, 0]
    assert {line.step: line.status for line in lines} == {0: "ok", 4: "ok"}
    shutil.rmtree(run / WATCH)
    shutil.rmtree(base)
    lines = watch(run, golden, base=str(base), until=4, attempts=2, **FAST)
    assert {line.step: line.status for line in lines} == {0: "failed", 4: "ok"}
    shutil.copytree(tiny_base_path, base)
    arrive(8)
    lines = watch(run, golden, base=str(base), until=8, attempts=2, **FAST)
    assert {line.step: line.status for line in lines} == {0: "ok", 4: "ok", 8: "ok"}


def test_a_base_among_the_best_is_stored_in_the_shape_in_which_it_was_scored(arrive, golden, tiny_base_path):
    from sentence_transformers import SentenceTransformer

    from fullrank import evaluate

    run = arrive(4, how="peft")
    weights = run / "checkpoint-4" / "adapter_model.safetensors"
    save_file({name: 9 * np.ones_like(value) for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    pooling = run / "checkpoint-4" / "1_Pooling" / "config.json"
    body = json.loads(pooling.read_text())
    cls = {"pooling_mode": "cls"}
    body |= cls if "pooling_mode" in body else {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    pooling.write_text(json.dumps(body))
    lines = watch(run, golden, metric="ndcg@10", until=4, keep_best=2, **FAST)
    scores = {line.step: line.score for line in lines}
    model = SentenceTransformer(str(run / WATCH / "best" / "step-0"), device="cpu")
    assert evaluate(model, golden)["ndcg@10"] == pytest.approx(scores[0], abs=1e-9)


def test_a_folder_that_stays_half_written_is_named_once_and_does_not_hold_the_watch(arrive, golden, caplog):
    run = arrive(4, 8)
    (run / "checkpoint-8" / "model.safetensors").write_bytes(b"half")
    started = time.monotonic()
    lines = watch(run, golden, idle_exit=0.005, **FAST)
    assert [line.step for line in lines] == [4]
    assert time.monotonic() - started < 20
    assert caplog.text.count("checkpoint-8 is not taken: model.safetensors has 4 bytes: half-written") == 1


# ------------------------------------------------------------------------------------- the best is what is stored


def embeds_as(folder, other, golden):
    from sentence_transformers import SentenceTransformer

    one, two = (SentenceTransformer(str(path), device="cpu").encode(golden.query_texts[:5]) for path in (folder, other))
    return np.allclose(one, two, atol=1e-5)


def best_after(run, golden, base, monkeypatch, disturb, how="full", steps=(4, 8)):
    """Watches a run whose last step is the best; ``disturb`` comes between its evaluation and its storing."""
    from fullrank import watch as module

    real = module.copy_model

    def copy(source, target):
        if source.name == f"checkpoint-{steps[-1]}":
            disturb(source)
        real(source, target)

    monkeypatch.setattr(module, "copy_model", copy)
    return watch(run, golden, metric="ndcg@10", base=str(base), until=steps[-1], **FAST)


@pytest.mark.parametrize("how", ["full", "peft", "around"])
def test_a_best_step_that_is_rotated_away_while_it_is_scored_is_stored_from_memory(
    arrive, golden, tiny_runs, tiny_base_path, tmp_path, monkeypatch, how, caplog
):
    from sentence_transformers import SentenceTransformer

    from fullrank import evaluate

    run = arrive(4, 20, how=how)
    lines = best_after(run, golden, tiny_base_path, monkeypatch, shutil.rmtree, steps=(4, 20))
    scores = {line.step: line.score for line in lines}
    assert scores[20] == max(scores.values()) > scores[4]
    assert "checkpoint-20 cannot be copied, its weights are written from memory: " in caplog.text
    best = stored_best(run)
    assert (best.step, best.score) == (20, scores[20])
    model = SentenceTransformer(str(best.path), device="cpu")
    assert evaluate(model, golden)["ndcg@10"] == pytest.approx(scores[20], abs=1e-9)
    # The next one is read into a fresh model.
    monkeypatch.undo()
    arrive(16, how=how)
    later = {line.step: line.score for line in watch(run, golden, metric="ndcg@10", base=str(tiny_base_path), **ONCE)}
    whole = select_checkpoint(
        tiny_runs[how], golden, metric="ndcg@10", base=str(tiny_base_path), exhaustive=True, journal=tmp_path / "a.json"
    )
    assert later[16] == next(row.score for row in whole.rows if row.step == 16)


def test_a_best_step_that_is_written_anew_while_it_is_scored_is_stored_as_it_was(
    arrive, golden, tiny_runs, tiny_base_path, monkeypatch
):
    run = arrive(4, 20)

    def anew(source):
        shutil.copy(tiny_runs["full"] / "checkpoint-4" / "model.safetensors", source)

    best_after(run, golden, tiny_base_path, monkeypatch, anew, steps=(4, 20))
    best = stored_best(run)
    assert best.step == 20
    assert embeds_as(best.path, tiny_runs["full"] / "checkpoint-20", golden)


def test_a_step_that_cannot_be_stored_is_not_the_best(arrive, golden, monkeypatch):
    from fullrank import watch as module

    run, seen = arrive(4, 20), []
    real = module.copy_model

    def full(source, target):
        if source.name == "checkpoint-20":
            raise OSError("no space left")
        real(source, target)

    def also_full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(module, "copy_model", full)
    monkeypatch.setattr(module, "save_loaded", also_full)
    lines = watch(run, golden, metric="ndcg@10", until=20, on_line=lambda line, best: seen.append(best.step), **FAST)
    last = next(line for line in lines if line.step == 20)
    assert (last.status, last.eligible) == ("ok", False)
    assert last.findings == ["error: its weights could not be stored: no space left"]
    assert last.score > next(line.score for line in lines if line.step == 4)
    assert seen == [4, 4]
    assert stored_best(run).step == 4


def test_the_command_names_the_best_that_is_stored(arrive, golden, run_main, tmp_path):
    run, data = arrive(4), tmp_path / "data"
    write_data(data, golden)
    command = ["watch", run, "--data", data, "--until", "4", "--quiet", "0.05", "--poll", "0.02"]
    code, out, err = run_main(*command)
    assert code == 0, err
    stored = run / WATCH / "best" / "step-4"
    assert out.splitlines()[-1] == f"Best: step 4 with recall@1 {journal(run)[0]['score']:.4f}; {stored}"
    shutil.rmtree(stored)
    code, out, _ = run_main(*command)
    assert (code, out.strip()) == (1, "Best: none; no step was evaluated whose weights are stored.")


def test_a_base_whose_shape_is_rotated_away_is_stored(arrive, golden, monkeypatch):
    from fullrank import watch as module

    run, real = arrive(4, how="peft"), module._Scout._results

    def results(self, key, encoder):
        shutil.rmtree(run / "checkpoint-4", ignore_errors=True)
        return real(self, key, encoder)

    monkeypatch.setattr(module._Scout, "_results", results)
    lines = watch(run, golden, idle_exit=0.005, **FAST)
    assert [(line.step, line.status, line.eligible) for line in lines] == [(0, "ok", True)]
    assert stored_best(run).step == 0


# ------------------------------------------------------------------------------------- another training


def test_another_training_in_the_same_folder_is_refused_at_the_start(arrive, golden, tiny_runs):
    run = arrive(4, 8)
    lines = watch(run, golden, until=8, **FAST)
    assert all(len(line.fingerprint) == 16 for line in lines)
    os.utime(run / "checkpoint-8" / "model.safetensors")  # the same weights, written again
    assert watch(run, golden, until=8, **FAST) == lines
    shutil.rmtree(run / "checkpoint-4")  # rotated away
    assert watch(run, golden, until=8, **FAST) == lines
    shutil.rmtree(run / "checkpoint-8")
    shutil.copytree(tiny_runs["peft"] / "checkpoint-8", run / "checkpoint-8")
    message = r"other weights than lie there now \('checkpoint-8'\): another training or base has taken their place"
    with pytest.raises(DataError, match=message):
        watch(run, golden, until=8, **FAST)
    assert journal(run) == [line.as_dict() for line in lines]


def test_another_training_that_begins_while_it_is_watched_ends_the_watch(arrive, golden, tiny_runs):
    run, seen = arrive(4, 8), []

    def begins(line, best):
        seen.append(line.step)
        if line.step == 8:
            shutil.copy(tiny_runs["full"] / "checkpoint-20" / "model.safetensors", run / "checkpoint-4")

    with pytest.raises(DataError, match=r"lie there now \('checkpoint-4'\)"):
        watch(run, golden, idle_exit=0.05, on_line=begins, **FAST)
    assert seen == [4, 8]


def test_another_base_in_the_same_folder_is_refused(arrive, golden, tiny_runs, tiny_base_path, tmp_path):
    run, base = arrive(4), tmp_path / "base"
    shutil.copytree(tiny_base_path, base)
    lines = watch(run, golden, base=str(base), until=4, **FAST)
    assert watch(run, golden, base=str(base), until=4, **FAST) == lines
    shutil.copy(tiny_runs["full"] / "checkpoint-20" / "model.safetensors", base)
    with pytest.raises(DataError, match=r"lie there now \('the base model .*base'\)"):
        watch(run, golden, base=str(base), until=4, **FAST)


def test_weights_that_are_written_while_they_are_read_are_read_again(arrive, golden, tiny_runs, monkeypatch):
    from fullrank.candidates import Loader

    monkeypatch.setattr(watching, "FIRST_WAIT", 0.01)
    run, real, seen = arrive(4), Loader.load, []

    def load(self, candidate):
        found = real(self, candidate)
        if not seen:
            shutil.copy(tiny_runs["full"] / "checkpoint-20" / "model.safetensors", run / "checkpoint-4")
        seen.append(candidate.name)
        return found

    monkeypatch.setattr(Loader, "load", load)
    (line,) = watch(run, golden, metric="ndcg@10", until=4, **FAST)
    assert len(seen) == 2
    assert line.status == "ok"
    assert embeds_as(stored_best(run).path, tiny_runs["full"] / "checkpoint-20", golden)
    (other,) = (r for r in select_checkpoint(run, golden, metric="ndcg@10").rows)
    assert line.score == other.score


# ------------------------------------------------------------------------------------- chaos, with real processes


def write_data(folder, golden):
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", golden.corpus), ("queries", golden.queries)):
        rows = "".join(json.dumps({"_id": i, "text": t}) + "\n" for i, t in texts.items())
        (folder / f"{name}.jsonl").write_text(rows)
    rows = "".join(f"{q}\t{d}\t{g}\n" for q, docs in golden.qrels.items() for d, g in docs.items())
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)


class Watcher:
    """A `fullrank watch` in a process of its own."""

    def __init__(self, run, data, base, *options):
        command = [FULLRANK, "watch", run, "--data", data, "--base", base, "--quiet", "0.4", "--poll", "0.05", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=run.parent,
        )

    def end(self, number=None, timeout=120):
        if number is not None:
            self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out


def wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_chaos(arrive, golden, tiny_runs, tiny_base_path, tmp_path):
    data, run = tmp_path / "data", arrive()
    write_data(data, golden)
    watcher = Watcher(run, data, tiny_base_path)
    # A checkpoint that is written slowly, weights first: it must not be taken before it is whole.
    source, slow = tiny_runs["full"] / "checkpoint-8", run / "checkpoint-8"
    slow.mkdir()
    weights = (source / "model.safetensors").read_bytes()
    (slow / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    arrive(16)
    wait_for(lambda: any(line["step"] == 16 for line in journal(run)))
    # A second watcher on the same folder.
    code, out = Watcher(run, data, tiny_base_path).end()
    assert code == 2
    assert f"is watched already by process {watcher.process.pid}" in out
    # Killed while the next one is on its way, and the slow one is still half there.
    arrive(4)
    time.sleep(0.5)
    watcher.end(signal.SIGKILL)
    assert 8 not in {line["step"] for line in journal(run)}
    (slow / "model.safetensors").write_bytes(weights)
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (shutil.copytree if path.is_dir() else shutil.copy)(path, slow / path.name)
    # SIGTERM to the next watcher leaves a clean state as well.
    second = Watcher(run, data, tiny_base_path)
    wait_for(lambda: any(line["step"] == 8 for line in journal(run)))
    code, out = second.end(signal.SIGTERM)
    assert code == 0, out
    assert "Stopped. What is finished is in" in out
    arrive(20, 12)
    code, out = Watcher(run, data, tiny_base_path, "--until", "20").end()
    assert code == 0, out
    lines = journal(run)
    assert sorted(line["step"] for line in lines) == [0, *STEPS]  # each exactly once
    assert {line["status"] for line in lines} == {"ok"}
    whole = select_checkpoint(run, golden, base=str(tiny_base_path), exhaustive=True)
    scores = {row.step: row.score for row in whole.rows}
    assert {line["step"]: line["score"] for line in lines} == scores
    assert scalars(run) == {step: pytest.approx(score) for step, score in scores.items()}
    kept = json.loads((run / WATCH / "best" / "manifest.json").read_text())["kept"]
    assert [entry["step"] for entry in kept] == [whole.winner.step]
    assert f"Best: step {whole.winner.step} with recall@1 {whole.winner.score:.4f}" in out
