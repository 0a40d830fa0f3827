"""The journal of a run: lines, results, resuming, and what a crash may leave."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullrank import Result
from fullrank._errors import DataError
from fullrank.checkpoints import Evaluation, best_of, since_best
from fullrank.journal import Journal, move_aside, result_name


def ok(step, score, **options):
    return Evaluation(step, step / 10, "ok", score, {"recall@1": score}, 0.5, **options)


def make_result(value):
    return Result({"recall@1": value}, {"recall@1": np.array([value])}, ("q",), {"n_scored": 1})


def lines_of(folder):
    text = (folder / "history.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def resumed(folder, step=10**9, stored=()):
    journal = Journal(folder, write=False)
    journal.resume(step, stored)
    return journal.lines


# ------------------------------------------------------------------------------------------------ adding


def test_add_writes_a_line_and_the_result(tmp_path):
    folder = tmp_path / "run" / "fullrank"
    journal = Journal(folder)
    journal.add(ok(0, 0.5), {"dev": make_result(0.5)})
    journal.add(Evaluation(2, 0.2, "failed", error="Traceback:\n  boom é 日本 \u2028 end"), {})
    assert lines_of(folder) == [
        {
            "step": 0,
            "epoch": 0.0,
            "status": "ok",
            "score": 0.5,
            "metrics": {"recall@1": 0.5},
            "seconds": 0.5,
            "error": None,
        },
        {
            "step": 2,
            "epoch": 0.2,
            "status": "failed",
            "score": None,
            "metrics": {},
            "seconds": 0.0,
            "error": "Traceback:\n  boom é 日本 \u2028 end",
        },
    ]
    assert Result.load(folder / "step-0.json") == make_result(0.5)
    assert sorted(path.name for path in folder.iterdir()) == ["history.jsonl", "step-0.json"]


def test_every_line_is_there_before_add_returns(tmp_path):
    journal = Journal(tmp_path)
    for n, step in enumerate((0, 2, 4), 1):
        journal.add(ok(step, 0.1), {})
        assert len(lines_of(tmp_path)) == n


def test_a_step_that_is_evaluated_again_replaces_its_line_and_result(tmp_path):
    journal = Journal(tmp_path)
    journal.add(ok(0, 0.5), {"dev": make_result(0.5)})
    journal.add(ok(2, 0.4), {"dev": make_result(0.4)})
    journal.add(ok(2, 0.7), {"dev": make_result(0.7)})
    assert [(line["step"], line["score"]) for line in lines_of(tmp_path)] == [(0, 0.5), (2, 0.7)]
    assert Result.load(tmp_path / "step-2.json") == make_result(0.7)


def test_several_golden_sets_get_a_file_each(tmp_path):
    journal = Journal(tmp_path)
    journal.add(ok(2, 0.4), {"dev": make_result(0.4), "faq": make_result(0.3)})
    assert Result.load(tmp_path / "step-2.dev.json") == make_result(0.4)
    assert Result.load(tmp_path / "step-2.faq.json") == make_result(0.3)


@pytest.mark.parametrize("name", ["../out", "a/b", "a b", "..", "x\\y", "naïve", "日本"])
def test_a_result_stays_one_file_in_the_folder_whatever_the_set_is_called(tmp_path, name):
    folder = tmp_path / "run"
    Journal(folder).add(ok(2, 0.4), {name: make_result(0.4), "other": make_result(0.3)})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["history.jsonl", result_name("step-2", name), "step-2.other.json"]
    )
    assert Result.load(folder / result_name("step-2", name)) == make_result(0.4)


def test_sets_with_like_names_do_not_overwrite_each_other(tmp_path):
    Journal(tmp_path).add(ok(2, 0.4), {"a b": make_result(0.4), "a/b": make_result(0.3)})
    stored = [Result.load(path).metrics["recall@1"] for path in tmp_path.glob("step-2*.json")]
    assert sorted(stored) == [0.3, 0.4]


def test_a_reader_writes_nothing(tmp_path):
    folder = tmp_path / "run"
    journal = Journal(folder, write=False)
    journal.resume(0, [])
    journal.add(ok(0, 0.5), {"dev": make_result(0.5)})
    assert [line.step for line in journal.lines] == [0]
    assert not folder.exists()


# ------------------------------------------------------------------------------------------------ resuming


def test_resume_without_a_journal_is_empty(tmp_path):
    assert resumed(tmp_path / "none") == []


def test_resume_reads_back_what_was_added(tmp_path):
    journal = Journal(tmp_path)
    written = [ok(0, 0.5), Evaluation(2, 0.2, "failed", error="Traceback\nboom"), ok(4, 0.6, note="remark")]
    for line in written:
        journal.add(line, {})
    assert resumed(tmp_path) == written
    assert best_of(resumed(tmp_path)).step == 4


def test_resume_cuts_back_to_the_step(tmp_path):
    journal = Journal(tmp_path)
    for step, score in ((0, 0.5), (2, 0.6), (4, 0.4), (6, 0.3)):
        journal.add(ok(step, score), {})
    second = Journal(tmp_path)
    second.resume(2, [])
    assert [line.step for line in second.lines] == [0, 2]
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 2]
    second.add(ok(4, 0.9), {})
    assert [(line["step"], line["score"]) for line in lines_of(tmp_path)] == [(0, 0.5), (2, 0.6), (4, 0.9)]


def test_a_stored_best_of_a_later_step_keeps_its_line_marked(tmp_path):
    journal = Journal(tmp_path)
    for step, score in ((0, 0.5), (2, 0.6), (4, 0.9), (6, 0.3)):
        journal.add(ok(step, score), {})
    second = Journal(tmp_path)
    second.resume(2, [4])
    assert [(line["step"], line.get("note")) for line in lines_of(tmp_path)] == [
        (0, None),
        (2, None),
        (4, "abandoned branch"),
    ]
    assert best_of(second.lines).step == 4  # still a candidate
    assert [line.step for line in second.current] == [0, 2]  # but not of this branch
    second.add(ok(3, 0.7), {})
    assert since_best(second.current) == 0  # patience starts from this branch
    third = Journal(tmp_path)
    third.resume(3, [4])
    assert {(line.step, line.note) for line in third.lines} == {
        (0, None),
        (2, None),
        (3, None),
        (4, "abandoned branch"),
    }


def test_the_mark_of_an_abandoned_branch_survives_a_resume_beyond_its_step(tmp_path):
    journal = Journal(tmp_path)
    for step, score in ((0, 0.5), (4, 0.9)):
        journal.add(ok(step, score), {})
    second = Journal(tmp_path)
    second.resume(0, [4])
    second.add(ok(6, 0.6), {})
    third = Journal(tmp_path)
    third.resume(6, [4])
    assert [line.step for line in third.current] == [0, 6]
    assert best_of(third.lines).step == 4


def test_an_abandoned_line_goes_when_its_weights_are_gone(tmp_path):
    journal = Journal(tmp_path)
    for step, score in ((0, 0.5), (4, 0.9)):
        journal.add(ok(step, score), {})
    Journal(tmp_path).resume(0, [4])
    second = Journal(tmp_path)
    second.resume(2, [])
    assert [line.step for line in second.lines] == [0]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30))
@pytest.mark.parametrize("where", ["error", "note"])
def test_any_text_reads_back(tmp_path, where, text):
    line = Evaluation(2, 0.2, "failed", **{where: text})
    Journal(tmp_path).add(line, {})
    assert resumed(tmp_path) == [line]


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "\x0c", "\x1e", "\r", "a\r\nb"])
def test_a_traceback_with_a_rare_line_separator_reads_back(tmp_path, text):
    """An error may quote the text that it failed on; JSON does not escape U+0085, U+2028 and U+2029."""
    journal = Journal(tmp_path)
    journal.add(Evaluation(2, 0.2, "failed", error=f"ValueError: cannot encode 'a{text}b'"), {})
    journal.add(ok(4, 0.5), {})
    assert [line.step for line in resumed(tmp_path)] == [2, 4]


def test_a_traceback_with_a_lone_surrogate_reads_back(tmp_path):
    """File names that are not UTF-8 come as lone surrogates."""
    line = Evaluation(2, 0.2, "failed", error="FileNotFoundError: 'caf\udce9'")
    Journal(tmp_path).add(line, {})
    assert resumed(tmp_path) == [line]


# ------------------------------------------------------------------------------------------------ broken journals


@pytest.mark.parametrize(
    "broken",
    [
        '{"step": 2, "epoch": 0.2, "sta',
        "garbage",
        "",
        "[1, 2]",
        "3",
        '{"step": 2}',
        '{"step": 2, "epoch": 0.2, "status": "ok", "surprise": 1}',
        '{"step": null, "epoch": 0.2, "status": "ok"}',
        '{"step": "2", "epoch": 0.2, "status": "ok"}',
        '{"step": 2, "epoch": 0.2, "status": "ok", "score": "high"}',
        '{"step": 2, "epoch": 0.2, "status": "ok", "metrics": 5}',
        '{"step": 2, "epoch": 0.2, "status": "fine"}',
        '{"step": 2, "epoch": 0.2, "status": "ok", "findings": "warning"}',
        '{"step": 2, "epoch": 0.2, "status": "ok", "findings": [1]}',
    ],
)
def test_a_broken_line_is_an_error_that_names_file_and_line(tmp_path, broken):
    Journal(tmp_path).add(ok(0, 0.5), {})
    path = tmp_path / "history.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + broken + "\n", encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(DataError) as found:
        Journal(tmp_path).resume(10, [])
    assert str(path) in str(found.value)
    assert "line 2" in str(found.value)
    assert isinstance(found.value, ValueError)
    assert path.read_bytes() == before


def test_findings_read_back(tmp_path):
    line = replace(ok(2, 0.5), findings=["warning: documents grow alike", "a second\nline"])
    Journal(tmp_path).add(line, {})
    assert resumed(tmp_path) == [line]


def test_a_journal_that_is_not_text_is_an_error_of_ours(tmp_path):
    (tmp_path / "history.jsonl").write_bytes(b"\xff\xfe\x00broken")
    with pytest.raises(DataError, match=r"history\.jsonl"):
        Journal(tmp_path).resume(10, [])


# ------------------------------------------------------------------------------------------------ atomic


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path):
    journal = Journal(tmp_path)
    journal.add(ok(0, 0.5), {})
    before = (tmp_path / "history.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failure = None
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (len(before) // 2, hard)
        )  # a write beyond it fails, as on a full disk
        try:
            journal.add(ok(2, 0.6), {})
        except OSError as error:
            failure = error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure is not None
    assert (tmp_path / "history.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]
    journal.add(ok(4, 0.7), {})
    assert lines_of(tmp_path)[-1]["step"] == 4


def test_a_reader_sees_whole_journals_only_and_a_killed_writer_leaves_one(tmp_path):
    """A real process adds lines as fast as it can; it is killed at some moment, five times."""
    child = """
import sys
from pathlib import Path
from fullrank.checkpoints import Evaluation
from fullrank.journal import Journal
journal = Journal(Path(sys.argv[1]))
for step in range(10**9):
    if step >= 200:
        del journal.lines[0]
    journal.add(Evaluation(step, 0.0, "ok", 0.5, {"recall@1": 0.5}, note="x" * 200), {})
    print(step, flush=True)
"""
    for round_ in range(5):
        folder = tmp_path / str(round_)
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(folder)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            for _ in range(5 + 7 * round_):
                process.stdout.readline()
                assert resumed(folder)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            process.stdout.close()
        steps = [line.step for line in resumed(folder)]
        assert steps == list(range(steps[0], steps[-1] + 1))


# ------------------------------------------------------------------------------------------------ move_aside


def test_move_aside_renames_to_the_next_free_number_and_says_so(tmp_path, caplog):
    folder = tmp_path / "fullrank"
    with caplog.at_level(logging.WARNING):
        for n in (1, 2, 3):
            (folder / "best").mkdir(parents=True)
            (folder / "best" / "weights").write_text(str(n))
            assert move_aside(folder) == tmp_path / f"fullrank.{n}"
    assert not folder.exists()
    assert [(tmp_path / f"fullrank.{n}" / "best" / "weights").read_text() for n in (1, 2, 3)] == ["1", "2", "3"]
    assert str(tmp_path / "fullrank.3") in caplog.records[-1].getMessage()


def test_move_aside_passes_by_numbers_that_are_taken_by_files(tmp_path):
    folder = tmp_path / "fullrank"
    folder.mkdir()
    (tmp_path / "fullrank.1").write_text("a file of the user")
    assert move_aside(folder) == tmp_path / "fullrank.2"
    assert (tmp_path / "fullrank.1").read_text() == "a file of the user"


def test_move_aside_of_nothing(tmp_path):
    assert move_aside(tmp_path / "fullrank") is None
    assert list(tmp_path.iterdir()) == []
