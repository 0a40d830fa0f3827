"""What the README says holds: the tests that it names exist, and its loop without a trainer runs as it stands."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from fullrank import BestStore, evaluate
from training import equal_weights

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXT)
    assert len(named) >= 20
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_the_table_has_a_test_in_each_row():
    table = TEXT.split("## What goes wrong elsewhere")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    assert all(re.search(r"\| `tests/\w+\.py::\w+` \|$", row) for row in rows)


def test_the_loop_without_a_trainer_keeps_and_restores_the_best(tiny_st, tiny_golden, pairs, tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(from fullrank import BestStore, evaluate\n.*?)```", TEXT, re.S)
    monkeypatch.chdir(tmp_path)
    model = tiny_st()
    seen = {}

    def loss_of(model, batch):
        seen[len(seen)] = {name: value.detach().clone() for name, value in model.state_dict().items()}
        rows = model(model.preprocess(batch))["sentence_embedding"]
        return rows.square().mean()

    names = {
        "model": model,
        "golden": tiny_golden,
        "batches": [pairs["positive"][i : i + 4] for i in range(0, 24, 4)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "loss_of": loss_of,
    }
    exec(block.replace("% 100", "% 2"), names)
    store = BestStore(tmp_path / "out" / "best")
    assert store.best.step in (0, 2, 4)
    assert equal_weights(model, seen[store.best.step])
    assert evaluate(model, tiny_golden)["recall@1"] == pytest.approx(store.best.score, abs=0)


def test_measured_numbers_are_those_of_the_results():
    section = TEXT.split("## What it costs")[1].split("\n## ")[0]
    found = {
        name: json.loads((ROOT / "results" / f"bench_{name}.json").read_text())
        for name in ("search", "evaluate", "growth")
    }
    numbers = [
        *(f"{v:.2f} x" for name, v in found["search"]["times_bare_product"].items() if name != "bare_product"),
        *(
            f"{v:.2f} x"
            for k, v in found["evaluate"]["times_faster_than_evaluator"].items()
            if k.startswith("fullrank")
        ),
        ", ".join(f"{row['seconds']:.2f}" for row in found["growth"]["documents"].values()) + " s",
        ", ".join(f"{row['peak_mib']:.0f}" for row in found["growth"]["documents"].values()) + " MiB",
    ]
    assert [number for number in numbers if number not in section] == []
