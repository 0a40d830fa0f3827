"""`compare` and `gate` as a user meets them: real files, real processes in a pipe, golden outputs."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from fullrank import Result, evaluate_run
from fullrank.tables import flips_text

COLOUR = re.compile(r"\x1b|\x9b|\r")
N = 40


def command(*arguments, cwd):
    """Runs the real command in a pipe, on a terminal that would take colours."""
    return subprocess.run(
        [sys.executable, "-m", "fullrank", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "20", "TERM": "xterm-256color", "FORCE_COLOR": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def make_result(first, *, ties="expected", **fields):
    """Query i finds its answer on rank 1 where ``first[i]``, else on rank 2; with types and texts."""
    ids = [f"q{i:02d}" for i in range(len(first))]
    run = {q: {"good": 0.9 if top else 0.5, "bad": 0.7} for q, top in zip(ids, first, strict=True)}
    result = evaluate_run(run, {q: {"good": 1} for q in ids}, metrics=["recall@1", "mrr@10"], ties=ties)
    groups = {q: "how to" if i % 2 else "[bold]what" for i, q in enumerate(ids)}
    queries = {q: f"question number {i}" for i, q in enumerate(ids)}
    provenance = {"data": "abc", "ties": ties, "truncated_run": False}
    return Result(**{**vars(result), "groups": groups, "queries": queries, "provenance": provenance, **fields})


@pytest.fixture
def files(tmp_path):
    """base.json, tuned.json (6 more right, 2 less), fallen.json (12 less)."""
    base = np.arange(N) % 4 != 0
    tuned = base.copy()
    tuned[[0, 4, 8, 12, 16, 20]] = True
    tuned[[1, 3]] = False
    fallen = base & (np.arange(N) > 15)
    for name, first in (("base", base), ("tuned", tuned), ("fallen", fallen)):
        make_result(first).save(tmp_path / f"{name}.json")
    return tmp_path


def checked_error(found, *texts):
    """One clear error, exit code 2, nothing on stdout."""
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr
    for text in texts:
        assert text in found.stderr, found.stderr


COMPARED = """\
base.json -> tuned.json
metric  ┃ n┃  base┃ tuned┃points┃   95% interval┃     p┃won/lost┃      verdict
━━━━━━━━╇━━╇━━━━━━╇━━━━━━╇━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━
recall@1│40│0.7500│0.8500│+10.00│-5.00 to +25.00│0.2891│   6 / 2│not separable
mrr@10  │40│0.8750│0.9250│ +5.00│-2.50 to +12.50│0.2891│   6 / 2│not separable
recall@1 by query type
type      ┃ n┃  base┃ tuned┃points┃    95% interval┃p Holm┃won/lost┃      verdict
━━━━━━━━━━╇━━╇━━━━━━╇━━━━━━╇━━━━━━╇━━━━━━━━━━━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━
[bold]what│20│0.5000│0.8000│+30.00│+10.00 to +50.00│0.0625│   6 / 0│not separable
how to    │20│1.0000│0.9000│-10.00│ -25.00 to +0.00│0.5000│   0 / 2│not separable
mrr@10 by query type
type      ┃ n┃  base┃ tuned┃points┃   95% interval┃p Holm┃won/lost┃      verdict
━━━━━━━━━━╇━━╇━━━━━━╇━━━━━━╇━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━
[bold]what│20│0.7500│0.9000│+15.00│+5.00 to +25.00│0.0625│   6 / 0│not separable
how to    │20│1.0000│0.9500│ -5.00│-12.50 to +0.00│0.5000│   0 / 2│not separable
Won by recall@1: 6 queries, the largest changes
  q00 ([bold]what): question number 0
    0.0000 -> 1.0000
    expected: good
    before:   bad (0.700), good* (0.500)
    after:    good* (0.900), bad (0.700)
Lost by recall@1: 2 queries, the largest changes
  q01 (how to): question number 1
    1.0000 -> 0.0000
    expected: good
    before:   good* (0.900), bad (0.700)
    after:    bad (0.700), good* (0.500)
"""

GATE_FAILED = """\
FAILED  recall@1  0.7500 -> 0.4500: fell by 30.00 points (2.00 allowed); 95% interval [-45.00, -17.50] excludes no fall
FAILED  mrr@10    0.8750 -> 0.7250: fell by 15.00 points (2.00 allowed); 95% interval [-22.50, -8.75] excludes no fall
Gate FAILED: recall@1, mrr@10 (allowed fall 2.00 points, 40 queries)
"""


def test_compare_prints_tables_types_and_flips(files):
    found = command("compare", "base.json", "tuned.json", "--flips", "1", cwd=files)
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    assert not COLOUR.search(found.stdout)
    assert [line.rstrip() for line in found.stdout.splitlines()] == COMPARED.splitlines()


def test_compare_as_json_holds_what_the_tables_show(files):
    found = command("compare", "base.json", "tuned.json", "--metric", "mrr@10", "--json", cwd=files)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("\n") == 1
    body = json.loads(found.stdout)
    assert list(body["metrics"]) == ["mrr@10"]
    change = body["metrics"]["mrr@10"]
    assert change["delta"] == pytest.approx(0.05)
    assert (change["n"], change["n_wins"], change["n_losses"]) == (40, 6, 2)
    assert change["interval"][0] < 0.05 < change["interval"][1]
    assert set(body["groups"]["mrr@10"]) == {"how to", "[bold]what"}
    assert [flip["query_id"] for flip in body["flips"]["losses"]] == ["q01", "q03"]
    assert body["flips"]["losses"][0]["retrieved_after"] == [["bad", 0.7], ["good", 0.5]]


def test_compare_shows_texts_of_documents_where_the_data_is_given(files):
    folder = files / "set"
    (folder / "qrels").mkdir(parents=True)
    documents = {"good": "the right page", "bad": "another page"}
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": d, "text": t}) + "\n" for d, t in documents.items())
    )
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q00", "text": "x"}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq00\tgood\t1\n")
    found = command("compare", "base.json", "tuned.json", "--data", "set", cwd=files)
    assert found.returncode == 0, found.stderr
    assert "after:    good* (0.900) 'the right page', bad (0.700) 'another page'" in found.stdout


def test_compare_of_other_data_has_to_be_asked_for(files):
    make_result(np.ones(20), provenance={"data": "other"}).save(files / "other.json")
    checked_error(command("compare", "base.json", "other.json", cwd=files), "differ in data")
    found = command("compare", "base.json", "other.json", "--allow-other-data", "--json", cwd=files)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["metrics"]["recall@1"]["n"] == 20
    assert json.loads(found.stdout)["differs_in"] == ["data"]
    found = command("compare", "base.json", "other.json", "--allow-other-data", cwd=files)
    assert "warning: the two differ in data; only their common queries are compared" in found.stdout


def test_gate_fails_with_exit_code_1_and_says_why(files):
    found = command("gate", "fallen.json", "--baseline", "base.json", cwd=files)
    assert found.returncode == 1, found.stderr
    assert found.stderr == ""
    assert found.stdout == GATE_FAILED


def test_gate_passes_with_exit_code_0(files):
    found = command("gate", "tuned.json", "--baseline", "base.json", "--metric", "mrr@10", cwd=files)
    assert found.returncode == 0, found.stderr
    assert found.stdout == (
        "passed  mrr@10  0.8750 -> 0.9250: did not fall\nGate passed (allowed fall 2.00 points, 40 queries)\n"
    )
    found = command("gate", "fallen.json", "--baseline", "base.json", "--max-drop", "0.4", cwd=files)
    assert found.returncode == 0, found.stderr


def test_gate_as_json(files):
    options = ("--metric", "recall@1", "--metric", "mrr@10", "--json")
    found = command("gate", "fallen.json", "--baseline", "base.json", *options, cwd=files)
    assert found.returncode == 1, found.stderr
    body = json.loads(found.stdout)
    assert (body["passed"], body["max_drop"]) == (False, 0.02)
    assert list(body["metrics"]) == ["recall@1", "mrr@10"]
    assert body["metrics"]["recall@1"]["failed"] is True
    assert body["metrics"]["recall@1"]["delta"] == pytest.approx(-0.3)
    assert body["metrics"]["recall@1"]["adjusted_p_value"] >= body["metrics"]["recall@1"]["p_value"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bound": True}, "the result is a bound"),
        ({"eligible": False}, "the result is not eligible"),
        ({"provenance": {"data": "other"}}, "differ in data"),
        ({"ties": "trec"}, "differ in ties"),
        ({"provenance": {"data": "abc", "truncated_run": True}}, "one result is of a run"),
    ],
)
def test_gate_refuses_what_cannot_be_held_against_a_baseline(files, fields, text):
    make_result(np.ones(N), **fields).save(files / "unfit.json")
    checked_error(command("gate", "unfit.json", "--baseline", "base.json", cwd=files), text)


def test_wrong_input_of_both(files):
    checked_error(
        command("gate", "none.json", "--baseline", "base.json", cwd=files), "none.json: there is no such file"
    )
    checked_error(command("gate", "base.json", "--baseline", "base.json", "--max-drop", "2", cwd=files), "max_drop=2.0")
    checked_error(
        command("compare", "base.json", "base.json", "--metric", "map@3", cwd=files), "'map@3' was not computed"
    )
    (files / "broken.json").write_text("{")
    checked_error(command("compare", "base.json", "broken.json", cwd=files), "broken.json is not a result file")
    (files / "results").mkdir()
    checked_error(command("compare", "base.json", "results", cwd=files), "results is a folder; give a file that Result")


def test_texts_of_the_data_do_not_steer_a_terminal():
    from fullrank.changes import Flip

    text = flips_text("Won", [Flip("q\x1b[31m", "two\nlines\x07", "", 0.0, 1.0, {"d\x9b": 1}, [], [])])
    assert not COLOUR.search(text)
    assert "q?[31m: two lines?" in text
