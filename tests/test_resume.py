"""Resuming: a run that was broken off and goes on equals one that was not."""

import shutil

import peft
import pytest
import torch

from fullrank import GoldenSet, RetrievalCallback
from fullrank._errors import DataError
from training import LORA, Crash, crash, equal_weights, make_trainer, scripted, scripted_run


def whole_and_resumed(adapted, golden, pairs, out):
    """Returns trainer and callback of an uninterrupted run, and of one that crashed and was resumed."""
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = make_trainer(adapted(), pairs, out / "whole", **options)
    expected = RetrievalCallback(golden, every=2).attach(whole)
    whole.train()
    broken = make_trainer(adapted(), pairs, out / "parts", callbacks=[Crash(5)], **options)
    RetrievalCallback(golden, every=2).attach(broken)
    crash(broken)
    again = make_trainer(adapted(), pairs, out / "parts", **options)
    callback = RetrievalCallback(golden, every=2).attach(again)
    again.train(resume_from_checkpoint=True)
    return whole, expected, again, callback


def crash_and_resume(tiny_st, tiny_golden, pairs, out, scores, *, crash_at=5, **options):
    options = {"save_strategy": "steps", "save_steps": 4, **options}
    trainer = make_trainer(tiny_st(), pairs, out, callbacks=[Crash(crash_at)], **options)
    callback = scripted(trainer, tiny_golden, scores)
    crash(trainer)
    trainer = make_trainer(tiny_st(), pairs, out, **options)
    callback = scripted(trainer, tiny_golden, scores)
    trainer.train(resume_from_checkpoint=True)
    return trainer, callback


@pytest.mark.parametrize("best", [0, 2, 4, 6, 8])
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_st, tiny_golden, pairs, tmp_path, best):
    scores = {step: 0.9 if step == best else 0.1 + step / 100 for step in (0, 2, 4, 6, 8)}
    whole, expected = scripted_run(
        tiny_st, tiny_golden, pairs, tmp_path / "whole", scores, save_strategy="steps", save_steps=4
    )
    trainer, callback = crash_and_resume(tiny_st, tiny_golden, pairs, tmp_path / "parts", scores)

    def plain(history):
        return [(line.step, line.status, line.score, line.metrics, line.note) for line in history]

    assert plain(callback.history) == plain(expected.history)
    assert (callback.best.step, callback.best.score) == (best, 0.9)
    assert callback.improved == expected.improved
    assert trainer.state.best_global_step == whole.state.best_global_step == best
    assert callback.base_result.metrics == expected.base_result.metrics
    assert equal_weights(trainer.model, whole.model.state_dict())
    steps = [row["step"] for row in trainer.state.log_history if "eval_recall@1" in row]
    assert steps == [0, 2, 4, 6, 8]


def test_a_best_of_an_abandoned_branch_stays_a_candidate(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.2, 4: 0.3, 6: 0.9, 8: 0.4}
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=[Crash(7)], **options)
    callback = scripted(trainer, tiny_golden, scores)
    crash(trainer)
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=5, **options)
    callback = scripted(trainer, tiny_golden, {5: 0.35}, every=5)
    trainer.train(resume_from_checkpoint=True)
    assert [(line.step, line.note) for line in callback.history] == [
        (0, None),
        (2, None),
        (4, None),
        (6, "abandoned branch"),
        (5, None),
    ]
    assert (callback.best.step, callback.best.score) == (6, 0.9)


def test_a_deleted_best_folder_is_no_candidate_on_resume(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.4, 8: 0.5}
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=[Crash(5)], **options)
    callback = scripted(trainer, tiny_golden, scores)
    crash(trainer)
    shutil.rmtree(callback.best.path)
    trainer = make_trainer(tiny_st(), pairs, tmp_path, **options)
    callback = scripted(trainer, tiny_golden, scores)
    trainer.train(resume_from_checkpoint=True)
    assert (callback.best.step, callback.best.score) == (8, 0.5)


@pytest.mark.parametrize("route", ["get_peft_model", "add_adapter"])
def test_lora_resumes_and_equals_an_uninterrupted_run(tiny_st, tiny_golden, pairs, tmp_path, route):
    def adapted():
        torch.manual_seed(5)
        model = tiny_st()
        if route == "add_adapter":
            model.add_adapter(peft.LoraConfig(**LORA))
        else:
            model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
        return model

    whole, expected, again, callback = whole_and_resumed(adapted, tiny_golden, pairs, tmp_path)
    assert [(h.step, h.score) for h in callback.history] == [(h.step, h.score) for h in expected.history]
    assert callback.best.step == expected.best.step
    assert equal_weights(again.model, whole.model.state_dict())


def test_the_best_result_is_that_of_the_stored_weights_though_the_step_was_trained_again(
    tiny_st, tiny_golden, pairs, tmp_path
):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    trainer = make_trainer(tiny_st(), pairs, tmp_path, **options)
    callback = scripted(trainer, tiny_golden, {0: 0.1, 6: 0.9}, every=6)
    trainer.train()
    stored = callback.best_result
    other = {"anchor": pairs["anchor"][::-1], "positive": pairs["positive"]}
    trainer = make_trainer(tiny_st(), other, tmp_path, **options)
    callback = RetrievalCallback(tiny_golden, every=6).attach(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (callback.best.step, callback.best.score) == (6, 0.9)
    assert callback.best_result == stored
    assert [line.note for line in callback.history if line.step == 6] == ["abandoned branch", None]
    assert callback.comparison.delta == pytest.approx(
        sum(stored.per_query["recall@1"] - callback.base_result.per_query["recall@1"]) / stored.counts["n_scored"]
    )


def test_other_data_on_resume_is_refused_before_training(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    RetrievalCallback(tiny_golden, every=2).attach(trainer)
    trainer.train()
    more = GoldenSet(tiny_golden.queries, {**tiny_golden.corpus, "new": "bal"}, tiny_golden.qrels, name="tiny")
    trainer = make_trainer(tiny_st(), pairs, tmp_path, save_strategy="steps", save_steps=2, max_steps=8)
    RetrievalCallback(more, every=2).attach(trainer)
    with pytest.raises(DataError, match="is not the one that this run began with"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("what", ["norms", "dense"])
def test_what_trains_beside_an_adapter_is_resumed_too(tiny_st, tiny_golden, pairs, tmp_path, what):
    from sentence_transformers.sentence_transformer.modules import Dense

    def adapted():
        torch.manual_seed(5)
        model = tiny_st(extra=[Dense(32, 16)] if what == "dense" else [])
        model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
        for name, parameter in model.named_parameters():
            if "LayerNorm" in name and what == "norms":
                parameter.requires_grad_(True)
        return model

    def losses(trainer):
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    whole, _, again, _ = whole_and_resumed(adapted, tiny_golden, pairs, tmp_path)
    assert losses(again) == losses(whole)


def broken_off(tiny_st, golden, pairs, out, scores, *, at=5, **options):
    """A run that ended in the middle; its trainer's checkpoint is that of step 4."""
    trainer = make_trainer(tiny_st(), pairs, out, callbacks=[Crash(at)], save_strategy="steps", save_steps=4, **options)
    callback = scripted(trainer, golden, scores)
    crash(trainer)
    return callback


def resumed(tiny_st, golden, pairs, out, scores, *, checkpoint=True, own=None, **options):
    trainer = make_trainer(tiny_st(), pairs, out, save_strategy="steps", save_steps=4, **options)
    callback = scripted(trainer, golden, scores, **(own or {}))
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, callback


def test_a_moved_output_folder(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.4, 8: 0.5}
    broken_off(tiny_st, tiny_golden, pairs, tmp_path / "old", scores)
    shutil.move(tmp_path / "old", tmp_path / "new")
    trainer, callback = resumed(tiny_st, tiny_golden, pairs, tmp_path / "new", scores)
    assert (callback.best.step, callback.best.path) == (2, tmp_path / "new" / "fullrank" / "best" / "step-2")
    assert trainer.state.best_model_checkpoint == str(callback.best.path)
    assert [line.step for line in callback.history] == [0, 2, 4, 6, 8]
    assert not (tmp_path / "old").exists()


def test_patience_goes_on_counting(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.4, 8: 0.5, 10: 0.1}
    broken_off(tiny_st, tiny_golden, pairs, tmp_path, scores, max_steps=10)
    trainer, _ = resumed(tiny_st, tiny_golden, pairs, tmp_path, scores, own={"patience": 3}, max_steps=10)
    assert trainer.state.global_step == 8  # one before the break (step 4), two after it


def test_a_line_whose_weights_are_gone_is_said_to_be_no_candidate(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    scores = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.4, 8: 0.2}
    callback = broken_off(tiny_st, tiny_golden, pairs, tmp_path, scores)
    shutil.rmtree(callback.best.path)
    _, callback = resumed(tiny_st, tiny_golden, pairs, tmp_path, scores)
    assert (callback.best.step, callback.best.score) == (6, 0.4)
    assert [line.step for line in callback.history] == [0, 2, 4, 6, 8]
    said = [r.getMessage() for r in caplog.records if "weights of step 2" in r.getMessage()]
    assert said == [
        f"the weights of step 2, which scored best (0.9000), are not in {tmp_path / 'fullrank' / 'best'} any more: "
        "the best is chosen among what is left and what comes"
    ]


def test_tensorboard_goes_on_at_the_step_of_the_checkpoint(tiny_st, tiny_golden, pairs, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scores = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.4, 8: 0.2}
    broken_off(tiny_st, tiny_golden, pairs, tmp_path, scores, report_to=["tensorboard"])
    resumed(tiny_st, tiny_golden, pairs, tmp_path, scores, report_to=["tensorboard"])
    steps = []
    for events in sorted(tmp_path.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime):
        seen = EventAccumulator(str(events)).Reload()
        steps += [event.step for event in seen.Scalars("eval/recall@1")]
    assert steps == [0, 2, 4, 6, 8]


def test_resuming_elsewhere_begins_a_new_journal_without_a_base(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    """A checkpoint of another folder: nothing to compare with, which is said; the run is judged by what it has."""
    scores = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.4, 8: 0.2}
    broken_off(tiny_st, tiny_golden, pairs, tmp_path / "a", scores)
    checkpoint = str(tmp_path / "a" / "checkpoint-4")
    _, callback = resumed(tiny_st, tiny_golden, pairs, tmp_path / "b", scores, checkpoint=checkpoint)
    assert [line.step for line in callback.history] == [6, 8]
    assert (callback.best.step, callback.comparison) == (6, None)
    assert "the result of step 0 is not in" in caplog.text


def test_a_run_that_was_not_watched_can_be_resumed_with_us(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=[Crash(5)], save_strategy="steps", save_steps=4)
    crash(trainer)
    trainer, callback = resumed(tiny_st, tiny_golden, pairs, tmp_path, {6: 0.4, 8: 0.5})
    assert (callback.best.step, trainer.state.best_metric) == (8, 0.5)


def test_resuming_twice(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.2, 4: 0.3, 6: 0.9, 8: 0.5, 10: 0.4, 12: 0.1}
    options = {"max_steps": 12}
    broken_off(tiny_st, tiny_golden, pairs, tmp_path, scores, at=5, **options)
    trainer = make_trainer(
        tiny_st(), pairs, tmp_path, callbacks=[Crash(10)], save_strategy="steps", save_steps=4, **options
    )
    scripted(trainer, tiny_golden, scores)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=True)
    trainer, callback = resumed(tiny_st, tiny_golden, pairs, tmp_path, scores, **options)
    assert [(line.step, line.note) for line in callback.history] == [(step, None) for step in range(0, 13, 2)]
    assert callback.best.step == 6
    assert [row["step"] for row in trainer.state.log_history if "eval_recall@1" in row] == list(range(0, 13, 2))


def test_a_best_folder_without_its_weights_is_no_candidate_on_resume(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    def run(scores):
        trainer = make_trainer(tiny_st(), pairs, tmp_path, save_strategy="steps", save_steps=4, max_steps=6)
        return trainer, scripted(trainer, tiny_golden, scores)

    trainer, callback = run({0: 0.1, 2: 0.9, 4: 0.3})
    trainer.add_callback(Crash(5))
    crash(trainer)
    (callback.best.path / "model.safetensors").unlink()
    trainer, callback = run({6: 0.4})
    trainer.train(resume_from_checkpoint=True)
    assert callback.best.step == 6
    assert "the weights of step 2, which scored best (0.9000), are not in" in caplog.text
    assert "holds steps of an earlier run" not in caplog.text
