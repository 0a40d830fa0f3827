"""The callback on real trainers: a SentenceTransformerTrainer and a plain Trainer, tiny random models, a few steps."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import Trainer, TrainerCallback, TrainingArguments

from fullrank import Backbone, GoldenSet, Result, RetrievalCallback, evaluate
from fullrank._errors import EvaluationError, SettingError
from training import LORA, Weights, equal_weights, make_trainer, plain_trainer, scripted, scripted_run

peft = pytest.importorskip("peft")


def embeddings(model, golden):
    return model.encode(golden.doc_texts[:10], convert_to_tensor=True)


class Snapshots(TrainerCallback):
    """Keeps the embeddings of ten texts at every step."""

    def __init__(self, model, golden):
        self.model, self.golden, self.at = model, golden, {}

    def on_step_end(self, args, state, control, **kwargs):
        with torch.random.fork_rng():
            training = self.model.training
            self.at[state.global_step] = embeddings(self.model, self.golden)
            self.model.train(training)


# ------------------------------------------------------------------ schedule, logs, journal


def test_a_run_evaluates_at_step_0_every_n_and_at_the_end(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=7)
    callback = RetrievalCallback(tiny_golden, every=3).attach(trainer)
    trainer.train()
    assert [line.step for line in callback.history] == [0, 3, 6, 7]
    logged = [row["step"] for row in trainer.state.log_history if "eval_recall@1" in row]
    assert logged == [0, 3, 6, 7]
    losses = [row["step"] for row in trainer.state.log_history if "loss" in row]
    assert losses == [1, 2, 3, 4, 5, 6, 7]  # none was swallowed by our own logging
    json.dumps(trainer.state.log_history)
    assert all(isinstance(v, float) for r in trainer.state.log_history for k, v in r.items() if k.startswith("eval_"))


def test_the_default_schedule_is_ten_evaluations_or_the_trainers_own(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "a", max_steps=20)
    callback = RetrievalCallback(tiny_golden).attach(trainer)
    trainer.train()
    assert [line.step for line in callback.history] == list(range(0, 21, 2))
    trainer = make_trainer(
        tiny_st(), pairs, tmp_path / "b", evaluated=True, max_steps=6, eval_strategy="steps", eval_steps=3
    )
    callback = RetrievalCallback(tiny_golden).attach(trainer)
    trainer.train()
    assert [line.step for line in callback.history] == [0, 3, 6]


def test_every_epoch(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=-1, num_train_epochs=2)
    callback = RetrievalCallback(tiny_golden, every="epoch").attach(trainer)
    trainer.train()
    assert [line.step for line in callback.history] == [0, 3, 6]


def test_the_logged_score_is_that_of_evaluate(tiny_st, tiny_golden, pairs, tmp_path):
    model = tiny_st()
    before = evaluate(model, tiny_golden)
    trainer = make_trainer(model, pairs, tmp_path, max_steps=2)
    callback = RetrievalCallback(tiny_golden, every=1).attach(trainer)
    trainer.train()
    assert callback.history[0].metrics == before.metrics
    assert Result.load(tmp_path / "fullrank" / "step-0.json").metrics == before.metrics
    lines = [json.loads(text) for text in (tmp_path / "fullrank" / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert set(lines[0]) == {"step", "epoch", "status", "score", "metrics", "seconds", "error"}
    assert lines[0]["score"] == before.metrics["recall@1"]


def test_tensorboard_tags_steps_and_values(tiny_st, tiny_golden, pairs, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=4, report_to=["tensorboard"])
    callback = RetrievalCallback(tiny_golden, every=2).attach(trainer)
    trainer.train()
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    seen = EventAccumulator(str(events)).Reload()
    tags = seen.Tags()["scalars"]
    wanted = {"train/loss", "train/in_batch_acc", "train/in_batch_mrr", "train/in_batch_candidates", "eval/recall@1"}
    assert wanted <= set(tags)
    assert not [tag for tag in tags if tag.startswith("train/") and "recall" in tag]
    points = [(event.step, event.value) for event in seen.Scalars("eval/recall@1")]
    assert points == [(line.step, pytest.approx(line.score, abs=1e-6)) for line in callback.history]
    assert [event.step for event in seen.Scalars("train/in_batch_candidates")] == [1, 2, 3, 4]
    assert {event.value for event in seen.Scalars("train/in_batch_candidates")} == {8.0}
    assert any("custom_scalars" in tag for tag in seen.Tags()["tensors"])
    assert any("worst queries" in tag for tag in seen.Tags()["tensors"])


def test_several_sets_and_a_composite_objective(tiny_st, tiny_golden, pairs, tmp_path):
    faq = GoldenSet(tiny_golden.queries, tiny_golden.corpus, tiny_golden.qrels, name="faq")
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=2)
    select = {"tiny/recall@1": 0.75, "faq/ndcg@10": 0.25}
    callback = RetrievalCallback([tiny_golden, faq], select=select, every=1).attach(trainer)
    trainer.train()
    row = next(row for row in trainer.state.log_history if row["step"] == 0)
    assert row["eval_objective"] == pytest.approx(0.75 * row["eval_tiny_recall@1"] + 0.25 * row["eval_faq_ndcg@10"])
    assert callback.history[0].metrics["faq/ndcg@10"] == row["eval_faq_ndcg@10"]
    assert (tmp_path / "fullrank" / "step-0.faq.json").is_file()


# ------------------------------------------------------------------ no trace in the run


@pytest.mark.parametrize("route", ["full", "lora"])
def test_weights_are_bit_equal_with_and_without_evaluation(tiny_st, tiny_golden, pairs, tmp_path, route):
    def train(out, watched):
        model = tiny_st()
        if route == "lora":
            torch.manual_seed(1)
            model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(lora_dropout=0.2, **LORA))
        trainer = make_trainer(model, pairs, out, max_steps=6)
        weights = Weights()
        trainer.add_callback(weights)
        if watched:
            RetrievalCallback(tiny_golden, every=1).attach(trainer)
        trainer.train()
        return weights.at[6], [row["loss"] for row in trainer.state.log_history if "loss" in row]

    plain, plain_losses = train(tmp_path / "plain", watched=False)
    watched, watched_losses = train(tmp_path / "watched", watched=True)
    assert plain_losses == watched_losses
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


# ------------------------------------------------------------------ choosing, keeping, restoring


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({0: 0.1, 2: 0.5, 4: 0.6, 6: 0.9, 8: 0.8}, 6),  # the peak is at a step that the trainer did not save
        ({0: 0.1, 2: 0.9, 4: 0.5, 6: 0.4, 8: 0.6}, 2),
        ({0: 0.1, 2: 0.7, 4: 0.7, 6: 0.69999, 8: 0.7}, 2),  # of equal scores the earlier step
        ({0: 0.1, 2: 0.6, 4: ValueError("broken"), 6: 0.5, 8: 0.3}, 2),  # a failed evaluation is not 0
        ({0: 0.1, 2: math.nan, 4: 0.3, 6: 0.2, 8: math.nan}, 4),
    ],
)
@pytest.mark.parametrize("route", ["full", "get_peft_model", "add_adapter"])
def test_the_weights_of_the_best_step_are_kept_and_restored(tiny_st, tiny_golden, pairs, tmp_path, scores, best, route):
    model = tiny_st()
    if route == "get_peft_model":
        model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    elif route == "add_adapter":
        model.add_adapter(peft.LoraConfig(**LORA))
    trainer = make_trainer(model, pairs, tmp_path, save_strategy="steps", save_steps=4)
    callback = scripted(trainer, tiny_golden, scores)
    snapshots = Snapshots(model, tiny_golden)
    trainer.callback_handler.callbacks.insert(0, snapshots)
    trainer.train()
    assert (callback.best.step, callback.best.score) == (best, scores[best])
    assert callback.improved
    assert trainer.state.best_global_step == best
    assert trainer.state.best_metric == scores[best]
    assert Path(trainer.state.best_model_checkpoint) == tmp_path / "fullrank" / "best" / f"step-{best}"
    now = embeddings(model, tiny_golden)
    assert (now - snapshots.at[best]).abs().max() < 1e-5
    assert (now - snapshots.at[8 if best != 8 else 2]).abs().max() > 1e-3
    assert [p.name for p in (tmp_path / "fullrank" / "best").glob("step-*")] == [f"step-{best}"]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]


def test_the_stored_folder_is_a_model_that_loads(tiny_st, tiny_golden, pairs, tmp_path):
    trainer, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, {0: 0.1, 2: 0.5, 4: 0.9, 6: 0.2, 8: 0.3})
    loaded = SentenceTransformer(str(callback.best.path), device="cpu")
    assert (embeddings(loaded, tiny_golden) - embeddings(trainer.model, tiny_golden)).abs().max() < 1e-6


def test_nothing_beats_the_base(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    scores = {0: 0.99, 2: 0.5, 4: 0.4, 6: 0.3, 8: 0.2}
    before = embeddings(tiny_st(), tiny_golden)
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    callback = scripted(trainer, tiny_golden, scores, verbose=True)
    trainer.train()
    assert (callback.best.step, callback.improved, trainer.state.best_metric) == (0, False, 0.99)
    assert trainer.state.best_global_step == 0
    assert trainer.state.best_model_checkpoint.endswith("step-0")
    assert (embeddings(trainer.model, tiny_golden) - before).abs().max() < 1e-6
    assert "Nothing beat the base model" in capsys.readouterr().out


def test_all_evaluations_failed(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    model = tiny_st()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(math.nan)
    trainer = make_trainer(model, pairs, tmp_path, max_steps=4)
    callback = RetrievalCallback(tiny_golden, every=2).attach(trainer)
    trainer.train()
    assert [line.status for line in callback.history] == ["failed"] * 3
    assert all(line.score is None and "NaN" in line.error for line in callback.history)
    assert callback.best is None
    state = trainer.state
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (None, None, None)
    assert not [row for row in state.log_history if "eval_recall@1" in row]
    assert "No evaluation succeeded" in caplog.text


def test_an_error_at_step_0_ends_the_run_before_anything_is_spent(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    scripted(trainer, tiny_golden, {0: ValueError("broken from the start")})
    with pytest.raises(ValueError, match="broken from the start"):
        trainer.train()


def test_a_failed_evaluation_is_one_error_line_and_training_goes_on(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    scores = {0: 0.1, 2: ValueError("out of luck"), 4: 0.5, 6: 0.4, 8: 0.3}
    trainer, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores)
    errors = [r for r in caplog.records if r.levelno == logging.ERROR and r.name.startswith("fullrank")]
    assert [r.getMessage() for r in errors] == [
        "evaluation at step 2 failed and is not a candidate: ValueError: out of luck"
    ]
    failed = callback.history[1]
    assert (failed.status, failed.score) == ("failed", None)
    assert "Traceback" in failed.error
    assert trainer.state.global_step == 8


def test_weights_that_were_changed_behind_our_back_are_refused(tiny_st, tiny_golden, pairs, tmp_path):
    model = tiny_st()
    trainer = make_trainer(model, pairs, tmp_path, max_steps=4)
    callback = scripted(trainer, tiny_golden, {0: 0.9, 2: 0.1, 4: 0.2})

    class Vandal(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                other = tiny_st()
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter.add_(0.1 * torch.randn_like(parameter))
                other.save_pretrained(str(callback.best.path))

    trainer.add_callback(Vandal())
    with pytest.raises(EvaluationError, match=r"are not those that scored 0\.9000 at step 0"):
        trainer.train()


def test_keep_best(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.7, 4: 0.5, 6: 0.9, 8: 0.2}
    _, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores, keep_best=2)
    assert sorted(p.name for p in (tmp_path / "fullrank" / "best").glob("step-*")) == ["step-2", "step-6"]
    assert callback.best.step == 6


def test_patience_counts_finished_evaluations(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.7, 4: ValueError("failed ones do not count"), 6: 0.6, 8: 0.5}
    trainer, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores, patience=1)
    assert trainer.state.global_step == 6
    assert callback.best.step == 2


def test_a_used_folder_is_moved_aside(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.7, 4: 0.5, 6: 0.4, 8: 0.2}
    scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores)
    old = (tmp_path / "fullrank" / "history.jsonl").read_bytes()
    _, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, {0: 0.1, 2: 0.2, 4: 0.5, 6: 0.4, 8: 0.2})
    assert (tmp_path / "fullrank.1" / "history.jsonl").read_bytes() == old
    assert (tmp_path / "fullrank.1" / "best" / "step-2").is_dir()
    assert callback.best.step == 4


# ------------------------------------------------------------------ beside the trainer's own machinery


def test_a_shadowed_adapter_is_refused(tiny_st, tiny_golden, pairs, tmp_path):
    model = tiny_st()
    model[0].auto_model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    trainer = make_trainer(model, pairs, tmp_path)
    with pytest.raises(SettingError, match=r"model\[0\] has two backbones.*model\[0\]\.model = get_peft_model"):
        RetrievalCallback(tiny_golden).attach(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 must be a whole number of steps from 1"),
        ({"select": "recall_at_1"}, "did you mean 'recall@1'"),
        ({"select": "dev/recall@1"}, "select names the golden set 'dev'; there are tiny"),
        ({"select": {"tiny/recall@1": -1.0}}, "weights must be positive"),
        ({"patience": 0}, "patience=0 must be a whole number from 1"),
        ({"keep_best": 0}, "keep_best=0 must be a whole number from 1"),
        ({"metrics": ["ndgc@10"]}, "did you mean 'ndcg@10'"),
    ],
)
def test_options_that_cannot_work(tiny_golden, options, message):
    with pytest.raises(SettingError, match=message):
        RetrievalCallback(tiny_golden, **options)


# ------------------------------------------------------------------ a plain Hugging Face trainer


@pytest.mark.parametrize("route", ["full", "lora"])
def test_a_plain_trainer_with_a_bi_encoder(tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path, route):
    backbone = tiny_bert if route == "full" else peft.get_peft_model(tiny_bert, peft.LoraConfig(**LORA))
    trainer = plain_trainer(backbone, tiny_tokenizer, pairs, tmp_path)
    encoder = Backbone(backbone, tiny_tokenizer, pooling="mean", max_length=32)
    callback = scripted(trainer, tiny_golden, {0: 0.1, 2: 0.9, 4: 0.2, 6: 0.3}, encoder=encoder)
    weights = Weights()
    trainer.add_callback(weights)
    trainer.train()
    assert [line.step for line in callback.history] == [0, 2, 4, 6]
    assert callback.best.step == 2
    assert equal_weights(trainer.model, weights.at[2])
    losses = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["in_batch_candidates"] for row in losses] == [16.0] * 6
    assert all(0 < row["in_batch_mrr"] <= 1 for row in losses)


def test_a_plain_trainer_on_a_peft_model(tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path):
    model = peft.get_peft_model(tiny_bert, peft.LoraConfig(**LORA))

    def loss(outputs, labels, num_items_in_batch=None):
        return outputs.last_hidden_state.square().mean()

    rows = [
        dict(tiny_tokenizer(text, padding="max_length", max_length=16, truncation=True), labels=0)
        for text in pairs["positive"]
    ]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
        compute_loss_func=loss,
        processing_class=tiny_tokenizer,
    )
    callback = scripted(trainer, tiny_golden, {0: 0.1, 2: 0.9, 4: 0.2}, encoder=Backbone(model, tiny_tokenizer))
    trainer.train()
    assert callback.best.step == 2
    assert (callback.best.path / "adapter_model.safetensors").is_file()
    assert not (callback.best.path / "model.safetensors").exists()


def test_without_a_way_to_encode_the_error_says_how(tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path):
    trainer = plain_trainer(tiny_bert, tiny_tokenizer, pairs, tmp_path)
    RetrievalCallback(tiny_golden).attach(trainer)
    with pytest.raises(SettingError, match=r"cannot encode with a BiEncoder.*Backbone\(model, tokenizer"):
        trainer.train()


def test_training_twice_begins_anew(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=2)
    callback = RetrievalCallback(tiny_golden, every=1).attach(trainer)
    trainer.train()
    first = callback.history[-1].metrics if callback.best.step == 2 else callback.history[callback.best.step].metrics
    trainer.train()
    assert [line.step for line in callback.history] == [0, 1, 2]
    assert callback.history[0].metrics == first  # the restored best is the base model of the second run
    assert (tmp_path / "fullrank.1" / "history.jsonl").is_file()


def test_a_full_disk_does_not_end_the_training(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=4)
    callback = scripted(trainer, tiny_golden, {0: 0.5, 2: 0.4, 4: 0.3})

    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                (tmp_path / "fullrank" / "step-2.json").mkdir()  # nothing can be written there any more

    trainer.add_callback(Fill())
    trainer.train()
    assert trainer.state.global_step == 4
    assert callback.best.step == 0
    assert "the evaluation of step 2 could not be written" in caplog.text
