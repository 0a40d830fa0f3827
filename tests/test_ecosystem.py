"""Beside the trainer's own machinery: early stopping, best model, rotation, schedulers, cards, trackers, the hub."""

import copy
import json
import math
import pickle

import peft
import pytest
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from fullrank import Backbone, GoldenSet, RetrievalCallback
from fullrank._errors import SettingError
from training import LORA, BiEncoder, Weights, equal_weights, make_trainer, plain_trainer, scripted, scripted_run

BY_RECALL = {
    "evaluated": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "eval_recall@1",
}


@pytest.mark.parametrize("first", [True, False])
def test_early_stopping_and_best_model_see_our_metric(tiny_st, tiny_golden, pairs, tmp_path, first):
    scores = {0: 0.1, 2: 0.7, 4: 0.6, 6: 0.5, 8: 0.4}
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = make_trainer(
        tiny_st(),
        pairs,
        tmp_path,
        evaluated=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="eval_recall@1",
        load_best_model_at_end=True,
        callbacks=[stopping] if first else None,
    )
    callback = scripted(trainer, tiny_golden, scores)
    if not first:
        trainer.add_callback(stopping)
    trainer.train()
    assert trainer.state.global_step == 4
    assert (tmp_path / "checkpoint-2").is_dir()
    assert (callback.best.step, trainer.state.best_metric) == (2, 0.7)
    assert trainer.state.best_model_checkpoint.endswith("best/step-2")


def test_arguments_that_turn_the_metric_upside_down_are_refused(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(
        tiny_st(), pairs, tmp_path, metric_for_best_model="recall@1", greater_is_better=False, max_steps=1
    )
    RetrievalCallback(tiny_golden).attach(trainer)
    with pytest.raises(SettingError, match="greater_is_better=False would keep the worst"):
        trainer.train()


def test_foreign_checkpoints_are_left_alone(tiny_st, tiny_golden, pairs, tmp_path):
    foreign = tmp_path / "checkpoint-500"
    foreign.mkdir()
    (foreign / "weights").write_text("of an old run")
    scores = {0: 0.1, 2: 0.7, 4: 0.9, 6: 0.4, 8: 0.2}
    _, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores, save_strategy="steps", save_steps=4)
    assert (foreign / "weights").read_text() == "of an old run"
    assert callback.best.step == 4


def test_through_callbacks_it_still_chooses_keeps_and_restores(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = RetrievalCallback(tiny_golden, every=2)
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=[callback], max_steps=4)
    trainer.train()
    assert [line.step for line in callback.history] == [0, 2, 4]
    assert callback.best.path.is_dir()
    assert [row["step"] for row in trainer.state.log_history if "eval_recall@1" in row] == [0, 2, 4]
    (events,) = (tmp_path / "fullrank").rglob("events.out.tfevents.*")
    seen = EventAccumulator(str(events)).Reload()
    assert [event.step for event in seen.Scalars("eval/recall@1")] == [0, 2, 4]
    assert sum("cannot reach the trackers" in r.getMessage() for r in caplog.records) == 1


def test_the_objective_itself_can_be_the_metric_for_the_best_model(tiny_st, tiny_golden, pairs, tmp_path):
    faq = GoldenSet(tiny_golden.queries, tiny_golden.corpus, tiny_golden.qrels, name="faq")
    trainer = make_trainer(
        tiny_st(),
        pairs,
        tmp_path,
        evaluated=True,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="eval_objective",
    )
    select = {"tiny/recall@1": 0.75, "faq/ndcg@10": 0.25}
    callback = RetrievalCallback([tiny_golden, faq], select=select).attach(trainer)
    trainer.train()
    assert [line.step for line in callback.history] == [0, 2, 4]
    assert trainer.state.best_metric == callback.best.score


def test_first_in_the_list_of_callbacks_early_stopping_works_as_well(tiny_st, tiny_golden, pairs, tmp_path):
    callback = RetrievalCallback(tiny_golden, every=2)
    trainer = make_trainer(
        tiny_st(),
        pairs,
        tmp_path,
        callbacks=[callback, EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1.0)],
        save_strategy="best",
        load_best_model_at_end=True,
        **BY_RECALL,
    )
    trainer.train()
    assert trainer.state.global_step == 4  # nothing rises by more than a whole
    assert [line.step for line in callback.history] == [0, 2, 4]


def test_a_failed_evaluation_is_no_best_for_the_trainer_either(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.3, 4: ValueError("broken"), 6: 0.2, 8: 0.1}
    trainer, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores, save_strategy="best", **BY_RECALL)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert [row["step"] for row in trainer.state.log_history if "eval_recall@1" in row] == [0, 2, 6, 8]
    assert all(math.isfinite(v) for row in trainer.state.log_history for v in row.values() if isinstance(v, float))
    assert callback.best.step == 2


def test_rotation_leaves_the_trainers_best_and_ours(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.3, 4: 0.9, 6: 0.2, 8: 0.1}
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores, **options, **BY_RECALL)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert (callback.best.step, callback.best.path.is_dir()) == (4, True)
    assert trainer.state.best_metric == 0.9


@pytest.mark.parametrize("route", ["full", "get_peft_model", "add_adapter"])
@pytest.mark.parametrize("metric", ["loss", "recall@1"])
def test_load_best_model_at_end_beside_us(tiny_st, tiny_golden, pairs, tmp_path, route, metric):
    model = tiny_st()
    if route == "get_peft_model":
        model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    elif route == "add_adapter":
        model.add_adapter(peft.LoraConfig(**LORA))
    options = BY_RECALL | {"metric_for_best_model": metric, "greater_is_better": metric != "loss"}
    trainer = make_trainer(
        model, pairs, tmp_path, save_strategy="steps", save_steps=2, load_best_model_at_end=True, **options
    )
    callback, weights = scripted(trainer, tiny_golden, {0: 0.1, 2: 0.3, 4: 0.9, 6: 0.2, 8: 0.1}), Weights()
    trainer.add_callback(weights)
    trainer.train()
    assert equal_weights(trainer.model, weights.at[4])
    assert (callback.best.step, trainer.state.best_global_step, trainer.state.best_metric) == (4, 4, 0.9)


@pytest.mark.parametrize("route", ["full", "lora"])
def test_load_best_model_at_end_beside_us_in_a_plain_trainer(
    tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path, route
):
    backbone = tiny_bert if route == "full" else peft.get_peft_model(tiny_bert, peft.LoraConfig(**LORA))
    options = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    trainer = plain_trainer(backbone, tiny_tokenizer, pairs, tmp_path, **BY_RECALL, **options)
    encoder = Backbone(backbone, tiny_tokenizer)
    callback = scripted(trainer, tiny_golden, {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.2}, encoder=encoder)
    weights = Weights()
    trainer.add_callback(weights)
    trainer.train()
    assert callback.best.step == 2
    assert equal_weights(trainer.model, weights.at[2])


def test_reduce_on_plateau_wants_the_direction(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.3, 4: 0.2, 6: 0.2, 8: 0.1}
    options = BY_RECALL | {"lr_scheduler_type": "reduce_lr_on_plateau"}
    with pytest.raises(SettingError, match=r"pass lr_scheduler_kwargs=\{'mode': 'max'\}"):
        scripted_run(tiny_st, tiny_golden, pairs, tmp_path / "a", scores, **options)
    trainer, _ = scripted_run(
        tiny_st,
        tiny_golden,
        pairs,
        tmp_path / "b",
        scores,
        lr_scheduler_kwargs={"mode": "max", "patience": 1, "factor": 0.5},
        **options,
    )
    rates = {row["step"]: row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row}
    assert rates[2] == rates[6] == 3e-3
    assert rates[8] == 1.5e-3  # after two evaluations that did not rise


def test_our_saves_push_nothing_to_the_hub(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=4)
    callback = scripted(trainer, tiny_golden, {0: 0.1, 2: 0.9, 4: 0.2})
    pushed = []
    trainer.push_to_hub = lambda *args, **options: pushed.append(options)
    trainer.train()
    trainer.args.push_to_hub = True
    trainer.save_model(str(tmp_path / "own"))
    assert len(pushed) == 1  # the user's own save does
    callback.link.save_model(tmp_path / "ours")
    assert len(pushed) == 1
    assert (tmp_path / "ours" / "modules.json").is_file()


def test_the_state_of_the_trainer_is_json_and_names_our_best(tiny_st, tiny_golden, pairs, tmp_path):
    scores = {0: 0.1, 2: 0.3, 4: 0.9, 6: 0.2, 8: 0.1}
    trainer, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores, save_strategy="steps", save_steps=4)
    for path in (tmp_path / "checkpoint-4" / "trainer_state.json", tmp_path / "checkpoint-8" / "trainer_state.json"):
        assert json.loads(path.read_text())["best_metric"] is None  # during the run it is the Trainer's own
    trainer.save_state()
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert (state["best_metric"], state["best_global_step"]) == (0.9, 4)
    assert state["best_model_checkpoint"] == str(callback.best.path)
    rows = [row for row in state["log_history"] if "eval_recall@1" in row]
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8]
    assert all(type(value) in (int, float) for row in rows for value in row.values())


class Recorder(TrainerCallback):
    """Notes every event with its step, and the rows that are logged."""

    def __init__(self):
        self.events, self.rows = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append((state.global_step, sorted(set(logs) - {"total_flos"})))  # the printer takes that away

    def __getattribute__(self, name):
        if name.startswith("on_") and name != "on_log":
            return lambda args, state, control, **kwargs: self.events.append((name, state.global_step))
        return super().__getattribute__(name)


def test_callbacks_before_and_after_see_the_events_of_a_run_without_us(tiny_st, tiny_golden, pairs, tmp_path):
    def run(out, ours):
        before, after = Recorder(), Recorder()
        trainer = make_trainer(
            tiny_st(),
            pairs,
            out,
            callbacks=[before],
            evaluated=True,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
        )
        if ours:
            RetrievalCallback(tiny_golden, every=1).attach(trainer)
        trainer.add_callback(after)
        trainer.train()
        return before, after

    before, after = run(tmp_path / "with", ours=True)
    plain_before, plain_after = run(tmp_path / "without", ours=False)
    before.events.remove(("on_init_end", 0))  # comes before a callback can be added
    plain_before.events.remove(("on_init_end", 0))
    assert before.events == after.events == plain_before.events == plain_after.events
    assert before.rows == after.rows
    theirs = [row for row in before.rows if "eval_recall@1" not in row[1]]
    in_batch = ("in_batch_acc", "in_batch_candidates", "in_batch_mrr")
    assert [(step, [n for n in names if n not in in_batch]) for step, names in theirs] == plain_before.rows
    assert [step for step, names in before.rows if "eval_recall@1" in names] == [0, 1, 2, 3, 4]


def test_sharded_training_is_refused_before_it_begins(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    trainer.args.fsdp = True  # as `fsdp=True` sets it; the Trainer takes that only where processes train together
    with pytest.raises(SettingError, match=r"FSDP spreads the weights over the processes.*Train with DDP"):
        RetrievalCallback(tiny_golden).attach(trainer)


class Holding:
    """An encoder of the user's own around some model."""

    similarity = "cosine"

    def __init__(self, backbone):
        self.backbone = backbone

    def encode_queries(self, texts):
        raise AssertionError("nothing is encoded with a model that is not the one in training")

    encode_documents = encode_queries


@pytest.mark.parametrize("kind", ["Backbone", "own"])
def test_an_encoder_of_another_model_is_refused_before_training(
    tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path, kind
):
    trainer = plain_trainer(tiny_bert, tiny_tokenizer, pairs, tmp_path)
    other = copy.deepcopy(tiny_bert)
    encoder = Backbone(other, tiny_tokenizer) if kind == "Backbone" else Holding(other)
    RetrievalCallback(tiny_golden, encoder=encoder).attach(trainer)
    (tmp_path / "fullrank").mkdir()
    with pytest.raises(SettingError, match="does not share a single parameter with the BiEncoder in training"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["fullrank"]  # refused before anything was moved


def test_a_model_that_is_made_anew_when_training_begins_is_refused(
    tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path
):
    plain = plain_trainer(tiny_bert, tiny_tokenizer, pairs, tmp_path)
    trainer = Trainer(
        model_init=lambda: BiEncoder(copy.deepcopy(tiny_bert)),
        args=plain.args,
        train_dataset=plain.train_dataset,
        data_collator=plain.data_collator,
    )
    encoder = Backbone(trainer.model.backbone, tiny_tokenizer)
    RetrievalCallback(tiny_golden, encoder=encoder).attach(trainer)
    with pytest.raises(SettingError, match=r"model_init=...\), which makes another model when training begins"):
        trainer.train()


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("faq/recall@1", "eval_faq_recall@1"), ("tiny_recall_at_01", "eval_tiny_recall@1"), ("dev/MRR@10", None)],
)
def test_a_near_miss_of_a_metric_is_told_at_the_start(tiny_st, tiny_golden, pairs, tmp_path, attached, name, meant):
    faq = GoldenSet(tiny_golden.queries, tiny_golden.corpus, tiny_golden.qrels, name="faq")
    callback = RetrievalCallback([tiny_golden, faq], select="faq/mrr@10")
    trainer = make_trainer(tiny_st(), pairs, tmp_path, metric_for_best_model=name, greater_is_better=True)
    if attached:
        callback.attach(trainer)
    else:
        trainer.add_callback(callback)
    with pytest.raises(SettingError, match=f"is logged as '{meant or 'eval_mrr@10'}'; write it so"):
        trainer.train()


def test_a_metric_that_nobody_computes_is_refused_at_the_start(tiny_st, tiny_golden, pairs, tmp_path):
    options = {"metric_for_best_model": "ndcg_at_5", "greater_is_better": True, "max_steps": 1}
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "a", **options)
    RetrievalCallback(tiny_golden).attach(trainer)
    with pytest.raises(SettingError, match=r"not computed; pass metrics=\[..., 'ndcg@5'\].*eval_recall@1"):
        trainer.train()
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "b", **options)
    trainer.compute_metrics = lambda prediction: {"ndcg_at_5": 0.5}
    RetrievalCallback(tiny_golden).attach(trainer)
    trainer.train()


def test_two_callbacks_in_the_list_are_refused(tiny_st, tiny_golden, pairs, tmp_path):
    both = [RetrievalCallback(tiny_golden), RetrievalCallback(tiny_golden, select="mrr@10")]
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=both)
    with pytest.raises(SettingError, match="the trainer has a RetrievalCallback already"):
        trainer.train()
    trainer.remove_callback(both[1])
    trainer.train()  # one alone goes on, also after the failure, and again
    trainer.train()


@pytest.mark.parametrize("thing", [None, "model"])
def test_what_is_no_trainer_is_refused(tiny_st, tiny_golden, thing):
    with pytest.raises(SettingError, match="attach needs a transformers Trainer or SentenceTransformerTrainer, got"):
        RetrievalCallback(tiny_golden).attach(tiny_st() if thing == "model" else None)


def seams(part):
    names = ("forward", "calculate_loss", "compute_loss_from_embeddings", "similarity_fct", "sim_matrix")
    return {name: vars(part)[name] for name in names if name in vars(part)}


def in_batch(trainer):
    return [line for line in trainer.state.log_history if "in_batch_acc" in line]


@pytest.mark.parametrize("kind", ["plain", "matryoshka 2d", "guided", "adapter"])
def test_after_training_model_loss_and_trainer_are_as_before(
    tiny_st, tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path, kind
):
    from sentence_transformers.sentence_transformer import losses

    if kind == "plain":
        trainer = plain_trainer(tiny_bert, tiny_tokenizer, pairs, tmp_path)
        encoder, touched = Backbone(trainer.model.backbone, tiny_tokenizer), list(trainer.model.modules())
    else:
        model = tiny_st()
        if kind == "adapter":
            model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
        trainer, encoder = make_trainer(model, pairs, tmp_path, max_steps=2), None
        if kind == "matryoshka 2d":
            inner = losses.MultipleNegativesRankingLoss(model)
            trainer.loss = losses.Matryoshka2dLoss(model, inner, [32, 16], n_layers_per_step=1)
        if kind == "guided":
            trainer.loss = losses.CachedGISTEmbedLoss(model, tiny_st(), mini_batch_size=4)
        touched = [part for part in trainer.loss.modules() if part not in set(model.modules())]
    before = [seams(part) for part in touched]
    own = set(vars(trainer))
    callback = RetrievalCallback(tiny_golden, every=4, encoder=encoder).attach(trainer)
    assert [seams(part) for part in touched] != before or any(part._forward_hooks for part in touched)
    trainer.train()
    seen = len(in_batch(trainer))
    assert seen
    assert [seams(part) for part in touched] == before
    assert not any(part._forward_hooks for part in touched)
    assert not {"log", "_load_from_checkpoint"} & (set(vars(trainer)) - own)
    if kind in ("plain", "adapter"):  # the others leave hooks of their own
        pickle.dumps(trainer.model)
        pickle.dumps(getattr(trainer, "loss", None))
    trainer.train()  # the same callback once more
    assert len(in_batch(trainer)) == seen
    assert callback.best is not None
    callback.attach(trainer)
    callback.attach(trainer)
    trainer.train()
    assert len(in_batch(trainer)) == seen
    assert not {"log", "_load_from_checkpoint"} & (set(vars(trainer)) - own)
