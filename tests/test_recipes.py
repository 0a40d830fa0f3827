"""The recipes as a user starts them: the commands of their docstrings, in real processes, on tiny settings."""

import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fullrank import Result, load_golden, read_training_data
from fullrank._errors import SettingError

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
FILES = sorted(RECIPES.glob("*.py"))
TESTED = {
    "mine_hard_negatives": "python recipes/mine_hard_negatives.py --tiny",
    "lora_sentence_transformers": "python recipes/lora_sentence_transformers.py --tiny",
    "lora_decoder_hf_trainer": "python recipes/lora_decoder_hf_trainer.py --tiny",
    "accelerate_loop": "torchrun --nproc_per_node 2 recipes/accelerate_loop.py --tiny",
    "own_documents": "python recipes/own_documents.py --tiny",
}


GENERAL = [
    {"_id": str(i), "title": f"what is {word}", "text": f"{word} is {what}"}
    for i, (word, what) in enumerate(
        [("a cat", "an animal"), ("Paris", "a city"), ("gold", "a metal"), ("tea", "a drink"), ("rain", "water")]
    )
]


def run(name, *options, cwd):
    """Runs the command of a recipe in ``cwd``; returns what it printed and the record that it wrote."""
    if not (cwd / "recipes").exists():
        (cwd / "recipes").symlink_to(RECIPES)
    program, *arguments = shlex.split(TESTED[name])
    found = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments, *map(str, options), "--json", f"{name}.json"],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout, json.loads((cwd / f"{name}.json").read_text())


def checked_record(record):
    """A record is what its own numbers say."""
    metric = record["metric"]
    assert record["delta"] == pytest.approx(record["best"][metric] - record["base"][metric], abs=1e-9)
    assert record["interval"][0] <= record["delta"] <= record["interval"][1]
    assert record["best"][metric] >= record["base"][metric]
    assert record["seconds"] > 0
    assert record["peak_memory_mib"]["host"] > 100


# ------------------------------------------------------------------------------------------------ what they promise


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_one_readable_file_that_starts_with_its_command(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    commands = re.findall(r"^ {4}((?:python|torchrun) .*)$", docstring, re.MULTILINE)
    assert len(text.splitlines()) <= 200
    assert TESTED[path.stem] in commands
    assert commands[0] == f"python recipes/{path.name} --tiny"
    assert all(f"recipes/{path.name} " in command for command in commands)
    if path.stem != "own_documents":  # which trains nothing
        assert "To begin with on one 24 GB GPU (not measured here)" in docstring


def test_every_recipe_is_tested():
    assert sorted(TESTED) == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_options_in_a_docstring_are_options_of_the_recipe(path):
    tree = ast.parse(path.read_text())
    knobs = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Knobs")
    known = {node.target.id for node in knobs.body if isinstance(node, ast.AnnAssign)}
    docstring = ast.get_docstring(tree)
    others = {"nproc_per_node", "num_processes"}
    if path.stem in ("mine_hard_negatives", "own_documents"):  # they name the next recipe's
        others |= {"train", "negatives", "data"}
    assert set(re.findall(r"--(\w+)", docstring)) <= known | others


@pytest.mark.parametrize("name", ["lora_sentence_transformers", "lora_decoder_hf_trainer", "accelerate_loop"])
def test_a_golden_set_without_training_data_does_not_train_on_the_built_in_task(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipe  # dataclasses look their module up
    spec.loader.exec_module(recipe)
    with pytest.raises(SettingError, match="give --train as well"):
        recipe.task(recipe.Knobs(data="beir/mine"))
    with pytest.raises(SettingError, match="give --data as well"):
        recipe.task(recipe.Knobs(train="pairs.jsonl"))


def few(folder):
    """Writes 3 training pairs and a golden set of them."""
    pairs = [{"query": f"what is {row['title']}", "positive": row["text"]} for row in GENERAL[:3]]
    (folder / "few.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GENERAL))
    rows = [{"id": row["_id"], "query": row["title"], "relevant": [row["_id"]]} for row in GENERAL]
    (folder / "golden.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "lora_sentence_transformers --data golden.jsonl --train few.jsonl",
            "3 training examples do not fill one batch",
        ),
        ("lora_decoder_hf_trainer --data golden.jsonl --train few.jsonl", "3 training examples do not fill one batch"),
        ("accelerate_loop --data golden.jsonl --train few.jsonl", "3 training examples do not fill one batch of"),
        ("lora_sentence_transformers --data golden.jsonl --train gone.jsonl", "gone.jsonl"),
        ("lora_sentence_transformers --tiny --resume", "runs/lora holds no checkpoint to --resume from"),
        ("lora_sentence_transformers --tiny --negatives 2", "has hard negatives, and 2 a row are asked for"),
        ("mine_hard_negatives --corpus corpus.jsonl", "--corpus goes with --train"),
        ("own_documents --documents docs --llm nomodule", "--llm nomodule: "),
        ("own_documents --documents plain", "plain has no headings to make queries of"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(command, says, tmp_path, monkeypatch, capsys):
    few(tmp_path)
    for folder, text in (("docs", "# A heading\none two three four five six"), ("plain", "one two three four five")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.md").write_text(text)
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err.splitlines()[-1].startswith("error: ") or len(err.splitlines()) > 1
    assert says in err
    assert "Traceback" not in err


def test_documents_of_real_questions_are_not_trained_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("semantic_text_splitter")
    (tmp_path / "docs").mkdir()
    names = [f"d{i}.md" for i in range(6)]
    for i, name in enumerate(names):
        (tmp_path / "docs" / name).write_text(f"# Heading number {i}\nOne two three four five {i}.")
    monkeypatch.chdir(tmp_path)

    def pairs(asked):
        rows = [{"query": f"what of {name}", "document": name} for name in asked]
        (tmp_path / "real.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(sys, "argv", ["own_documents", "--queries", "real.jsonl"])
        runpy.run_path(str(RECIPES / "own_documents.py"), run_name="__main__")
        lines = (tmp_path / "runs/documents/train.jsonl").read_text().splitlines()
        return {json.loads(line)["query"] for line in lines}

    trained = pairs(["d0.md"])
    free = next(query for query in sorted(trained))
    assert trained
    assert free not in pairs([f"d{free[-1]}.md"])
    assert pairs(names) == set()
    assert "Nothing to train on: 6 of 6 documents are held out" in capsys.readouterr().out


def test_a_metric_that_is_not_a_usual_one_can_choose_in_the_bare_loop(tmp_path):
    _, record = run("accelerate_loop", "--select", "ndcg@3", cwd=tmp_path)
    assert record["metric"] == "ndcg@3"


def test_make_recipes_runs_all_of_them():
    makefile = (RECIPES.parent / "Makefile").read_text()
    for path in FILES:
        assert f"recipes/{path.name} --tiny" in makefile


RUNS = sorted((RECIPES.parent / "results").glob("recipe_*.json"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_readme_says_what_the_runs_measured(path):
    readme, record = (RECIPES.parent / "README.md").read_text(), json.loads(path.read_text())
    wanted = [f"{record['seconds']:.0f} s", f"{record['peak_memory_mib']['host']:,} MiB"]
    if "mined" in record:
        wanted += [f"{record['mined']['negatives']:,} negatives for {record['mined']['examples']:,} pairs"]
    else:
        base, best = (record[side][record["metric"]] for side in ("base", "best"))
        wanted += [f"{base:.4f} → {best:.4f}", f"{100 * record['delta']:+.2f} ["]
        checked_record(record)
    assert not record["settings"]["tiny"]
    assert any(all(text in part for text in wanted) for part in re.split(r"\n(?=\||`)", readme)), wanted


# ------------------------------------------------------------------------------------------------ what they do


@pytest.fixture(scope="module")
def mined(tmp_path_factory):
    """A folder in which negatives have been mined: (folder, what was printed, record)."""
    folder = tmp_path_factory.mktemp("mined")
    return folder, *run("mine_hard_negatives", cwd=folder)


def test_mining_writes_what_the_others_train_on(mined):
    folder, printed, record = mined
    examples = read_training_data(folder / "hard.jsonl")
    counts = record["mined"]
    assert counts["examples"] == len(examples) > 100
    assert counts["negatives"] == sum(len(e.negatives) for e in examples) > counts["examples"]
    assert counts["candidates"] == counts["negatives"] + sum(counts["dropped"].values())
    assert "dropped: too-close" in printed
    assert printed.count("\nquery     ") == 3


def history_of(folder):
    return [json.loads(line) for line in (folder / "fullrank/history.jsonl").read_text().splitlines()]


def test_lora_with_mined_negatives_keeps_the_best_and_resumes(mined, tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GENERAL))
    (tmp_path / "general.jsonl").write_text(
        "".join(
            json.dumps({"id": f"q{row['_id']}", "query": row["title"], "relevant": [row["_id"]]}) + "\n"
            for row in GENERAL
        )
    )
    data = ["--train", mined[0] / "hard.jsonl", "--negatives", 1, "--mini_batch", 4, "--guard", "general.jsonl"]
    printed, record = run("lora_sentence_transformers", *data, cwd=tmp_path)
    checked_record(record)
    run_folder = tmp_path / "runs/lora"
    history = history_of(run_folder)
    assert [line["step"] for line in history] == [0, 3, 6]
    best = max(history, key=lambda line: (line["score"], -line["step"]))
    assert f"Adapter: runs/lora/fullrank/best/step-{best['step']}\n" in printed
    assert record["best"].items() <= best["metrics"].items()
    assert all("guard/general/ndcg@10" in line["metrics"] for line in history)
    assert (run_folder / f"fullrank/best/step-{best['step']}/adapter_model.safetensors").is_file()

    (run_folder / "checkpoint-6").rename(tmp_path / "lost")
    _, again = run("lora_sentence_transformers", *data, "--resume", cwd=tmp_path)
    assert not (run_folder / "fullrank.1").exists()  # it went on, and did not begin anew
    resumed = history_of(run_folder)
    assert resumed[:2] == history[:2]
    assert resumed[-1]["step"] == 6
    assert resumed[-1]["metrics"] == history[-1]["metrics"]
    assert again["best"] == record["best"]


def test_a_decoder_is_trained_saved_as_an_adapter_merged_and_scored_again(tmp_path):
    printed, record = run("lora_decoder_hf_trainer", "--padding", "right", "--checkpointing", cwd=tmp_path)
    checked_record(record)
    folder = Path(re.search(r"^Adapter: (.*)$", printed, re.MULTILINE)[1])
    assert folder.name != "step-0"  # it learned something, so that there is something to merge
    assert (tmp_path / folder / "adapter_model.safetensors").is_file()
    assert not (tmp_path / folder / "model.safetensors").exists()
    for metric, value in record["merged"].items():
        assert value == pytest.approx(record["best"][metric], abs=0.03)
    assert "points by merging" in printed
    assert (tmp_path / "runs/decoder/merged/model.safetensors").is_file()
    assert [line["step"] for line in history_of(tmp_path / "runs/decoder")] == [0, 20, 40, 60]


def test_two_processes_share_the_evaluation_of_a_bare_loop(tmp_path):
    printed, record = run("accelerate_loop", cwd=tmp_path)
    checked_record(record)
    assert record["processes"] == 2
    assert printed.count("step 0/4") == 1  # the main process alone speaks
    found = re.search(r"^Best: step (\d), (.*)$", printed, re.MULTILINE)
    kept = Result.load(tmp_path / found[2] / "result.json")
    assert kept.metrics == record["best"]


def test_documents_become_golden_sets_with_real_questions_apart(tmp_path):
    pytest.importorskip("semantic_text_splitter")
    (tmp_path / "none.jsonl").write_text(
        '{"id": "u1", "query": "who won the cup", "relevant": [], "type": "unanswerable"}\n'
        '{"id": "u2", "query": "", "relevant": [], "type": "unanswerable"}\n'
    )
    _, record = run("own_documents", "--unanswerable", tmp_path / "none.jsonl", cwd=tmp_path)
    folder = tmp_path / "runs/documents"
    synthetic, real = load_golden(folder / "synthetic.jsonl"), load_golden(folder / "real.jsonl")
    pairs = read_training_data(folder / "train.jsonl")
    assert set(synthetic.groups.values()) == {"heading", "unanswerable"}
    assert set(real.groups.values()) == {"real"}
    assert len(synthetic.queries) - synthetic.n_answerable == 1  # the empty row of the form is none
    assert record["pairs"] == len(pairs) > 50
    assert not {pair.query for pair in pairs} & set(synthetic.query_texts)
    tested = {doc_id.partition("#")[0] for grades in synthetic.qrels.values() for doc_id in grades}
    held_out = {text for doc_id, text in synthetic.corpus.items() if doc_id.partition("#")[0] in tested}
    assert tested
    assert not held_out & {pair.positive for pair in pairs}
    assert record["synthetic"]["groups"]["heading"]["n"] == synthetic.n_answerable
    assert record["real"]["counts"]["n_unanswerable"] == 1
    rows = (folder / "unanswerable.todo.jsonl").read_text().splitlines()
    assert 0.1 <= len(rows) / (len(rows) + synthetic.n_answerable) <= 0.2


def test_a_function_of_ones_own_makes_the_questions(tmp_path, monkeypatch):
    pytest.importorskip("semantic_text_splitter")
    (tmp_path / "asks.py").write_text(
        "def questions(text):\n    return [f'which part says {\" \".join(text.split()[:4])}?', '  ']\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run("own_documents", "--llm", "asks:questions", cwd=tmp_path)
    folder = tmp_path / "runs/documents"
    synthetic = load_golden(folder / "synthetic.jsonl")
    assert set(synthetic.groups.values()) == {"llm"}
    asked = [*synthetic.query_texts, *(pair.query for pair in read_training_data(folder / "train.jsonl"))]
    assert all(query.startswith("which part says ") for query in asked)
