"""Handing a choice over: the right weights, whatever folders are called, into any new or empty folder."""

import re
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from fullrank import GoldenSet, Result, evaluate, load_golden, select_checkpoint
from fullrank._errors import SettingError
from fullrank.averaging import copy_model
from fullrank.handing import hand_over
from fullrank.leaderboard import leaderboard_table
from training import write_beir

pytest.importorskip("peft")
OF_TRAINING = ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth", "trainer_state.json")


@pytest.fixture(scope="module")
def golden(make_golden):
    return make_golden(3, name="dev")


@pytest.fixture
def run(tiny_runs, tmp_path):
    """Factory: a fresh copy of a run."""

    def copy(how="full"):
        return Path(shutil.copytree(tiny_runs[how], tmp_path / how))

    return copy


@pytest.fixture
def full_disk():
    """Factory: no file grows beyond so many bytes; the limit is lifted at the end."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda n_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def score_of(folder, golden, metric="ndcg@10"):
    return evaluate(SentenceTransformer(str(folder), device="cpu"), golden, metrics=[metric])[metric]


def as_model(run, step, name):
    """Renames a checkpoint to a plain model folder."""
    folder = (run / f"checkpoint-{step}").rename(run / name)
    for file in OF_TRAINING:
        (folder / file).unlink(missing_ok=True)
    return folder


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["base", "soup"])
def test_a_folder_may_have_the_name_of_what_is_no_folder(run, golden, tiny_base_path, tmp_path, name):
    folder = run("peft")
    alone = select_checkpoint(folder, golden, metric="ndcg@10", exhaustive=True, journal=tmp_path / "alone.json")
    assert alone.improved
    as_model(folder, alone.winner.step, name)
    options = {"metric": "ndcg@10", "exhaustive": True, "soup": name == "soup"}
    found = select_checkpoint(folder, golden, **options)
    assert (found.winner.name, found.winner.origin, found.improved) == (name, "folder", True)
    assert found.winner.path == str(folder / name)
    assert leaderboard_table(found).count("* chosen") == 1
    target = hand_over(found, tmp_path / "chosen")
    assert score_of(target, golden) == found.winner.score
    assert "The mean of the steps" not in (target / "README.md").read_text()
    rows = {(row.name, row.origin): row for row in found.rows}
    assert rows["base", "base"].score == score_of(tiny_base_path, golden) != rows[name, "folder"].score
    # A result and a journal entry for each: nothing is encoded again.
    again = select_checkpoint(folder, golden, **options)
    assert again.documents_spent == again.documents_encoded
    assert {(row.name, row.origin): row.score for row in again.rows} == {key: row.score for key, row in rows.items()}


def test_the_model_of_the_run_itself_may_have_the_name_of_a_folder_in_it(run, golden):
    folder = run("full")
    inner = as_model(folder, 20, folder.name)
    shutil.copytree(inner, folder, dirs_exist_ok=True)
    weights = load_file(inner / "model.safetensors")
    save_file({name: value * 1.5 for name, value in weights.items()}, inner / "model.safetensors", {"format": "pt"})
    found = select_checkpoint(folder, golden, exhaustive=True)
    assert sum(row.name == folder.name for row in found.rows) == 2
    again = select_checkpoint(folder, golden, exhaustive=True)
    assert again.documents_spent == again.documents_encoded
    assert again.rows == found.rows


def test_what_a_base_that_fails_is_called_stands_in_the_reason(run, golden):
    folder = run("full")
    found = select_checkpoint(folder, golden)
    why = "checkpoint-4 is an adapter on the base 'bert', which does not load"
    base = replace(found.rows[0], name="base", path="bert", status="failed", why=why, origin="base")
    lost = replace(
        base, name="checkpoint-4", path="/r/checkpoint-4", why="/r/checkpoint-4/x is cut, /r/checkpoint-40 not"
    )
    table = leaderboard_table(replace(found, rows=(base, replace(lost, origin="checkpoint"))))
    assert why in table
    assert "failed: the folder/x is cut, /r/checkpoint-40 not" in table


# ------------------------------------------------------------------ where to


def test_a_folder_that_cannot_be_replaced_is_filled(run, golden, tmp_path, monkeypatch):
    found = select_checkpoint(run("full"), golden)
    (tmp_path / "here").mkdir()
    (tmp_path / "ended").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ended")
    monkeypatch.chdir(tmp_path / "here")
    for target in (".", tmp_path / "link", tmp_path / "new" / "one"):
        folder = hand_over(found, target)
        assert folder.samefile(target)
        assert score_of(target, golden, "recall@1") == found.winner.score
        assert not [path.name for path in Path(target).iterdir() if path.name.endswith(".partial")]
    assert (tmp_path / "link").is_symlink()


def test_a_mount_is_filled(run, golden, tmp_path, monkeypatch):
    found, mount = select_checkpoint(run("full"), golden), tmp_path / "mount"
    mount.mkdir()
    real = Path.rmdir

    def busy(self):
        if self == mount:
            raise OSError("Device or resource busy")
        real(self)

    monkeypatch.setattr(Path, "rmdir", busy)
    assert score_of(hand_over(found, mount), golden, "recall@1") == found.winner.score


@pytest.mark.parametrize("there", [True, False])
def test_a_copy_that_fails_leaves_nothing_behind(run, golden, tmp_path, monkeypatch, there):
    from fullrank import handing

    found, target = select_checkpoint(run("full"), golden), tmp_path / "chosen"
    if there:
        target.mkdir()
    real = Path.rename
    monkeypatch.setattr(handing, "with_section", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hand_over(found, target)
    assert target.exists() is there
    assert not there or not any(target.iterdir())
    monkeypatch.undo()

    def full(self, to):
        if self.name == "model.safetensors" and Path(to).parent == target:
            raise OSError("no space left")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="no space left"):
        hand_over(found, target)
    assert target.exists() is there
    assert not there or not any(target.iterdir())


def test_a_folder_that_is_taken_or_cannot_be_reached_is_refused(run, golden, tmp_path, run_main):
    found = select_checkpoint(run("full"), golden)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(SettingError, match="taken: exists already; name a new or empty folder"):
        hand_over(found, tmp_path / "taken")
    assert (tmp_path / "taken" / "file").read_text() == "mine"
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    code, _, err = run_main("select", tmp_path / "full", "--data", "none", "--copy-to", tmp_path / "ring")
    assert code == 2
    assert "--copy-to" in err
    assert "ring" in err


def test_the_run_itself_is_copied_into_a_folder_of_its_own(run, tmp_path):
    folder = run("full")
    (folder / "chosen").mkdir()
    (folder / "fullrank-watch").mkdir()
    for path in (folder / "checkpoint-20").iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    copy_model(folder, folder / "chosen" / "model")
    names = {path.name for path in (folder / "chosen" / "model").iterdir()}
    assert "model.safetensors" in names
    assert not names & {"chosen", "fullrank-watch", *OF_TRAINING}


# ------------------------------------------------------------------ a full disk


def test_a_disk_that_is_full_is_an_error_line_for_the_mean_and_one_error_for_the_copy(
    run, golden, tiny_base_path, tmp_path, full_disk, caplog
):
    folder = run("full")
    for file in folder.glob("checkpoint-*/model.safetensors"):  # half as large as their mean
        save_file({name: value.half() for name, value in load_file(file).items()}, file, {"format": "pt"})
    size = max(file.stat().st_size for file in folder.glob("checkpoint-*/model.safetensors"))
    full_disk(int(1.2 * size))
    found = select_checkpoint(folder, golden, base=str(tiny_base_path), soup=True)
    assert found.winner is not None
    assert re.search(r"the mean of checkpoint-.* cannot be made: weights cannot be read or written", caplog.text)
    assert not (folder / "selection.results" / "soup").exists()
    base = replace(found, winner=found.base, result=found.base_result, improved=False)
    with pytest.raises(OSError, match=r"File too large|weights cannot be read or written"):
        hand_over(base, tmp_path / "chosen")
    assert not (tmp_path / "chosen").exists()


def test_a_store_says_so_as_of_any_file(tmp_path, full_disk):
    import torch

    from fullrank import BestStore

    store = BestStore(tmp_path / "best", resume=True)
    full_disk(1 << 12)
    with pytest.raises(OSError, match=r"weights cannot be read or written"):
        store.offer(4, 0.5, lambda folder: save_file({"w": torch.zeros(1 << 12)}, folder / "model.safetensors"))
    assert store.best is None


# ------------------------------------------------------------------ the card


def test_the_card_measures_the_split_that_chose(run, golden, make_golden, tmp_path, run_main):
    data, other = tmp_path / "data", make_golden(5, name="test")
    both = GoldenSet(
        golden.queries | other.queries, golden.corpus | other.corpus, golden.qrels | other.qrels, name="data"
    )
    write_beir(both, data)
    for name, part in (("dev", golden), ("test", other)):
        rows = [f"{q}\t{d}\t{grade}" for q, grades in part.qrels.items() for d, grade in grades.items()]
        (data / "qrels" / f"{name}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
    assert (load_golden(data).split, load_golden(data, "dev").split, golden.split) == ("test", "dev", None)
    target = tmp_path / "chosen"
    options = ["--data", data, "--split", "dev", "--confirm", "test", "--copy-to", target]
    assert run_main("select", run("full"), *options, "--json")[0] == 0
    card = (target / "README.md").read_text()
    assert "The confirmed score is the honest one: its queries took no part in the choice." in card
    command = re.search(r"^fullrank eval \. --data GOLDEN_SET_FOLDER (.*)$", card, re.M)[1].split()
    assert command[:2] == ["--split", "dev"]
    out = tmp_path / "again.json"
    code, _, err = run_main("eval", target, "--data", data, "--out", out, "--no-latency", *command)
    assert code == 0, err
    shown = re.search(r"\| this model \| `data-dev` \| ([\d.]+) \|", card)[1]
    assert f"{Result.load(out)['recall@1']:.4f}" == shown
