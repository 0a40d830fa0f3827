"""The store of best weights: what it keeps, what it never touches, and what is left when it is killed."""

import errno
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fullrank
from fullrank import BestStore
from fullrank._errors import DataError, SettingError


def saver(text):
    """Returns a save function that writes a small model folder; subfolders as a SentenceTransformer has them."""

    def save(folder):
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text("{}")
        (folder / "weights").write_text(str(text))

    return save


def weights(store):
    return {entry.step: (entry.path / "weights").read_text() for entry in store.stored}


def folders(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def snapshot(folder):
    """Returns every file below ``folder`` with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def run(store, scores, first=2, every=2):
    return [store.offer(first + i * every, score, saver(first + i * every)) for i, score in enumerate(scores)]


# ------------------------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(("scores", "best"), [([0.5, 0.6, 0.9, 0.8], 6), ([0.9, 0.5, 0.4, 0.6], 2)])
def test_case_30_the_best_step_is_stored_whatever_comes_later(tmp_path, scores, best):
    store = BestStore(tmp_path / "best")
    run(store, scores)
    assert store.best.step == best
    assert store.best.score == 0.9
    assert store.best.path == tmp_path / "best" / f"step-{best}"
    assert weights(store) == {best: str(best)}
    assert folders(tmp_path / "best") == [f"step-{best}"]


@pytest.mark.parametrize("last", [0.7, 0.69999])
def test_case_32_only_strict_improvement_moves_the_best(tmp_path, last):
    store = BestStore(tmp_path)
    assert run(store, [0.5, 0.7, 0.1, last]) == [True, True, False, False]
    assert weights(store) == {4: "4"}


def test_case_33_the_base_stays(tmp_path):
    store = BestStore(tmp_path)
    assert run(store, [0.99, 0.5, 0.4, 0.3, 0.2], first=0) == [True, False, False, False, False]
    assert store.best.step == 0


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_are_never_stored(tmp_path, score):
    store = BestStore(tmp_path / "best", keep_best=3)
    assert store.wants(2, score) is False
    assert store.offer(2, score, saver("bad")) is False
    assert store.best is None
    assert not (tmp_path / "best").exists()
    store.offer(4, -0.5, saver(4))
    assert store.offer(6, score, saver("bad")) is False
    assert weights(store) == {4: "4"}


def test_keep_best_keeps_the_best_few_and_says_which_is_the_best(tmp_path):
    store = BestStore(tmp_path, keep_best=2)
    # .5; .7 is best; .6 pushes out .5 but is not the best; .55 is not wanted; .8 is best and pushes out .6.
    assert run(store, [0.5, 0.7, 0.6, 0.55, 0.8]) == [True, True, False, False, True]
    assert [(entry.step, entry.score) for entry in store.stored] == [(10, 0.8), (4, 0.7)]
    assert weights(store) == {10: "10", 4: "4"}
    assert folders(tmp_path) == ["step-10", "step-4"]


def test_a_tie_at_the_border_keeps_the_earlier_step(tmp_path):
    store = BestStore(tmp_path, keep_best=2)
    run(store, [0.7, 0.5, 0.5, 0.7])
    assert [(entry.step, entry.score) for entry in store.stored] == [(2, 0.7), (8, 0.7)]


def test_save_is_called_only_where_the_step_is_wanted_and_once(tmp_path):
    store, calls = BestStore(tmp_path), []

    def save(folder):
        assert folder.is_dir()
        assert list(folder.iterdir()) == []
        calls.append(folder)
        saver("x")(folder)

    assert store.wants(2, 0.5) is True
    assert calls == []
    store.offer(2, 0.5, save)
    assert store.wants(4, 0.5) is False
    store.offer(4, 0.5, save)
    assert len(calls) == 1


def test_a_stored_step_is_frozen(tmp_path):
    store = BestStore(tmp_path / "best")
    assert store.stored == []
    store.offer(7, 0.5, saver(7))
    assert store.best.path == tmp_path / "best" / "step-7"
    with pytest.raises(FrozenInstanceError):
        store.best.score = 1.0


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([0.25, 0.5, 0.5, 0.75, -0.5, math.nan, math.inf]), max_size=7),
    st.integers(1, 3),
    st.sets(st.integers(0, 6)),
)
def test_any_run_keeps_what_a_plain_loop_keeps(tmp_path_factory, scores, keep_best, reopened):
    folder = tmp_path_factory.mktemp("store")
    store = BestStore(folder, keep_best=keep_best)
    kept = []  # (score, step), best first
    for step, score in enumerate(scores):
        if step in reopened:
            store = BestStore(folder, keep_best=keep_best)
        is_best = store.offer(step, score, saver(step))
        before = kept
        if math.isfinite(score):
            place = sum(other >= score for other, _ in kept)
            kept = [*kept[:place], (score, step), *kept[place:]][:keep_best]
        assert is_best is (kept != before and kept[0] == (score, step))
        assert [(entry.score, entry.step) for entry in store.stored] == kept
        assert weights(store) == {s: str(s) for _, s in kept}
        if folder.exists():
            assert folders(folder) == sorted(f"step-{s}" for _, s in kept)
    shutil.rmtree(folder)


def test_a_step_that_is_offered_again_counts_only_where_it_is_better(tmp_path):
    """A resumed run comes past the step of an abandoned branch again: the stored best is still a candidate."""
    store = BestStore(tmp_path)
    store.offer(4, 0.9, saver("first"))
    assert store.offer(4, 0.7, saver("second")) is False
    assert (store.best.score, weights(store)) == (0.9, {4: "first"})
    assert store.offer(4, 0.9, saver("third")) is False
    assert weights(store) == {4: "first"}
    assert store.offer(4, 0.95, saver("fourth")) is True
    assert (store.best.score, weights(store)) == (0.95, {4: "fourth"})
    assert folders(tmp_path) == ["step-4.1"]  # written beside, so that one of the two is whole at every moment


# ------------------------------------------------------------------------------------------------ manifest, reopening


def test_the_manifest_lists_steps_and_scores(tmp_path):
    store = BestStore(tmp_path, keep_best=2)
    run(store, [0.1 + 0.2, 1 / 3, 0.1])
    body = json.loads((tmp_path / "manifest.json").read_text())
    assert body["kept"] == [
        {"step": 4, "score": 1 / 3, "folder": "step-4", "files": {"1_Pooling/config.json": 2, "weights": 1}},
        {"step": 2, "score": 0.1 + 0.2, "folder": "step-2", "files": {"1_Pooling/config.json": 2, "weights": 1}},
    ]


def test_a_second_store_reads_it_back(tmp_path):
    run(BestStore(tmp_path, keep_best=2), [0.5, 0.7, 0.6])
    again = BestStore(str(tmp_path), keep_best=2)
    assert [(entry.step, entry.score) for entry in again.stored] == [(4, 0.7), (6, 0.6)]
    assert weights(again) == {4: "4", 6: "6"}
    assert again.offer(8, 0.7, saver(8)) is False
    assert again.offer(10, 0.8, saver(10)) is True
    assert folders(tmp_path) == ["step-10", "step-4"]


def test_a_smaller_keep_best_lets_go_of_the_lesser_ones_at_the_next_offer(tmp_path):
    run(BestStore(tmp_path, keep_best=3), [0.5, 0.7, 0.6])
    again = BestStore(tmp_path, keep_best=1)
    assert again.best.step == 4
    assert again.offer(8, 0.8, saver(8)) is True
    assert folders(tmp_path) == ["step-8"]


def test_a_relative_folder_stays_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = BestStore("out/best")
    store.offer(2, 0.5, saver(2))
    assert weights(BestStore(tmp_path / "out" / "best")) == {2: "2"}


def test_folders_that_are_gone_are_left_out_and_do_not_block_the_next(tmp_path):
    """A score whose weights are gone cannot be best; otherwise the run would end with nothing."""
    store = BestStore(tmp_path)
    store.offer(2, 0.9, saver(2))
    shutil.rmtree(store.best.path)
    for again in (store, BestStore(tmp_path)):
        assert again.stored == []
        assert again.best is None
    assert store.wants(4, 0.8) is True
    assert store.offer(4, 0.8, saver(4)) is True
    assert weights(BestStore(tmp_path)) == {4: "4"}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"kept": 3}',
        '{"kept": [{"step": "two", "score": 0.5, "folder": "step-2"}]}',
        '{"kept": [{"step": 2, "score": "high", "folder": "step-2"}]}',
        '{"kept": [{"step": 2, "score": 0.5, "folder": "../elsewhere"}]}',
        '{"kept": [{"step": 2, "score": 0.5}]}',
        "\xff",
    ],
)
def test_a_broken_manifest_is_an_error_that_says_what_to_do(tmp_path, body):
    folder = tmp_path / "best"
    run(BestStore(folder), [0.5])
    (folder / "manifest.json").write_bytes(body.encode("latin-1"))
    before = snapshot(folder)
    with pytest.raises(DataError) as found:
        BestStore(folder)
    text = str(found.value)
    assert text.startswith(f"{folder / 'manifest.json'} cannot be read (")
    assert text.endswith(f"it lists the stored steps. Move {folder} away")
    assert snapshot(folder) == before


@pytest.mark.parametrize("score", ["NaN", "Infinity", "null"])
def test_a_manifest_never_makes_a_score_that_is_no_number_the_best(tmp_path, score):
    run(BestStore(tmp_path, keep_best=2), [0.5, 0.4])
    rows = [f'{{"step": {s}, "score": {v}, "folder": "step-{s}"}}' for s, v in ((2, score), (4, 0.4))]
    (tmp_path / "manifest.json").write_text(f'{{"kept": [{", ".join(rows)}]}}')
    try:
        store = BestStore(tmp_path, keep_best=2)
    except DataError:
        return
    assert store.best.step == 4


@pytest.mark.parametrize("keep_best", [0, -1])
def test_keep_best_below_one(tmp_path, keep_best):
    with pytest.raises(SettingError, match=f"keep_best={keep_best} must be at least 1"):
        BestStore(tmp_path / "best", keep_best=keep_best)
    assert list(tmp_path.iterdir()) == []


def test_the_package_exports_it():
    assert fullrank.BestStore is BestStore


# ------------------------------------------------------------------------------------------------ what is not ours


def test_foreign_folders_and_files_are_never_touched(tmp_path):
    for name in ("step-0", "step-3", "step-500", "checkpoint-2", "step-x"):
        saver("foreign")(_made(tmp_path / name))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-7").write_text("a file")
    foreign = snapshot(tmp_path)
    store = BestStore(tmp_path)
    run(store, [0.5, 0.6, 0.7, 0.8])
    left = snapshot(tmp_path)
    assert {name: left[name] for name in foreign} == foreign
    assert [entry.step for entry in store.stored] == [8]
    assert store.best.step == 8


def _made(folder):
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_foreign_step_in_the_way_stays_and_ours_stands_beside_it(tmp_path, kind):
    folder, elsewhere = tmp_path / "best", tmp_path / "elsewhere"
    store = BestStore(folder)
    store.offer(2, 0.5, saver(2))
    saver("foreign")(_made(elsewhere))
    if kind == "folder":
        saver("foreign")(_made(folder / "step-4"))
    elif kind == "file":
        (folder / "step-4").write_text("foreign")
    else:
        (folder / "step-4").symlink_to(elsewhere)
    foreign = {name: text for name, text in snapshot(tmp_path).items() if "step-4" in str(name) or "else" in str(name)}
    assert store.offer(4, 0.6, saver("new")) is True
    assert store.best.path == folder / "step-4.1"
    assert weights(BestStore(folder)) == {4: "new"}
    assert store.offer(6, 0.7, saver(6)) is True
    left = snapshot(tmp_path)
    assert foreign
    assert {name: left[name] for name in foreign} == foreign
    assert not (folder / "step-4.1").exists()


# ------------------------------------------------------------------------------------------------ saving that fails


def full_disk(folder):
    """Writes half of a model, then hits a device that is full."""
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_text("half")
    with open("/dev/full", "wb") as file:
        file.write(b"\0" * 100_000)


def raises_at_once(folder):
    raise OSError(errno.EACCES, "no permission")


def raises_late(folder):
    saver("half")(folder)
    raise RuntimeError("the network went away")


def interrupted(folder):
    saver("half")(folder)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("save", "error"),
    [(full_disk, OSError), (raises_at_once, OSError), (raises_late, RuntimeError), (interrupted, KeyboardInterrupt)],
)
@pytest.mark.parametrize("keep_best", [1, 2])
def test_a_save_that_raises_leaves_what_was_stored(tmp_path, save, error, keep_best):
    store = BestStore(tmp_path, keep_best=keep_best)
    run(store, [0.5, 0.6])
    before, stored = snapshot(tmp_path), store.stored
    with pytest.raises(error) as found:
        store.offer(6, 0.9, save)
    if save is full_disk:
        assert found.value.errno == errno.ENOSPC
    assert snapshot(tmp_path) == before
    assert store.stored == stored
    assert BestStore(tmp_path).best.step == 4
    assert store.offer(6, 0.9, saver("second try")) is True
    assert weights(store)[6] == "second try"


def test_a_first_save_that_raises_leaves_no_best_and_no_partial_folder(tmp_path):
    store = BestStore(tmp_path / "best")
    with pytest.raises(OSError, match="No space left"):
        store.offer(2, 0.5, full_disk)
    assert store.best is None
    assert snapshot(tmp_path / "best") == {}
    assert store.offer(2, 0.4, saver(2)) is True


def test_a_stored_step_stays_whole_where_its_replacement_fails(tmp_path):
    store = BestStore(tmp_path)
    store.offer(4, 0.5, saver("first"))
    before = snapshot(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        store.offer(4, 0.9, full_disk)
    assert snapshot(tmp_path) == before
    assert (store.best.score, weights(store)) == (0.5, {4: "first"})


def test_a_save_that_removes_its_folder_is_an_error_and_leaves_the_best(tmp_path):
    store = BestStore(tmp_path)
    run(store, [0.5])
    with pytest.raises(OSError, match=r"."):
        store.offer(4, 0.9, lambda folder: shutil.rmtree(folder))
    assert weights(BestStore(tmp_path)) == {2: "2"}


def test_a_disk_that_is_full_at_the_manifest_leaves_what_was_stored(tmp_path):
    """``offer`` promises: could not be written, then what was stored stays as it was; in memory and on disk."""
    store = BestStore(tmp_path)
    run(store, [0.5])
    before = snapshot(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(folder):
        saver("new")(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # from here on no file may grow

    failure = None
    try:
        try:
            store.offer(4, 0.9, save)
        except OSError as error:
            failure = error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure is not None
    assert weights(BestStore(tmp_path)) == {2: "2"}
    assert [(entry.step, entry.score) for entry in store.stored] == [(2, 0.5)]
    assert {name: body for name, body in snapshot(tmp_path).items() if name in before} == before
    # The next evaluation goes on, at the same step or a later one, and nothing is left behind.
    assert store.offer(4, 0.9, saver("second try")) is True
    assert store.offer(6, 0.95, saver(6)) is True
    assert weights(store) == {6: "6"}
    assert folders(tmp_path) == ["step-6"]


# ------------------------------------------------------------------------------------------------ killed


CHILD = """
import os, shutil, sys, time
from pathlib import Path
from fullrank.store import BestStore

folder, where, step, score = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def stop():
    print("now", flush=True)
    time.sleep(120)

def save(path):
    (path / "config.json").write_text("{}")
    (path / "weights").write_text("half")
    if where == "saving":
        stop()
    (path / "weights").write_text(f"{step} of the child")
    if where == "saved":
        stop()

real_rename, real_rmtree, real_replace = Path.rename, shutil.rmtree, Path.replace

def rename(self, target):
    if where == "before rename" and Path(target).name.startswith(f"step-{step}"):
        stop()
    found = real_rename(self, target)
    if where == "after rename" and Path(target).name.startswith(f"step-{step}"):
        stop()
    return found

def replace(self, target):
    found = real_replace(self, target)
    if where == "after manifest" and Path(target).name == "manifest.json":
        stop()
    return found

Path.rename, Path.replace = rename, replace
store = BestStore(folder)
store.offer(step, score, save)
print("not stopped", flush=True)
"""

MOMENTS = ("saving", "saved", "before rename", "after rename", "after manifest")


def kill_at(folder, where, *, step=4, score=0.9):
    """Runs a real process that offers a step, and kills it at the moment."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), where, str(step), str(score)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout.readline() == "now\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("where", MOMENTS)
def test_killed_at_any_moment_a_whole_best_is_left(tmp_path, where):
    folder = tmp_path / "best"
    run(BestStore(folder), [0.5])
    kill_at(folder, where)
    store = BestStore(folder)
    assert store.best is not None
    assert (store.best.path / "weights").read_text() == ("4 of the child" if where == "after manifest" else "2")
    assert (store.best.path / "config.json").exists() is (where == "after manifest")
    for entry in store.stored:
        assert (entry.path / "weights").read_text() != "half"
    (kept,) = json.loads((folder / "manifest.json").read_text())["kept"]
    assert (kept["step"], kept["score"]) == ((4, 0.9) if where == "after manifest" else (2, 0.5))


@pytest.mark.parametrize("where", MOMENTS)
@pytest.mark.parametrize("next_step", [4, 6])
def test_after_a_kill_the_next_run_goes_on(tmp_path, where, next_step):
    """At the step that was being stored (a resumed run comes past it again) or at a later one."""
    folder = tmp_path / "best"
    run(BestStore(folder), [0.5])
    kill_at(folder, where)
    store = BestStore(folder)
    assert store.offer(next_step, 0.95, saver("next")) is True
    assert weights(BestStore(folder)) == {next_step: "next"}


@pytest.mark.parametrize("where", MOMENTS)
def test_killed_while_replacing_a_stored_step_a_whole_best_is_left(tmp_path, where):
    """The folder of the best step is whole at every moment, also where it makes room for a better one of that step."""
    folder = tmp_path / "best"
    run(BestStore(folder), [0.5])
    kill_at(folder, where, step=2)
    store = BestStore(folder)
    assert store.best is not None
    assert (store.best.path / "weights").read_text() in ("2", "2 of the child")
    assert store.offer(4, 0.95, saver("next")) is True
    assert weights(BestStore(folder)) == {4: "next"}


def test_killed_at_the_first_save_nothing_is_best_and_the_next_run_goes_on(tmp_path):
    folder = tmp_path / "best"
    kill_at(folder, "saving")
    store = BestStore(folder)
    assert store.best is None
    assert store.stored == []
    assert store.offer(4, 0.5, saver("next")) is True
    assert weights(BestStore(folder)) == {4: "next"}


ENDLESS = """
import sys
from fullrank.store import BestStore

def save(path, step):
    (path / "1_Pooling").mkdir()
    for name in ("config.json", "weights", "1_Pooling/config.json"):
        with (path / name).open("w") as file:
            for _ in range(20):
                file.write(f"{step}\\n")
                file.flush()

store = BestStore(sys.argv[1], keep_best=2)
for step in range(10**9):
    store.offer(step, step / 10**9, lambda path: save(path, step))
    print(step, flush=True)
"""


def test_killed_at_any_time_the_best_is_whole_and_the_next_run_goes_on(tmp_path):
    """Not at chosen moments, but whenever: 12 kills of one run after another in the same folder."""
    last = -1
    for round_ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS.replace("range(10**9)", f"range({last + 1}, 10**9)"), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            for _ in range(5 + round_):
                said = int(process.stdout.readline())
            time.sleep(0.0007 * round_)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            process.stdout.close()
        store = BestStore(tmp_path)
        last = store.best.step
        assert last >= said
        for entry in store.stored:
            for name in ("config.json", "weights", "1_Pooling/config.json"):
                assert (entry.path / name).read_text() == f"{entry.step}\n" * 20
    assert len(store.stored) == 2


def test_a_real_model_survives_a_kill(tmp_path, tiny_st):
    """The stored folder loads as a SentenceTransformer and embeds as before, after a kill in the middle of a save."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = tiny_st()
    expected = model.encode(["bal can dis", "fot"], convert_to_tensor=True)
    store = BestStore(tmp_path)
    assert store.offer(2, 0.5, lambda folder: model.save_pretrained(str(folder))) is True
    kill_at(tmp_path, "saving")
    best = BestStore(tmp_path).best
    assert best.step == 2
    loaded = SentenceTransformer(str(best.path), device="cpu")
    assert torch.equal(loaded.encode(["bal can dis", "fot"], convert_to_tensor=True), expected)


def test_nothing_is_printed_and_no_warning_is_logged_in_a_quiet_run(tmp_path, capsys, caplog):
    with caplog.at_level(logging.WARNING):
        run(BestStore(tmp_path), [0.5, 0.7, 0.6])
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


def test_the_example_of_the_docstring_works(tmp_path, tiny_bert):
    store = BestStore(tmp_path / "out" / "best")
    assert store.offer(3, 0.25, lambda folder: tiny_bert.save_pretrained(folder))
    assert isinstance(store.best.path, Path)
    assert (store.best.path / "config.json").is_file()


# ------------------------------------------------------------------------------------------------ a used folder, damage


def test_a_used_folder_says_once_what_must_be_beaten(tmp_path, caplog):
    run(BestStore(tmp_path / "best"), [0.9])
    store = BestStore(tmp_path / "best")
    assert not caplog.text  # looking says nothing
    assert run(store, [0.3, 0.95], first=4) == [False, True]
    assert caplog.text.count("holds steps of an earlier run (step 2: 0.9000): what is offered now must beat them") == 1
    assert "Pass resume=False" in caplog.text


def test_a_used_folder_can_be_gone_on_with_or_moved_aside(tmp_path, caplog):
    run(BestStore(tmp_path / "best"), [0.9])
    assert run(BestStore(tmp_path / "best", resume=True), [0.3], first=4) == [False]
    assert not caplog.text
    fresh = BestStore(tmp_path / "best", resume=False)
    assert run(fresh, [0.3], first=4) == [True]
    assert fresh.best.step == 4
    assert folders(tmp_path) == ["best", "best.1"]
    assert weights(BestStore(tmp_path / "best.1")) == {2: "2"}


@pytest.mark.parametrize("harm", ["gone", "cut", "emptied"])
def test_a_step_that_lost_its_weights_is_no_stored_step(tmp_path, harm, caplog):
    store = BestStore(tmp_path, keep_best=2)
    for step, score in ((2, 0.5), (4, 0.9)):
        store.offer(step, score, saver(step * 1_000_000))
    file = store.best.path / "weights"
    if harm == "gone":
        file.unlink()
    else:
        file.write_text("" if harm == "emptied" else "40")
    opened = BestStore(tmp_path, keep_best=2, resume=True)
    assert [entry.step for entry in opened.stored] == [2]
    assert "step-4 has lost files since it was stored, and is no candidate any more" in caplog.text
    assert opened.offer(4, 0.9, saver("again"))
    assert weights(BestStore(tmp_path)) == {2: "2000000", 4: "again"}


def test_a_card_may_change(tmp_path):
    store = BestStore(tmp_path)
    store.offer(2, 0.5, lambda folder: (folder / "README.md").write_text("a card"))
    (store.best.path / "README.md").write_text("")
    assert BestStore(tmp_path).best.step == 2
