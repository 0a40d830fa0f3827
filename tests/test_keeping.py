"""What may be deleted: a pure decision that spares the best, the newest, the unscored; and one place that does it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fullrank._errors import DataError, SettingError
from fullrank.keeping import Keepsake, decide, delete, keepsakes
from fullrank.modelfiles import fingerprint
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
    items = [
        Keepsake("checkpoint-2", 2, 5, protected="chosen"),
        Keepsake("checkpoint-4", 4, 6),
        Keepsake("checkpoint-6", 6, 7),
    ]
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
        mark = fingerprint(path)
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


def keep(run, selection, *, keep_best=1, **options):
    return decide(keepsakes(run, selection, **options), keep_best=keep_best, keep_last=1)


def test_the_best_so_many_are_eligible_checkpoints_and_no_base(scored):
    run, selection = scored
    base = Row("base", "hub/base", 0, "complete", score=2.0, bound=2.0)
    six, four, eight, two, *rest = selection.rows
    refused = replace(six, eligible=False, why="general: ndcg@10 0.1, floor 0.2")
    beaten = replace(selection, winner=base, base=base, rows=(base, refused, four, eight, two, *rest))
    why = keep(run, beaten)
    assert (why["checkpoint-6"], why["checkpoint-4"], why["checkpoint-8"]) == ("", "among the 1 best", "")
    assert keep(run, beaten, keep_best=2)["checkpoint-8"] == "among the 2 best"
    none = replace(beaten, rows=(base, *(replace(row, eligible=False) for row in (six, four, eight, two)), *rest))
    assert keep(run, none)["checkpoint-4"] == "no checkpoint is eligible"


def test_a_row_counts_for_its_own_folder_and_not_for_others_of_its_step(scored):
    run, selection = scored
    twin = replace(selection.rows[1], name="my old run", path=str(run / "my old run"))  # of step 4
    why = keep(run, replace(selection, rows=(twin, *(r for r in selection.rows if r.name != "checkpoint-4"))))
    assert why["checkpoint-4"] == "not scored"


@pytest.mark.parametrize("how", ["adapter", "option", "row", "link to the folder", "link to a file"])
def test_what_something_else_needs_stays(scored, tmp_path, how):
    run, selection = scored
    target, options = run / "checkpoint-4", {}
    assert not keep(run, selection)[target.name]
    if how == "adapter":  # of any candidate, also one that was not chosen
        (run / "final").mkdir()
        save_file({"lora_A": np.zeros(4, np.float32)}, run / "final" / "adapter_model.safetensors")
        (run / "final" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(target)}))
    elif how == "option":
        options = {"base": str(target)}
    elif how == "row":
        selection = replace(selection, base=Row("base", str(target), 0, "complete"))
    elif how == "link to the folder":
        (run / "best").symlink_to(target.name)
    else:
        (run / "final").mkdir()
        (run / "final" / "model.safetensors").symlink_to(target / "model.safetensors")
    expected = "the target of the link" if how.startswith("link") else "a base model"
    assert keep(run, selection, **options)[target.name].startswith(expected)
    with pytest.raises(DataError, match=f"checkpoint-4 is {expected}.*; nothing was deleted"):
        delete(run, [target.name], selection, **options)
    assert target.is_dir()


@pytest.mark.parametrize("text", ["{", '{"global_step": "x"}', "[]"])
def test_a_state_that_cannot_be_read_keeps_its_folder_and_the_others_go_on(scored, text):
    run, selection = scored
    (run / "checkpoint-8" / "trainer_state.json").write_text(text)
    why = keep(run, selection)
    assert why["checkpoint-8"] == "its trainer_state.json cannot be read"
    assert why["checkpoint-4"] == ""
    assert why["checkpoint-12"] == "the newest to resume from"


def test_what_is_said_to_be_gone_is_gone(scored, not_ours, caplog):
    run, selection = scored
    assert delete(run, ["checkpoint-4", "checkpoint-8"], selection) == [run / "checkpoint-8"]
    assert "checkpoint-4 could not be deleted: not yours" in caplog.text
