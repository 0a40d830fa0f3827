"""When a run evaluates and what that costs: the arithmetic, and real runs of every kind of schedule."""

import doctest
import re

import pytest

from fullrank import GoldenSet, RetrievalCallback, schedule
from fullrank.schedule import Cost, Schedule, StepClock, cost_line, cost_remedy, span
from training import make_trainer

COST = Cost(documents=1000, distinct=900, queries=50, tokens=20_000, seconds=40.0, evaluations=11)


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(schedule).failed == 0


@pytest.mark.parametrize(
    ("every", "eval_steps", "max_steps", "expected"),
    [(None, None, 1000, 100), (None, None, 7, 1), (None, 30, 1000, 30), (5, 30, 1000, 5), ("epoch", 30, 1000, "epoch")],
)
def test_the_interval_is_the_callbacks_else_the_trainers_else_ten_a_run(every, eval_steps, max_steps, expected):
    assert Schedule.of(every, eval_steps=eval_steps, max_steps=max_steps).every == expected


@pytest.mark.parametrize(
    ("made", "n"), [(Schedule(3, 7), 4), (Schedule(7, 7), 2), (Schedule(100, 7), 2), (Schedule("epoch", 9, 3), 4)]
)
def test_the_number_of_evaluations_is_that_of_the_steps_that_are_due(made, n):
    assert made.evaluations == n
    if made.every != "epoch":
        assert 1 + sum(made.due_after_step(step) for step in range(1, made.max_steps + 1)) == n


def test_the_share_and_the_interval_that_would_be_affordable():
    # 11 evaluations of 40 s are 440 s; 1,000 steps of 0.5 s are 500 s; 440 / 940 = 46.8 %.
    assert COST.share(0.5, 1000) == pytest.approx(440 / 940)
    # N steps of 0.5 s and an evaluation: 40 / (40 + 0.5 N) <= 0.2, so N >= 320.
    assert COST.affordable_every(0.5, 1000, share=0.2) == 320
    assert COST.affordable_every(0.5, 1000, share=0.5) == 80
    assert COST.affordable_every(1e6, 1000, share=0.2) == 1


def test_the_remedy_names_the_interval_only_where_evaluations_are_dear():
    text = cost_remedy(COST, Schedule(100, 1000), 0.5)
    assert text == "Evaluations take about 47 % of this run (40 s each, a step 0.50 s); every=320 would take 20 %"
    assert cost_remedy(COST, Schedule(100, 1000), 5.0) is None
    assert "every=100 evaluates at step 0 and at the end only" in cost_remedy(COST, Schedule(10, 100), 0.5)
    cheap = Cost(10, 10, 2, 100, seconds=0.1, evaluations=11)
    assert cost_remedy(cheap, Schedule(10, 100), 0.001) is None  # a second in all: not worth a word


def test_the_cost_line_holds_all_that_was_counted():
    assert cost_line(COST) == (
        "Evaluations: 1,000 documents (900 distinct), 50 queries, 20,000 tokens: about 40 s each, 7 min 20 s for 11"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "4 ms"), (0.96, "0.96 s"), (3.14, "3.1 s"), (59.6, "1 min 0 s"), (7321, "2 h 2 min")],
)
def test_spans(seconds, text):
    assert span(seconds) == text


def test_the_clock_gives_one_median_without_the_warm_up(monkeypatch):
    times = iter([0, 100, *(t for i in range(9) for t in (1000 * i, 1000 * i + 2))])
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: float(next(times)))
    clock, seen = StepClock(), []
    for _ in range(8):
        clock.start()
        seen.append(clock.stop())
    assert seen == [None, None, None, None, None, 2.0, None, None]
    assert StepClock().stop() is None


# ------------------------------------------------------------------ real runs


def steps_of(callback):
    return [line.step for line in callback.history]


def run(tiny_st, golden, pairs, out, *, every=2, evaluated=False, **options):
    trainer = make_trainer(tiny_st(), pairs, out, evaluated=evaluated, **options)
    callback = RetrievalCallback(golden, every=every).attach(trainer)
    trainer.train()
    return trainer, callback


def test_steps_are_optimizer_steps_under_gradient_accumulation(tiny_st, tiny_golden, pairs, tmp_path):
    trainer, callback = run(
        tiny_st, tiny_golden, pairs, tmp_path, max_steps=5, gradient_accumulation_steps=3, per_device_train_batch_size=2
    )
    assert steps_of(callback) == [0, 2, 4, 5]
    assert [row["step"] for row in trainer.state.log_history if "eval_recall@1" in row] == [0, 2, 4, 5]


def test_epochs_and_steps_together_never_evaluate_twice_at_a_step(tiny_st, tiny_golden, pairs, tmp_path):
    _, callback = run(tiny_st, tiny_golden, pairs, tmp_path, every=3, max_steps=-1, num_train_epochs=2)
    assert steps_of(callback) == [0, 3, 6]


def test_a_broken_last_epoch_is_evaluated_at_its_end(tiny_st, tiny_golden, pairs, tmp_path):
    _, callback = run(tiny_st, tiny_golden, pairs, tmp_path, every="epoch", max_steps=7)
    assert steps_of(callback) == [0, 3, 6, 7]


@pytest.mark.parametrize("evaluated", [False, True])
def test_no_evaluation_strategy_and_no_dataset_are_fine(tiny_st, tiny_golden, pairs, tmp_path, evaluated):
    _, callback = run(
        tiny_st, tiny_golden, pairs, tmp_path, evaluated=evaluated, max_steps=3, eval_strategy="no", every=1
    )
    assert steps_of(callback) == [0, 1, 2, 3]


def test_the_trainers_evaluations_may_come_at_other_steps(tiny_st, tiny_golden, pairs, tmp_path):
    """Where our metric is the trainer's, each of its evaluations is one of ours; else it keeps to itself."""
    options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "evaluated": True, "every": 3}
    _, callback = run(tiny_st, tiny_golden, pairs, tmp_path / "a", **options)
    assert steps_of(callback) == [0, 3, 6]
    _, callback = run(tiny_st, tiny_golden, pairs, tmp_path / "b", metric_for_best_model="recall@1", **options)
    assert steps_of(callback) == [0, 2, 3, 4, 6]


def test_the_cost_is_printed_before_step_0(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    faq = GoldenSet(tiny_golden.queries, tiny_golden.corpus, tiny_golden.qrels, name="faq")
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=2)
    RetrievalCallback([tiny_golden, faq], every=1, verbose=True).attach(trainer)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Evaluations: "))
    assert at < next(i for i, line in enumerate(lines) if line.startswith("step 0/2"))
    found = re.fullmatch(
        r"Evaluations: 80 documents \(80 distinct\), 30 queries, ([\d,]+) tokens: about [\d.]+ m?s each, .*s for 3",
        lines[at],
    )
    assert found, lines[at]
    assert "every=" not in "".join(lines)  # a run of a moment need not hear of it
    tokens = sum(len(text.split()) + 2 for text in [*tiny_golden.doc_texts, *tiny_golden.query_texts])
    assert int(found[1].replace(",", "")) == 2 * tokens


def test_the_interval_to_take_is_said_once_when_the_step_time_is_known(
    tiny_st, tiny_golden, pairs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(schedule, "WORTH_SAYING_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "DEAR_SHARE", 0.001)
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=10)
    RetrievalCallback(tiny_golden, every=5, verbose=True).attach(trainer)
    trainer.train()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Evaluations take about")]
    assert len(said) == 1
    assert re.search(r"\d+ % of this run \([\d.]+ m?s each, a step [\d.]+ m?s\); ", said[0])


def test_measuring_the_cost_changes_nothing_in_the_run(tiny_st, tiny_golden, pairs, tmp_path):
    ends = []
    for verbose in (False, True):
        trainer = make_trainer(tiny_st(), pairs, tmp_path / str(verbose), max_steps=3)
        RetrievalCallback(tiny_golden, every=1, verbose=verbose).attach(trainer)
        trainer.train()
        ends.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert ends[0] == ends[1]
