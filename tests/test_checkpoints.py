"""Decisions about checkpoints: cases 30, 32, 33 and 45, and the plain loops that say the same."""

import json
import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.checkpoints import NOT_ELIGIBLE, Evaluation, best_of, since_best, steps_to_keep

BAD = [None, math.nan, math.inf, -math.inf]


def history(scores, *, first=2, every=2):
    return [Evaluation(first + i * every, 0.1 * i, "ok", score) for i, score in enumerate(scores)]


@st.composite
def histories(draw):
    n = draw(st.integers(0, 8))
    steps = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n, unique=True))
    scores = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, -0.25]), st.sampled_from(BAD))
    status = st.sampled_from(["ok", "ok", "ok", "failed", "skipped"])
    return [Evaluation(step, 0.0, draw(status), draw(scores)) for step in steps]


def usable(evaluation):
    return evaluation.status == "ok" and evaluation.score is not None and math.isfinite(evaluation.score)


# ------------------------------------------------------------------------------------------------ best_of


@pytest.mark.parametrize(("scores", "step", "best"), [([0.5, 0.6, 0.9, 0.8], 6, 0.9), ([0.9, 0.5, 0.4, 0.6], 2, 0.9)])
def test_case_30_the_peak_wins_wherever_the_user_saves(scores, step, best):
    found = best_of(history(scores))
    assert (found.step, found.score) == (step, best)


@pytest.mark.parametrize("last", [0.7, 0.69999])
def test_case_32_equal_or_lower_scores_do_not_move_the_best(last):
    assert best_of(history([0.5, 0.7, 0.1, last])).step == 4


def test_case_32_a_tie_stays_with_the_earlier_step_in_any_order_of_the_lines():
    lines = history([0.5, 0.7, 0.1, 0.7])
    assert best_of(reversed(lines)).step == 4
    assert best_of([lines[3], lines[0], lines[1]]).step == 4


def test_case_33_the_base_stays_best_where_nothing_beats_it():
    lines = history([0.99, 0.5, 0.4, 0.3, 0.2], first=0)
    assert best_of(lines) is lines[0]
    assert best_of(history([0.99, 0.99], first=0)).step == 0


def test_case_45_failed_is_not_zero():
    lines = [
        Evaluation(2, 0.1, "ok", 0.6),
        Evaluation(4, 0.2, "failed", error="Traceback"),
        Evaluation(6, 0.3, "ok", 0.5),
    ]
    assert best_of(lines).step == 2
    # Were the failed one a 0, it would win over a negative score.
    assert best_of([Evaluation(2, 0.1, "ok", -0.5), lines[1]]).step == 2
    assert since_best(lines) == 1


@pytest.mark.parametrize("bad", BAD)
def test_scores_that_are_no_numbers_never_win(bad):
    lines = [Evaluation(0, 0.0, "ok", bad), Evaluation(2, 0.1, "ok", -3.0), Evaluation(4, 0.2, "ok", bad)]
    assert best_of(lines).step == 2
    assert best_of([lines[0]]) is None
    assert since_best(lines) == 0


@pytest.mark.parametrize("status", ["failed", "skipped"])
def test_only_finished_evaluations_win(status):
    assert best_of([Evaluation(0, 0.0, status, 0.9), Evaluation(2, 0.1, "ok", 0.1)]).step == 2
    assert best_of([Evaluation(0, 0.0, status, 0.9)]) is None


def test_nothing_gives_none():
    assert best_of([]) is None
    assert since_best([]) == 0
    assert steps_to_keep({}, 3) == []


@given(histories())
def test_best_of_against_a_plain_loop(lines):
    best = None
    for line in sorted(lines, key=lambda line: line.step):
        if usable(line) and (best is None or line.score > best.score):
            best = line
    assert best_of(lines) is best
    assert best_of(iter(lines)) is best


# ------------------------------------------------------------------------------------------------ since_best


@pytest.mark.parametrize(
    ("scores", "min_delta", "waited"),
    [
        ([0.5], 0.0, 0),
        ([0.5, 0.5], 0.0, 1),
        ([0.5, 0.6, 0.9, 0.8], 0.0, 1),
        ([0.9, 0.5, 0.4, 0.6], 0.0, 3),
        ([0.5, 0.4, 0.6], 0.0, 0),
        ([0.5, 0.625], 0.125, 1),  # more than min_delta, not as much as
        ([0.5, 0.75], 0.125, 0),
        ([0.5, 0.5625, 0.625, 0.6875], 0.125, 0),  # small steps add up: .6875 is more than .125 above .5
        ([-0.5, -0.4], 0.0, 0),
    ],
)
def test_since_best(scores, min_delta, waited):
    assert since_best(history(scores), min_delta=min_delta) == waited


def test_failed_evaluations_do_not_use_up_patience():
    lines = [
        Evaluation(0, 0.0, "ok", 0.5),
        Evaluation(2, 0.1, "failed"),
        Evaluation(4, 0.2, "skipped"),
        Evaluation(6, 0.3, "ok", math.nan),
        Evaluation(8, 0.4, "ok", 0.4),
    ]
    assert since_best(lines) == 1


@given(histories(), st.sampled_from([0.0, 0.25, 0.5]))
def test_since_best_against_a_plain_loop(lines, min_delta):
    scores = [line.score for line in lines if usable(line)]
    improved_at, reference = -1, None
    for i, score in enumerate(scores):
        if reference is None or score - reference > min_delta:
            improved_at, reference = i, score
    assert since_best(lines, min_delta=min_delta) == len(scores) - 1 - improved_at


# ------------------------------------------------------------------------------------------------ steps_to_keep


@given(
    st.dictionaries(st.integers(0, 30), st.sampled_from([0.0, 0.25, 0.5, -0.5, 1.0]), max_size=8),
    st.integers(1, 9),
)
def test_steps_to_keep_against_picking_one_after_the_other(scores, keep_best):
    left, kept = dict(sorted(scores.items())), []
    while left and len(kept) < keep_best:
        best = None
        for step, score in left.items():
            if best is None or score > left[best]:
                best = step
        kept.append(best)
        del left[best]
    assert steps_to_keep(scores, keep_best) == kept


@given(histories())
def test_the_first_step_to_keep_is_the_best(lines):
    best = best_of(lines)
    kept = steps_to_keep({line.step: line.score for line in lines if usable(line)}, 1)
    assert kept == ([] if best is None else [best.step])


def test_steps_to_keep_leaves_its_input_as_it_is():
    scores = {4: 0.7, 2: 0.7, 0: 0.5}
    assert steps_to_keep(scores, 2) == [2, 4]
    assert list(scores.items()) == [(4, 0.7), (2, 0.7), (0, 0.5)]


# ------------------------------------------------------------------------------------------------ Evaluation


def test_an_evaluation_is_a_line_of_json_and_back():
    line = Evaluation(4, 0.5, "ok", 0.25, {"recall@1": 0.25}, 1.5)
    body = line.as_dict()
    assert body == {
        "step": 4,
        "epoch": 0.5,
        "status": "ok",
        "score": 0.25,
        "metrics": {"recall@1": 0.25},
        "seconds": 1.5,
        "error": None,
    }
    assert Evaluation(**json.loads(json.dumps(body))) == line


def test_a_note_is_kept_where_there_is_one():
    line = Evaluation(4, 0.5, "failed", error="Traceback: boom", note="abandoned branch")
    assert line.as_dict()["note"] == "abandoned branch"
    assert line.as_dict()["score"] is None
    assert Evaluation(**line.as_dict()) == line


def test_an_evaluation_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Evaluation(0, 0.0, "ok").step = 1


def test_an_evaluation_that_is_not_eligible_is_never_best_and_no_improvement():
    lines = [
        Evaluation(0, 0.0, "ok", 0.5),
        Evaluation(2, 0.1, "ok", 0.9, note=NOT_ELIGIBLE),
        Evaluation(4, 0.2, "ok", 0.4),
        Evaluation(6, 0.3, "failed"),
    ]
    assert [line.eligible for line in lines] == [True, False, True, False]
    assert best_of(lines).step == 0
    assert since_best(lines) == 2
    assert Evaluation(8, 0.4, "ok", 0.1, note="abandoned branch").eligible


def test_note_and_findings_are_left_out_where_there_are_none():
    assert not {"note", "findings"} & set(Evaluation(0, 0.0, "ok", 0.5).as_dict())
    assert Evaluation(0, 0.0, "ok", 0.5, note="", findings=["a"]).as_dict()["findings"] == ["a"]
