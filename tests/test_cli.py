"""The command line as a user meets it: real processes in an empty folder, what they print, write and answer."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullrank import Result, evaluate, load_golden
from fullrank.cli import app

FULLRANK = Path(sys.executable).with_name("fullrank")
COLOUR = re.compile(r"\x1b\[|\x9b")
METRICS = ("recall@1", "recall@5", "recall@10", "ndcg@10", "mrr@10")


def command(*arguments, cwd, **environment):
    """Runs the real command in a pipe, offline."""
    return subprocess.run(
        [str(FULLRANK), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write_beir(folder, golden, *, split="test", qrels=None, queries=None, corpus=None):
    """Writes a golden set as a BEIR folder; the parts can be replaced by rows of one's own."""
    (folder / "qrels").mkdir(parents=True)
    corpus = golden.corpus if corpus is None else corpus
    queries = golden.queries if queries is None else queries
    qrels = golden.qrels if qrels is None else qrels
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": key, "title": "", "text": text}) + "\n" for key, text in corpus.items())
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in queries.items())
    )
    rows = [f"{q}\t{d}\t{int(g)}\n" for q, grades in qrels.items() for d, g in grades.items()]
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return folder


@pytest.fixture
def data(tmp_path, tiny_golden):
    return write_beir(tmp_path / "tiny-set", tiny_golden)


def numbers_of_table(text):
    """Returns ``{metric: (value, low, high)}`` from the printed rows."""
    row = re.compile(r"([a-z_]+@\d+)\s*[│|]\s*(\d\.\d{4})\s*[│|]\s*(\d\.\d{4}) to (\d\.\d{4})")
    return {m[1]: tuple(float(x) for x in m.groups()[1:]) for m in row.finditer(text)}


def checked_error(code, out, err, *texts):
    """One clear error: exit code 2, one message on stderr and nothing else, no traceback, nothing on stdout."""
    assert "Traceback" not in err, err
    assert code == 2, err
    assert out == ""
    lines = err.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, err
    assert lines[0].startswith("error: "), err
    assert not COLOUR.search(err)
    for text in texts:
        assert text in err, f"{text!r} is not in {err!r}"


# ------------------------------------------------------------------------------------------------ help


def test_help_of_every_command_shows_an_example():
    runner = CliRunner()
    names = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert {"demo", "eval"} <= set(names)
    for name in names:
        found = runner.invoke(app, [name, "--help"])
        assert found.exit_code == 0
        example = re.search(rf"Example: +fullrank {name} +\S", found.output)
        assert example, found.output
        assert not COLOUR.search(found.output)


def test_the_script_prints_its_help(tmp_path):
    found = command("--help", cwd=tmp_path)
    assert found.returncode == 0
    assert found.stderr == ""
    assert {"demo", "eval"} <= set(re.findall(r"^ {2}(\w+) ", found.stdout, re.MULTILINE))
    found = command("eval", "--help", cwd=tmp_path)
    assert found.returncode == 0
    for option in ("--data", "--split", "--metrics", "--out", "--json", "Example: fullrank eval"):
        assert option in found.stdout
    assert not COLOUR.search(found.stdout)
    assert list(tmp_path.iterdir()) == []


def test_the_module_is_the_same_command(tmp_path):
    """``python -m fullrank``: for those whose PATH does not hold the script."""
    found = subprocess.run(
        [sys.executable, "-m", "fullrank", "--help"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "eval" in found.stdout


@pytest.mark.parametrize("arguments", [("evaluate",), ("eval",), ("eval", "model"), ("eval", "model", "--dato", "x")])
def test_wrong_usage_is_exit_code_2(run_main, here, arguments):
    code, _, err = run_main(*arguments)
    assert code == 2
    assert "Usage: " in err
    assert "Traceback" not in err
    assert list(here.iterdir()) == []


# ------------------------------------------------------------------------------------------------ eval


def test_eval_prints_a_table_with_intervals_and_writes_a_result(here, model_folder, data):
    # In a pipe there are no colours and no bars, and no number wraps, whatever the terminal is.
    terminal = {"COLUMNS": "20", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    found = command("eval", model_folder, "--data", data, cwd=here, **terminal)
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    assert not COLOUR.search(found.stdout)
    assert "\r" not in found.stdout
    written = list(here.iterdir())
    assert len(written) == 1
    result = Result.load(written[0])
    table = numbers_of_table(found.stdout)
    assert tuple(table) == METRICS == tuple(result.metrics)
    for name, (value, low, high) in table.items():
        assert value == pytest.approx(result.metrics[name], abs=5.1e-5)
        assert (low, high) == tuple(pytest.approx(bound, abs=5.1e-5) for bound in result.ci(name))
    assert "95% interval" in found.stdout
    assert "15 queries, 40 documents" in found.stdout
    assert str(written[0].name) in found.stdout
    assert "documents/s" in found.stdout


def test_the_written_result_is_that_of_the_library(here, model_folder, data, run_main):
    from sentence_transformers import SentenceTransformer

    path = here / "deep" / "er" / "result.json"
    code, out, err = run_main("eval", model_folder, "--data", data, "--out", path, "--metrics", "mrr@10, hit@3")
    assert code == 0, err
    stored = Result.load(path)
    expected = evaluate(
        SentenceTransformer(str(model_folder), device="cpu"), load_golden(data), metrics=["mrr@10", "hit@3"]
    )
    assert stored.metrics == expected.metrics
    assert 0 < stored.metrics["mrr@10"] < 1, "the data must be able to tell"
    assert {name: v.tolist() for name, v in stored.per_query.items()} == {
        name: v.tolist() for name, v in expected.per_query.items()
    }
    assert stored.provenance["data"] == expected.provenance["data"]
    assert tuple(numbers_of_table(out)) == ("mrr@10", "hit@3")
    assert [path.name for path in here.iterdir()] == ["deep"]


def test_json_is_one_object_and_nothing_else(here, model_folder, data):
    found = command("eval", model_folder, "--data", data, "--json", cwd=here)
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    body = json.loads(found.stdout)
    assert found.stdout.count("\n") == 1
    result = Result.load(body["result"])
    assert body["metrics"] == result.metrics
    assert body["counts"]["n_scored"] == 15
    assert body["counts"]["n_documents"] == 40


def test_the_same_command_twice_writes_the_same_numbers(here, model_folder, data, run_main):
    bodies = []
    for name in ("a.json", "b.json"):
        code, out, _ = run_main("eval", model_folder, "--data", data, "--out", name, "--json")
        assert code == 0
        bodies.append(json.loads(out)["metrics"])
    assert bodies[0] == bodies[1]
    first, second = Result.load("a.json"), Result.load("b.json")
    assert first.hits == second.hits


def test_the_default_file_is_named_after_model_data_and_split(here, model_folder, tmp_path, tiny_golden, run_main):
    """As the help of ``--out`` has it."""
    folder = write_beir(tmp_path / "other-set", tiny_golden, split="dev")
    code, out, _ = run_main("eval", model_folder, "--data", folder, "--split", "dev", "--json")
    assert code == 0
    assert json.loads(out)["result"] == "tiny-model-other-set-dev.json"
    assert [path.name for path in here.iterdir()] == ["tiny-model-other-set-dev.json"]
    assert Result.load(here / "tiny-model-other-set-dev.json").provenance["name"] == "other-set-dev"


@pytest.mark.parametrize("where", [".", "../tiny-model", "{model}/"])
def test_a_model_in_the_working_folder_has_a_name_too(model_folder, data, run_main, monkeypatch, tmp_path, where):
    inside = tmp_path / "copy" / "tiny-model"
    shutil.copytree(model_folder, inside)
    monkeypatch.chdir(inside)
    code, out, err = run_main("eval", where.format(model=model_folder), "--data", data, "--json")
    assert code == 0, err
    assert Path(json.loads(out)["result"]).name.startswith("tiny-model-tiny-set")


def test_findings_are_shown(model_folder, data, run_main):
    code, out, _ = run_main("eval", model_folder, "--data", data)
    assert code == 0
    assert "warning: cut-offs of 5 % of the 40 documents or more say little ('@5', '@10')" in out


def test_eval_leaves_model_and_data_as_they_are(here, model_folder, data, run_main):
    def state(folder):
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    before = state(model_folder), state(data)
    code, _, _ = run_main("eval", model_folder, "--data", data)
    assert code == 0
    assert (state(model_folder), state(data)) == before


def test_other_sources_and_precision(here, model_folder, data, run_main):
    golden = data / "golden.jsonl"
    golden.write_text(
        json.dumps({"id": "q", "query": "bal can", "relevant": ["d0"], "type": "short"})
        + "\n"
        + json.dumps({"id": "none", "query": "dis", "relevant": []})
        + "\n"
    )
    code, out, err = run_main("eval", model_folder, "--data", golden, "--precision", "bf16", "--json")
    assert code == 0, err
    body = json.loads(out)
    assert body["counts"]["n_scored"] == 1
    assert body["counts"]["n_unanswerable"] == 1
    assert Result.load(body["result"]).provenance["precision"] == "bf16"


# ------------------------------------------------------------------------------------------------ bad input


def test_an_empty_corpus(here, model_folder, tmp_path, tiny_golden, run_main):
    folder = write_beir(tmp_path / "bad", tiny_golden, corpus={})
    checked_error(*run_main("eval", model_folder, "--data", folder), "corpus")
    assert list(here.iterdir()) == []


def test_no_answerable_query(here, model_folder, tmp_path, tiny_golden, run_main):
    folder = write_beir(tmp_path / "bad", tiny_golden, qrels={q: {"d0": 0} for q in tiny_golden.queries})
    checked_error(*run_main("eval", model_folder, "--data", folder), "answerable", "'bad'")
    assert list(here.iterdir()) == []


def test_qrels_that_name_unknown_documents(here, model_folder, tmp_path, tiny_golden, run_main):
    qrels = {**{q: dict(g) for q, g in tiny_golden.qrels.items()}, "q0": {"zz": 1}, "q1": {"yy": 1, "d0": 1}}
    folder = write_beir(tmp_path / "bad", tiny_golden, qrels=qrels)
    checked_error(*run_main("eval", model_folder, "--data", folder), "'zz'", "'yy'", "missing=")
    assert list(here.iterdir()) == []


def test_qrels_that_name_unknown_queries(here, model_folder, tmp_path, tiny_golden, run_main):
    folder = write_beir(tmp_path / "bad", tiny_golden, qrels={**tiny_golden.qrels, "lost": {"d0": 1}})
    checked_error(*run_main("eval", model_folder, "--data", folder), "'lost'")
    assert list(here.iterdir()) == []


def nan_model(model_folder, target):
    """Returns a copy of the model with NaN weights, as a diverged run leaves it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_folder, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("output.dense.weight"))
    tensors[name] = tensors[name] * float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def test_nan_embeddings(here, model_folder, tmp_path, data, run_main):
    model = nan_model(model_folder, tmp_path / "nan-model")
    checked_error(*run_main("eval", model, "--data", data), "NaN")
    assert list(here.iterdir()) == []


def test_nan_embeddings_leave_an_earlier_result_alone(here, model_folder, tmp_path, data, run_main):
    (here / "kept.json").write_text("earlier")
    model = nan_model(model_folder, tmp_path / "nan-model")
    checked_error(*run_main("eval", model, "--data", data, "--out", "kept.json"), "NaN")
    assert [path.name for path in here.iterdir()] == ["kept.json"]
    assert (here / "kept.json").read_text() == "earlier"


@pytest.mark.parametrize(
    ("metrics", "texts"),
    [
        ("ndcg@10,recal@1", ["'recal@1'", "recall@1"]),
        ("recall_at_1", ["'recall_at_1'", "recall@1"]),
        ("ndgc@10", ["'ndgc@10'", "ndcg@10"]),
        ("recall", ["'recall'", "cut-off"]),
        ("recall@0", ["cut-off", "0"]),
        ("recall@ten", ["cut-off", "'ten'"]),
        (" , ", ["metrics"]),
    ],
)
def test_unknown_metrics(here, run_main, data, metrics, texts):
    # The model does not exist: what costs nothing to check is checked first.
    checked_error(*run_main("eval", here / "none", "--data", data, "--metrics", metrics), *texts)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "model", ["/none/such", "./none", "none/such/model", "none-such-model", "none/such", "~/none-such"]
)
def test_a_model_that_does_not_exist(here, run_main, data, model):
    checked_error(*run_main("eval", model, "--data", data), f"'{model}'")
    assert list(here.iterdir()) == []


def test_a_folder_that_is_no_model(here, run_main, data, tmp_path):
    checked_error(*run_main("eval", data, "--data", data), str(data))
    (tmp_path / "file").write_text("no model")
    checked_error(*run_main("eval", tmp_path / "file", "--data", data), str(tmp_path / "file"))
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "body"),
    [
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0half"),
        ("model.safetensors", b""),
        ("config.json", b"{"),
        ("modules.json", b"{"),
        ("tokenizer.json", b"{"),
    ],
)
def test_a_model_folder_with_a_broken_file(here, run_main, model_folder, data, tmp_path, file, body):
    model = tmp_path / "half-model"
    shutil.copytree(model_folder, model)
    assert (model / file).is_file()
    (model / file).write_bytes(body)
    checked_error(*run_main("eval", model, "--data", data), str(model))
    assert list(here.iterdir()) == []


def test_data_without_queries(here, run_main, model_folder, data):
    (data / "queries.jsonl").unlink()
    checked_error(*run_main("eval", model_folder, "--data", data), "queries.jsonl", str(data), "'corpus.jsonl'")
    assert list(here.iterdir()) == []


def test_data_that_does_not_exist(here, run_main, model_folder):
    checked_error(*run_main("eval", model_folder, "--data", here / "none"), str(here / "none"), "does not exist")
    assert list(here.iterdir()) == []


def test_a_split_that_does_not_exist(here, run_main, model_folder, data):
    checked_error(*run_main("eval", model_folder, "--data", data, "--split", "dev"), "'dev'", "'test'")
    assert list(here.iterdir()) == []


def test_rows_that_are_no_json(here, run_main, model_folder, data):
    with (data / "queries.jsonl").open("a") as file:
        file.write("{broken\n")
    checked_error(*run_main("eval", model_folder, "--data", data), "queries.jsonl", "line 16")
    assert list(here.iterdir()) == []


def test_an_unknown_precision(here, run_main, model_folder, data):
    checked_error(*run_main("eval", model_folder, "--data", data, "--precision", "fp8"), "'fp8'", "bf16")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("out", ["folder", "file/result.json"])
def test_a_place_where_no_result_can_be_written(here, run_main, model_folder, data, out):
    (here / "folder").mkdir()
    (here / "file").write_text("mine")
    checked_error(*run_main("eval", model_folder, "--data", data, "--out", out), out.split("/")[0])
    assert sorted(path.name for path in here.iterdir()) == ["file", "folder"]
    assert (here / "file").read_text() == "mine"
    assert list((here / "folder").iterdir()) == []


@pytest.mark.parametrize("kind", ["nan", "no model", "no queries", "metric"])
def test_bad_input_as_a_real_process(here, model_folder, tmp_path, data, kind):
    """As the script does it: with the messages of the libraries below, in a pipe."""
    model, options = model_folder, []
    if kind == "nan":
        model = nan_model(model_folder, tmp_path / "nan-model")
    elif kind == "no model":
        model = "none-such-model"
    elif kind == "no queries":
        (data / "queries.jsonl").unlink()
    else:
        options = ["--metrics", "recal@1"]
    found = command("eval", model, "--data", data, *options, cwd=here)
    checked_error(found.returncode, found.stdout, found.stderr)
    assert list(here.iterdir()) == []


def test_with_json_an_error_goes_to_stderr_too(here, run_main, data):
    checked_error(*run_main("eval", "./none", "--data", data, "--json"), "does not exist")


def test_demo_with_a_model_that_does_not_exist(here, run_main):
    checked_error(*run_main("demo", "--out", "run", "--model", "./none"), "'./none' does not exist")
    assert list(here.iterdir()) == []
