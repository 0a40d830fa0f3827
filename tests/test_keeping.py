"""What may be deleted: a pure decision that spares the best, the newest, the unscored; and one place that does it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fullrank._errors import DataError, SettingError
from fullrank.discover import Candidate, fingerprint
from fullrank.keeping import Keepsake, decide, delete, keepsakes
from fullrank.selection import Row, Selection


@given(
    ranks=st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=9, unique_by=lambda r: r or id(r)),
    keep_best=st.integers(1, 3),
    keep_last=st.integers(1, 3),
)
def test_what_may_go_is_never_the_best_the_newest_or_the_unscored(ranks, keep_best, keep_last):
    items = [Keepsake(f"checkpoint-{i}", i, rank) for i, rank in enumerate(ranks)]
    why = decide(items, keep_best=keep_best, keep_last=keep_last)
    gone = [item for item in items if not why[item.name]]
    assert all(item.rank is not None and item.rank >= keep_best for item in gone)
    assert all(item.step < len(ranks) - keep_last for item in gone)


def test_what_is_protected_stays_whatever_its_rank():
    items = [Keepsake("checkpoint-2", 2, 5, "chosen"), Keepsake("checkpoint-4", 4, 6), Keepsake("checkpoint-6", 6, 7)]
    assert decide(items, keep_best=1, keep_last=1) == {
        "checkpoint-2": "chosen",
        "checkpoint-4": "",
        "checkpoint-6": "among the 1 newest",
    }
    with pytest.raises(
        SettingError, match=r"keep_last=0 must be at least 1: the best and the newest are never deleted"
    ):
        decide(items, keep_best=1, keep_last=0)


@pytest.fixture
def scored(tmp_path):
    """A run of six checkpoints and what a selection said of them: 6 best, then 4, 8, 2; 10 failed, 12 unknown."""
    run, rows = tmp_path / "run", []
    for step in (2, 4, 6, 8, 10, 12):
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": np.full(4, step, np.float32)}, folder / "model.safetensors")
        best = str(run / "checkpoint-2")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "best_model_checkpoint": best}))
    for place, step in enumerate((6, 4, 8, 2)):
        path = run / f"checkpoint-{step}"
        mark = fingerprint(Candidate(path.name, path, step, "model", True, "checkpoint"))
        rows.append(Row(path.name, str(path), step, "complete", score=1 - place / 10, bound=0.5, fingerprint=mark))
    rows.append(Row("checkpoint-10", str(run / "checkpoint-10"), 10, "failed"))
    selection = Selection(
        rows[0],
        tuple(rows),
        None,
        None,
        True,
        "recall@1",
        "max",
        1.0,
        None,
        None,
        None,
        None,
        None,
        "recall@1",
        None,
        0,
        0.0,
        "",
        run / "selection.json",
    )
    return run, selection


def test_the_trainers_own_best_and_the_one_to_resume_from_stay(scored):
    run, selection = scored
    assert decide(keepsakes(run, selection), keep_best=1, keep_last=1) == {
        "checkpoint-2": "best_model_checkpoint of the trainer",
        "checkpoint-4": "",
        "checkpoint-6": "chosen",
        "checkpoint-8": "",
        "checkpoint-10": "not scored",
        "checkpoint-12": "the newest to resume from",
    }


def test_links_and_other_folders_are_not_looked_at(scored, tmp_path):
    run, selection = scored
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoint-14").symlink_to(tmp_path / "elsewhere")
    (run / "final").mkdir()
    assert {item.name for item in keepsakes(run, selection)} == {f"checkpoint-{s}" for s in (2, 4, 6, 8, 10, 12)}


def test_only_what_is_named_goes(scored):
    run, selection = scored
    assert delete(run, ["checkpoint-4"], selection) == [run / "checkpoint-4"]
    assert sorted(p.name for p in run.iterdir()) == [f"checkpoint-{s}" for s in (10, 12, 2, 6, 8)]


@pytest.mark.parametrize("name", ["../other", ".", "", "checkpoint-4/..", "nothing", "linked"])
def test_nothing_outside_the_folder_is_deleted(scored, tmp_path, name):
    run, selection = scored
    (tmp_path / "other").mkdir()
    (run / "linked").symlink_to(tmp_path / "other")
    with pytest.raises(DataError, match=r"is no folder right below .*; nothing was deleted"):
        delete(run, ["checkpoint-4", name], selection)
    assert (run / "checkpoint-4").is_dir()
    assert (tmp_path / "other").is_dir()


def test_what_has_changed_since_it_was_scored_stays(scored):
    run, selection = scored
    save_file({"w": np.zeros(4, np.float32)}, Path(run / "checkpoint-8" / "model.safetensors"))
    with pytest.raises(DataError, match=r"checkpoint-8 has changed since it was scored; nothing was deleted"):
        delete(run, ["checkpoint-4", "checkpoint-8"], selection)
    assert (run / "checkpoint-4").is_dir()
