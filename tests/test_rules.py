"""By what a run chooses, and how it says so: rules that stay, sums that are shown as sums, an end that is evaluated."""

import re

import pytest
from transformers import EarlyStoppingCallback

from fullrank import GoldenSet, RetrievalCallback
from fullrank._errors import DataError
from fullrank.report import evaluation_line, verdict
from training import Crash, crash, make_trainer


@pytest.fixture
def second(tiny_golden):
    """The same queries under another name, the other half of them."""
    half = dict(list(tiny_golden.queries.items())[::2])
    return GoldenSet(half, tiny_golden.corpus, {q: tiny_golden.qrels[q] for q in half}, name="second")


@pytest.mark.parametrize("change", [{"select": "recall@10"}, {"ties": "worst"}, {"precision": "bf16"}])
def test_a_run_is_not_resumed_by_other_rules(tiny_st, tiny_golden, pairs, tmp_path, change):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, save_strategy="steps", save_steps=2)
    RetrievalCallback(tiny_golden, every=2).attach(trainer)
    trainer.add_callback(Crash(5))
    crash(trainer)
    again = make_trainer(tiny_st(), pairs, tmp_path, save_strategy="steps", save_steps=2)
    RetrievalCallback(tiny_golden, every=2, **change).attach(again)
    name = next(iter(change))
    with pytest.raises(DataError, match=rf"this run was begun with {name}=.*scores by two rules cannot be ranked"):
        again.train(resume_from_checkpoint=True)
    RetrievalCallback(tiny_golden, every=2).attach(last := make_trainer(tiny_st(), pairs, tmp_path))
    last.train(resume_from_checkpoint=True)


def test_a_weighted_sum_is_shown_as_one(tiny_st, tiny_golden, second, pairs, tmp_path, capsys):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=2)
    select = {"tiny/recall@1": 0.6, "second/ndcg@10": 0.4}
    callback = RetrievalCallback([tiny_golden, second], select=select, every=1, verbose=True).attach(trainer)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    for line, evaluation in zip(lines, callback.history, strict=True):
        assert f"objective {evaluation.score:.4f}  tiny/recall@1 " in line


def test_the_verdict_on_a_sum_names_the_sum_and_the_term_apart():
    from test_report import make_comparison

    found = make_comparison("worse")
    text = verdict(found, improved=True, step=4, metric="objective", composite=(0.3063, 0.592, "tiny/recall@1"))
    assert text.startswith("Best: step 4 by objective: 0.3063 -> 0.5920. Of it tiny/recall@1: +3.40 points [")
    assert text.endswith("worse than the base model.")


@pytest.mark.parametrize("last", [True, False])
def test_an_end_that_the_trainer_decides_after_our_events_is_evaluated(tiny_st, tiny_golden, pairs, tmp_path, last):
    # Its evaluation of the epoch comes after `on_epoch_end`; with load_best_model_at_end other weights are in the model
    # by the time that we hear of it.
    trainer = make_trainer(
        tiny_st(),
        pairs,
        tmp_path,
        evaluated=True,
        max_steps=-1,
        num_train_epochs=6,
        eval_strategy="epoch",
        save_strategy="epoch" if not last else "no",
        learning_rate=0.0,
        metric_for_best_model="eval_loss",
        load_best_model_at_end=not last,
        callbacks=[EarlyStoppingCallback(1)],
    )
    callback = RetrievalCallback(tiny_golden, every=4).attach(trainer)
    trainer.train()
    end = trainer.state.global_step
    assert end < trainer.state.max_steps
    assert end % 4
    steps = [line.step for line in callback.history]
    assert steps == [*range(0, end, 4), *([end] if last else [])]


def test_a_loss_line_is_shown_with_its_own_step_only(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, logging_steps=3, max_steps=6)
    RetrievalCallback(tiny_golden, every=1, verbose=True).attach(trainer)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    with_loss = [i for i, line in enumerate(lines) if re.search(r"loss \d", line)]
    assert with_loss == [3, 6]
    assert [i for i, line in enumerate(lines) if re.search(r"in-batch acc \d", line)] == [3, 6]


def test_a_confirm_set_that_cannot_be_scored_ends_the_run_before_it_begins(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    other = GoldenSet({"x": "lol lis"}, {"d": "lol", "e": "lis"}, {"x": {"d": 1}}, name="confirm")
    callback = RetrievalCallback(tiny_golden, every=2, confirm=other).attach(trainer)

    def broken(**options):
        raise RuntimeError("a text is too long")

    class Break(Crash):
        def on_train_begin(self, args, state, control, **kwargs):
            callback._session.confirm.run = broken

    trainer.callback_handler.callbacks.insert(1, Break(99))
    with pytest.raises(RuntimeError, match="a text is too long"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_set_is_named_where_there_are_several():
    from test_report import make_result

    line = evaluation_line(1, 2, make_result(50), "recall@1", of="dev", composite=0.25)
    assert "objective 0.2500  dev/recall@1 " in line
