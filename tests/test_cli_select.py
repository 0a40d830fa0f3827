"""`fullrank select` as a user meets it: what it prints, writes, deletes and answers."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fullrank import evaluate, load_golden

pytest.importorskip("peft")


@pytest.fixture
def data(tmp_path, make_golden):
    """A BEIR folder with the splits dev and test, and another with general texts."""
    for folder, sets in (("data", ((3, "dev"), (5, "test"))), ("general", ((11, "test"),))):
        root = tmp_path / folder
        (root / "qrels").mkdir(parents=True)
        corpus, queries = "", ""
        for seed, name in sets:
            golden = make_golden(seed, name=name)
            corpus += "".join(json.dumps({"_id": i, "text": t}) + "\n" for i, t in golden.corpus.items())
            queries += "".join(json.dumps({"_id": i, "text": t}) + "\n" for i, t in golden.queries.items())
            rows = "".join(f"{q}\t{d}\t{g}\n" for q, docs in golden.qrels.items() for d, g in docs.items())
            (root / "qrels" / f"{name}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
        (root / "corpus.jsonl").write_text(corpus)
        (root / "queries.jsonl").write_text(queries)
    return tmp_path / "data"


@pytest.fixture
def folder(tiny_runs, tmp_path):
    return Path(shutil.copytree(tiny_runs["full"], tmp_path / "run"))


def test_the_leaderboard_the_choice_and_a_model_that_loads(run_main, folder, data, tiny_base_path, tmp_path):
    from sentence_transformers import SentenceTransformer

    options = ["--data", data, "--split", "dev", "--base", tiny_base_path, "--copy-to", tmp_path / "chosen", "--tied"]
    code, out, err = run_main("select", folder, *options, "--confirm", "test", "--guard", f"{data}:ndcg@10:0.99")
    assert code == 0, err
    for word in ("step", "recall@1", "95 % interval", "points", "docs/s", "seen", "* chosen"):
        assert word in out
    assert "Chosen: step " in out
    assert "Confirmed on 40 queries that took no part in the choice" in out
    assert f"Journal: {folder / 'selection.json'}" in out
    assert f"Model in {tmp_path / 'chosen'}" in out
    assert max(map(len, out.partition("\nChosen")[0].splitlines())) <= 80
    stored = json.loads((folder / "selection.json").read_text())["selection"]
    model = SentenceTransformer(str(tmp_path / "chosen"), device="cpu")
    score = evaluate(model, load_golden(str(data), "dev"), metrics=["recall@1"])["recall@1"]
    assert score == stored["winner"]["score"]
    assert "Chosen by full-corpus retrieval" in (tmp_path / "chosen" / "README.md").read_text()


def test_json_and_exit_1_where_nothing_beats_the_base(run_main, folder, data, tiny_base_path):
    best = folder / "checkpoint-20"
    for step in (4, 8, 12, 16):
        shutil.rmtree(folder / f"checkpoint-{step}")
    shutil.rmtree(best)
    shutil.copytree(tiny_base_path, best)
    code, out, _ = run_main("select", folder, "--data", data, "--split", "dev", "--base", tiny_base_path, "--json")
    body = json.loads(out)
    assert code == 1
    assert body["winner"]["name"] == "base"
    assert body["improved"] is False
    assert body["share"] <= 1


def test_keeping_is_a_dry_run_until_delete_is_said(run_main, folder, data, tiny_base_path):
    options = ["--data", data, "--split", "dev", "--base", tiny_base_path, "--keep-best", 2, "--keep-last", 1]
    before = {path.name for path in folder.glob("checkpoint-*")}
    _, out, _ = run_main("select", folder, *options)
    assert "Nothing was deleted; add --delete to do it." in out
    assert {path.name for path in folder.glob("checkpoint-*")} == before
    would = {line.split()[-1] for line in out.splitlines() if line.startswith("would be deleted: ")}
    assert would
    code, out, _ = run_main("select", folder, *options, "--delete")
    assert {line.split()[-1] for line in out.splitlines() if line.startswith("deleted: ")} == would
    assert {path.name for path in folder.glob("checkpoint-*")} == before - would
    winner = json.loads((folder / "selection.json").read_text())["selection"]["winner"]["name"]
    assert (folder / winner).is_dir() or winner == "base"
    assert "checkpoint-20" not in would  # the newest
    assert code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metric", "recal@1"], "recall"),
        (["--metric", "recall@1=x"], "--metric 'recall@1=x': several metrics need weights"),
        (["--rule", "best"], "rule='best' is unknown; choose one of max, one-se"),
        (["--guard", "beir"], "--guard 'beir' must be DATA:METRIC:MAX_DROP"),
        (["--guard", "beir:ndcg@10:much"], "'much' is no number; 0.02 is two points"),
        (["--keep-last", "-1"], "keep_last=-1 must be at least 1: the best and the newest are never deleted"),
        (["--keep-best", "0"], "keep_best=0 must be at least 1"),
        (["--metric", "recall@1=0.7", "--metric", "recall@1=0.3"], "--metric names one metric twice: recall@1=0.7"),
        (["--base", "/nowhere/x"], "the base model folder '/nowhere/x' (--base, base=...) does not exist"),
        (["--delete"], "--delete needs --keep-best or --keep-last, which say what stays"),
        (["--copy-to", "../run"], "--copy-to ../run: exists already; name a new or empty folder"),
        (["--confirm", "dev"], "40 queries of the confirming set are among those of 'data-dev' that choose"),
        (["--precision", "int8"], "precision='int8' is unknown"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(run_main, folder, data, options, message):
    code, out, err = run_main("select", folder, "--data", data, "--split", "dev", *options)
    assert code == 2
    assert message in err
    assert out == ""


def test_options_are_refused_before_any_work(run_main, folder, data):
    code, _, err = run_main("select", folder, "--data", "/no/data", "--keep-last", "-1")
    assert code == 2
    assert "keep_last=-1" in err
    code, _, err = run_main("select", folder, "--data", data, "--split", "dev", "--guard", f"{data}:ndcg@10:0.02")
    assert code == 2
    assert "guards compare with the base model, and none is known" in err
    assert not (folder / "selection.json").exists()


def test_where_nothing_could_be_evaluated_the_common_cause_is_named_once_and_the_code_is_2(run_main, folder, data):
    for path in folder.glob("checkpoint-*/model.safetensors"):
        path.write_bytes(b"half")
    code, out, err = run_main("select", folder, "--data", data, "--split", "dev", "--json")
    assert (code, out) == (2, "")
    assert "no candidate could be evaluated. checkpoint-4, checkpoint-8, checkpoint-12" in err
    assert err.count("half-written") == 1


def test_the_base_is_compared_with_interval_and_p_by_default(run_main, folder, data, tiny_base_path):
    _, out, _ = run_main("select", folder, "--data", data, "--split", "dev", "--base", tiny_base_path)
    assert re.search(r"recall@1 \+\d+\.\d\d points \[.*\], p = \d\.\d{4} over 40 queries", out)


def test_the_table_is_there_although_the_copy_fails(run_main, folder, data, tmp_path, monkeypatch):
    from fullrank import handing

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(handing, "copy_model", fails)
    options = ["--data", data, "--split", "dev", "--keep-best", 1, "--delete", "--copy-to", tmp_path / "chosen"]
    before = sorted(folder.glob("checkpoint-*"))
    code, out, err = run_main("select", folder, *options)
    assert code == 2
    assert "* chosen" in out
    assert "no space left" in err
    assert "\ndeleted: " not in out
    assert sorted(folder.glob("checkpoint-*")) == before


def test_json_names_what_was_deleted(run_main, folder, data, not_ours):
    options = ["--data", data, "--split", "dev", "--keep-best", 1, "--delete", "--json"]
    code, out, err = run_main("select", folder, *options)
    body = json.loads(out)
    assert code == 2
    assert "error: checkpoint-4 could not be deleted, see above" in err
    assert "checkpoint-4" in body["may_go"]
    assert set(body["deleted"]) == set(body["may_go"]) - {"checkpoint-4"}
    assert {path.name for path in folder.glob("checkpoint-*")} & set(body["deleted"]) == set()


def test_no_journal_is_named_that_could_not_be_written(run_main, folder, data, monkeypatch):
    from fullrank import selection

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(selection, "write_atomically", full)
    code, out, _ = run_main("select", folder, "--data", data, "--split", "dev")
    assert code == 0
    assert "Chosen: step" in out
    assert "Journal:" not in out


def test_each_command_says_what_it_looks_for(run_main):
    for command, there in (("select", True), ("watch", False)):
        _, out, _ = run_main(command, "--help")
        text = " ".join(out.split())
        assert ("fullrank/best" in text) is there
    assert "where checkpoint-N" in text


def test_folders_that_hold_nothing(run_main, data, tmp_path):
    code, _, err = run_main("select", tmp_path / "none", "--data", data, "--split", "dev")
    assert code == 2
    assert "does not exist" in err
    (tmp_path / "empty").mkdir()
    code, _, err = run_main("select", tmp_path / "empty", "--data", data, "--split", "dev")
    assert code == 2
    assert "holds no checkpoints" in err


def test_weights_of_several_metrics_choose(run_main, folder, data):
    weights = ["--metric", "recall@1=0.7", "--metric", "ndcg@10=0.3"]
    code, out, _ = run_main("select", folder, "--data", data, "--split", "dev", *weights, "--json")
    body = json.loads(out)
    winner = body["winner"]
    assert code == 0
    assert winner["score"] == pytest.approx(0.7 * winner["metrics"]["recall@1"] + 0.3 * winner["metrics"]["ndcg@10"])
    assert body["base"] is None


def test_the_real_command_has_help_with_an_example():
    run = subprocess.run(
        [str(Path(sys.executable).with_name("fullrank")), "select", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert "Example: fullrank select runs/demo --data beir/scifact --split dev" in " ".join(run.stdout.split())
