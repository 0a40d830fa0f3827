"""Score and weights belong together on the less usual routes: what an independent review broke, held."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import training
from fullrank import Backbone, RetrievalCallback, evaluate
from fullrank._errors import DataError, EvaluationError, SettingError
from fullrank.weights import load_weights
from training import LORA, Weights, equal_weights, scripted

peft = pytest.importorskip("peft")
make_trainer = partial(training.make_trainer, max_steps=6, learning_rate=1e-2)


def peak(step):
    """Scores that make one step the best, whatever the model does: what is kept must be that step's weights."""
    return defaultdict(lambda: 0.1, {step: 0.9})


def run_to_peak(trainer, golden, *, step=2, **options):
    callback = scripted(trainer, golden, peak(step), **options)
    weights = Weights()
    trainer.add_callback(weights)
    trainer.train()
    assert callback.best.step == step
    assert equal_weights(trainer.model, weights.at[step])
    assert not equal_weights(trainer.model, weights.at[trainer.state.global_step])
    return callback


class Named(SentenceTransformer):
    """A subclass whose constructor takes other arguments than its parent's."""

    def __init__(self, modules):
        super().__init__(modules=list(modules), device="cpu")


class Scale(nn.Module):
    """A module of the user's own, which nothing but this file can import."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, features):
        features["sentence_embedding"] = features["sentence_embedding"] * self.weight
        return features

    def save(self, path, **options):
        from safetensors.torch import save_file

        save_file({"weight": self.weight.detach().clone()}, f"{path}/model.safetensors")


@pytest.mark.parametrize("kind", ["subclass", "own module", "dense"])
def test_models_that_cannot_be_rebuilt_from_their_folder_are_restored(tiny_st, tiny_golden, pairs, tmp_path, kind):
    from sentence_transformers.sentence_transformer.modules import Dense

    if kind == "subclass":
        model = Named(tiny_st().children())
    else:
        torch.manual_seed(0)
        model = tiny_st(extra=[Scale() if kind == "own module" else Dense(32, 16)])
    run_to_peak(make_trainer(model, pairs, tmp_path), tiny_golden)


def test_peft_around_the_whole_model_is_restored(tiny_st, tiny_golden, pairs, tmp_path):
    model = peft.get_peft_model(tiny_st(), peft.LoraConfig(**LORA))
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    trainer.model = trainer.model_wrapped = model
    trainer.callback_handler.model = model
    trainer.loss = MultipleNegativesRankingLoss(model.base_model.model)
    callback = run_to_peak(trainer, tiny_golden, encoder=model)
    assert (callback.best.path / "adapter_model.safetensors").is_file()


def test_two_adapters_on_one_module_are_restored(tiny_st, tiny_golden, pairs, tmp_path):
    model = tiny_st()
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    model[0].model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["key"]))
    run_to_peak(make_trainer(model, pairs, tmp_path), tiny_golden)


def test_tensors_beside_an_adapter_are_restored_and_the_folder_says_so(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    model = tiny_st()
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name:
            parameter.requires_grad_(True)
    run_to_peak(make_trainer(model, pairs, tmp_path), tiny_golden)
    assert "train beside the adapter" in caplog.text


def test_a_pretrained_model_with_a_constructor_of_its_own(tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path):
    class Bi(PreTrainedModel):
        config_class = type(tiny_bert.config)
        _supports_sdpa = True

        def __init__(self, config, backbone):
            super().__init__(config)
            self.backbone = backbone

        def forward(self, input_ids, attention_mask, labels=None):
            rows = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
            rows = nn.functional.normalize(rows, dim=1)
            return {"loss": nn.functional.cross_entropy(20 * rows @ rows.flip(0).T, labels)}

    model = Bi(tiny_bert.config, tiny_bert)
    texts = tiny_tokenizer(pairs["positive"], padding=True, truncation=True, max_length=16)
    rows = [{**{k: texts[k][i] for k in ("input_ids", "attention_mask")}, "labels": i % 8} for i in range(24)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=6,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
        processing_class=tiny_tokenizer,
    )
    run_to_peak(trainer, tiny_golden, encoder=Backbone(model.backbone, tiny_tokenizer))


def test_an_encoder_of_the_users_own_runs_in_eval_mode_and_leaves_the_mode_alone(tiny_st, tiny_golden, pairs, tmp_path):
    model = tiny_st()
    seen = []

    class Own:
        similarity = "cosine"

        def encode_queries(self, texts):
            seen.append(model.training)
            return model(model.preprocess(texts))["sentence_embedding"]

        encode_documents = encode_queries

    modes = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            modes.append(model[0].model.encoder.training)

    trainer = make_trainer(model, pairs, tmp_path)
    RetrievalCallback(tiny_golden, every=1, encoder=Own()).attach(trainer)
    trainer.add_callback(Watch())
    trainer.train()
    assert not any(seen)
    assert all(modes)


def test_two_callbacks_on_one_trainer_are_refused(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    RetrievalCallback(tiny_golden).attach(trainer)
    with pytest.raises(SettingError, match="has a RetrievalCallback already"):
        RetrievalCallback(tiny_golden).attach(trainer)


def test_training_twice_through_callbacks(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=[RetrievalCallback(tiny_golden, every=3)])
    trainer.train()
    trainer.train()
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == 2


def test_after_training_the_trainers_own_evaluation_gets_no_stale_value(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, metric_for_best_model="ndcg@10", eval_strategy="no")
    trainer.eval_dataset = Dataset.from_dict(pairs)
    RetrievalCallback(tiny_golden, every=3).attach(trainer)
    trainer.train()
    assert "eval_ndcg@10" not in trainer.evaluate(Dataset.from_dict(pairs))


def test_a_metric_name_that_is_spelled_otherwise_is_refused_with_the_right_one(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, metric_for_best_model="recall_at_1")
    RetrievalCallback(tiny_golden).attach(trainer)
    with pytest.raises(SettingError, match="is logged as 'eval_recall@1'"):
        trainer.train()


def test_foreign_checkpoints_beside_a_limit_are_announced(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    (tmp_path / "checkpoint-500").mkdir(parents=True)
    trainer = make_trainer(tiny_st(), pairs, tmp_path, save_total_limit=1)
    RetrievalCallback(tiny_golden, every=6).attach(trainer)
    trainer.train()
    assert "1 checkpoints of another run" in caplog.text


def test_static_embeddings_can_be_evaluated_and_stored(tiny_tokenizer, tiny_golden, tmp_path):
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    model = SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer, embedding_dim=16)], device="cpu")
    result = evaluate(model, tiny_golden)
    assert json.loads(result.save(tmp_path / "r.json").read_text())["provenance"]["max_length"] is None


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_score_is_that_of_the_stored_folder_also_in_bf16_training(tiny_st, tiny_golden, pairs, tmp_path, dtype):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, bf16=dtype == "bf16")
    callback = RetrievalCallback(tiny_golden, every=2, keep_best=4).attach(trainer)
    trainer.train()
    for stored in callback._session.keeper.store.stored:
        fresh = SentenceTransformer(str(stored.path), device="cpu")
        again = evaluate(fresh, tiny_golden, precision="bf16" if dtype == "bf16" else None)
        line = next(line for line in callback.history if line.step == stored.step)
        assert again.metrics == line.metrics


@pytest.mark.parametrize(
    "options",
    [
        {"patience": "3"},
        {"patience": 1.5},
        {"keep_best": "2"},
        {"keep_best": None},
        {"select": None},
        {"select": ["recall@1"]},
        {"select": {"recall@1": float("inf")}},
        {"select": {"recall@1": "x"}},
        {"ties": "foo"},
        {"precision": "foo"},
        {"encoder": 3},
        {"min_delta": -1},
        {"min_delta": float("nan")},
        {"batch_tokens": -5},
        {"metrics": []},
        {"metrics": "recall@1"},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_one_clear_error(tiny_golden, options):
    with pytest.raises(SettingError):
        RetrievalCallback(tiny_golden, **options)


@pytest.mark.parametrize("golden", [None, {}, [], "folder", [1]])
def test_what_is_no_golden_set_is_refused(golden, tiny_st):
    with pytest.raises(SettingError, match="golden must be a GoldenSet"):
        RetrievalCallback(golden)
    with pytest.raises(DataError, match="golden must be a GoldenSet"):
        evaluate(tiny_st(), golden)


def test_a_single_weight_does_not_change_the_number(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=1)
    callback = RetrievalCallback(tiny_golden, select={"recall@5": 2.0}).attach(trainer)
    trainer.train()
    assert all(line.score == line.metrics["recall@5"] for line in callback.history)


def test_a_checkpoint_without_what_trains_beside_the_adapter_is_refused(tiny_st, tiny_golden, pairs, tmp_path):
    from fullrank._errors import EvaluationError
    from fullrank.weights import load_weights

    model = tiny_st()
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    model.save_pretrained(str(tmp_path))
    load_weights(model, tmp_path)  # the adapter alone: all there is
    next(p for name, p in model.named_parameters() if "LayerNorm" in name).requires_grad_(True)
    with pytest.raises(EvaluationError, match="does not hold what trains beside the adapter"):
        load_weights(model, tmp_path)


def test_the_active_adapter_need_not_be_the_default_one(tiny_st, tiny_golden, pairs, tmp_path):
    model = tiny_st()
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    model[0].model.add_adapter("aaa", peft.LoraConfig(**LORA))
    model[0].model.set_adapter("aaa")
    run_to_peak(make_trainer(model, pairs, tmp_path), tiny_golden)


def test_modules_to_save_through_add_adapter(tiny_st, tiny_golden, pairs, tmp_path):
    model = tiny_st()
    model.add_adapter(peft.LoraConfig(modules_to_save=["LayerNorm"], **LORA))
    run_to_peak(make_trainer(model, pairs, tmp_path), tiny_golden)


def test_two_adapted_towers_keep_their_own_adapters(tiny_st, tiny_golden, pairs, tmp_path):
    from sentence_transformers.sentence_transformer.modules import Router

    towers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tower = tiny_st()
        tower[0].model = peft.get_peft_model(tower[0].model, peft.LoraConfig(**LORA))
        towers.append(list(tower.children()))
    model = SentenceTransformer(modules=[Router.for_query_document(*towers)], device="cpu")
    mapping = {"anchor": "query", "positive": "document"}
    run_to_peak(make_trainer(model, pairs, tmp_path, router_mapping=mapping), tiny_golden)


@pytest.mark.parametrize("route", ["get_peft_model", "add_adapter"])
def test_dora_is_restored(tiny_st, tiny_golden, pairs, tmp_path, route):
    model, config = tiny_st(), peft.LoraConfig(use_dora=True, **LORA)
    if route == "add_adapter":
        model.add_adapter(config)
    else:
        model[0].model = peft.get_peft_model(model[0].model, config)
    run_to_peak(make_trainer(model, pairs, tmp_path), tiny_golden)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path

from sentence_transformers import SentenceTransformer
from training import make_trainer, scripted
from transformers import TrainerCallback

from fullrank import load_golden

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the first byte too many ends the process
folder, adapter = Path(sys.argv[1]), sys.argv[2] == "lora"
golden = load_golden(folder / "data")
model = SentenceTransformer(str(folder / "model"), device="cpu")
if adapter:
    import peft
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(r=4, target_modules=["query", "value"]))
pairs = {"anchor": [" ".join(t.split()[:4]) for t in golden.doc_texts[:24]], "positive": golden.doc_texts[:24]}
trainer = make_trainer(model, pairs, folder / "run", max_steps=6)
callback = scripted(trainer, golden, {0: 0.1, 2: 0.5, 4: 0.9, 6: 0.7})


class Fill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        room = 2_000 if state.global_step == 3 else resource.RLIM_INFINITY  # bytes that a file may have
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


trainer.callback_handler.callbacks.insert(0, Fill())
trainer.train()
print("END", trainer.state.global_step, callback.best.step, callback.best.score, [h.step for h in callback.history])
"""


@pytest.mark.parametrize("route", ["full", "lora"])
def test_a_disk_that_is_full_leaves_the_best_so_far_and_training_goes_on(tiny_st, tiny_golden, tmp_path, route):
    """A real limit on the size of files, in a process of its own; what does not fit at step 4 fits again at step 6."""
    tiny_st().save_pretrained(str(tmp_path / "model"))
    training.write_beir(tiny_golden, tmp_path / "data")
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), route],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "END 6 6 0.7 [0, 2, 4, 6]"
    assert "the weights of step 4 could not be stored (" in run.stderr
    assert "); the best so far stays" in run.stderr
    assert sorted(p.name for p in (tmp_path / "run" / "fullrank" / "best").iterdir()) == ["manifest.json", "step-6"]


class Damage(TrainerCallback):
    """Does something to the folder of step 2 after it was stored."""

    def __init__(self, harm):
        self.harm = harm

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            (folder,) = Path(args.output_dir).glob("fullrank/best/step-2")
            self.harm(folder)


def other_values(folder):
    path = folder / "adapter_model.safetensors"
    save_file({name: value * 5 + 1 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def other_alpha(folder):
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 16', '"lora_alpha": 17'))


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (other_values, "adapter_model.safetensors does not hold the adapter that was scored"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (other_alpha, "adapter_config.json' changed or gone"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json' changed or gone"),
        (lambda folder: (folder / "modules.json").unlink(), "modules.json"),
    ],
)
@pytest.mark.parametrize("route", ["get_peft_model", "add_adapter"])
def test_what_is_verified_is_the_folder_that_others_load(tiny_st, tiny_golden, pairs, tmp_path, route, harm, text):
    model = adapted(tiny_st(), route)
    trainer = make_trainer(model, pairs, tmp_path)
    scripted(trainer, tiny_golden, peak(2))
    trainer.add_callback(Damage(harm))
    with pytest.raises(EvaluationError, match=text):
        trainer.train()


def test_the_files_of_a_whole_model_are_verified_too(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    scripted(trainer, tiny_golden, peak(2))
    trainer.add_callback(Damage(lambda folder: (folder / "tokenizer.json").write_text("{}")))
    with pytest.raises(EvaluationError, match=r"tokenizer.json' changed or gone. Do not use this folder"):
        trainer.train()


def adapted(model, route, name="default", **options):
    config = peft.LoraConfig(**{**LORA, **options})
    if route == "add_adapter":
        model.add_adapter(config, name)
    else:
        model[0].model = peft.get_peft_model(model[0].model, config, adapter_name=name)
    return model


@pytest.mark.parametrize("route", ["get_peft_model", "add_adapter"])
def test_dora_says_at_step_0_how_to_load_it(tiny_st, tiny_golden, pairs, tmp_path, route, caplog):
    callback = run_to_peak(make_trainer(adapted(tiny_st(), route, use_dora=True), pairs, tmp_path), tiny_golden)
    assert caplog.text.count("loses the magnitudes of DoRA adapters") == 1
    assert "Load them with fullrank.weights.load_weights(model, folder)" in caplog.text
    fresh = adapted(tiny_st(), route, use_dora=True)
    load_weights(fresh, str(callback.best.path))
    assert evaluate(fresh, tiny_golden).hits == evaluate(callback._session.model, tiny_golden).hits


@pytest.mark.parametrize("route", ["get_peft_model", "add_adapter"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("default", {"bias": "all"}), ("default", {"modules_to_save": ["pooler"]}), ("mine", {})],
    ids=["biases", "whole modules", "another name"],
)
def test_other_loaders_read_the_adapter_folder(tiny_st, tiny_golden, pairs, tmp_path, route, name, options, caplog):
    trainer = make_trainer(adapted(tiny_st(), route, name, **options), pairs, tmp_path)
    callback = run_to_peak(trainer, tiny_golden)
    assert "another loader" not in caplog.text
    fresh = SentenceTransformer(str(callback.best.path), device="cpu")
    assert evaluate(fresh, tiny_golden).hits == evaluate(trainer.model, tiny_golden).hits


def test_an_active_adapter_beside_the_default_one_says_how_to_load_it(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    model = adapted(tiny_st(), "get_peft_model")
    model[0].model.add_adapter("other", peft.LoraConfig(**LORA))
    model[0].model.set_adapter("other")
    run_to_peak(make_trainer(model, pairs, tmp_path), tiny_golden)
    assert "the active adapters are 'other', and loaders take 'default' alone" in caplog.text


class Tied(training.BiEncoder):
    """Two names for one tensor, which safetensors refuses to write."""

    def __init__(self, backbone):
        super().__init__(backbone)
        words = backbone.embeddings.word_embeddings
        self.head = nn.Linear(words.embedding_dim, words.num_embeddings, bias=False)
        self.head.weight = words.weight


def test_tied_weights_that_the_trainer_cannot_write_are_stored(tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path):
    trainer = training.plain_trainer(tiny_bert, tiny_tokenizer, pairs, tmp_path)
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = Tied(tiny_bert)
    run_to_peak(trainer, tiny_golden, encoder=Backbone(tiny_bert, tiny_tokenizer))
    assert trainer.model.head.weight is tiny_bert.embeddings.word_embeddings.weight


class Scaled(MultipleNegativesRankingLoss):
    def __init__(self, model):
        super().__init__(model)
        self.slope = nn.Parameter(torch.tensor(1.0))

    def forward(self, features, labels=None):
        return super().forward(features, labels) * self.slope


def test_a_user_loads_a_folder_without_the_loss(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    trainer.loss = Scaled(trainer.model)
    callback = run_to_peak(trainer, tiny_golden)
    assert (callback.best.path / "extra.safetensors").is_file()
    fresh = tiny_st()
    load_weights(fresh, str(callback.best.path))
    assert equal_weights(fresh, trainer.model.state_dict())
    loss = Scaled(fresh)
    load_weights(fresh, callback.best.path, loss=loss)
    assert loss.slope != 1.0


class Unfreeze(TrainerCallback):
    """Freezes the norms when training begins (the optimizer has them), and lets them train from a step on."""

    def __init__(self, step, event):
        self.step, self.event = step, event

    def switch(self, model, *, on):
        for name, parameter in model.named_parameters():
            if "LayerNorm" in name:
                parameter.requires_grad_(on)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.switch(model, on=False)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.event == "begin" and state.global_step == self.step:
            self.switch(model, on=True)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.event == "end" and state.global_step == self.step:
            self.switch(model, on=True)


@pytest.mark.parametrize("event", ["begin", "end"])
@pytest.mark.parametrize("best", [0, 2, 4])
def test_a_best_of_before_an_unfreezing_is_restored(tiny_st, tiny_golden, pairs, tmp_path, event, best):
    model = adapted(tiny_st(), "get_peft_model")
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name:
            parameter.requires_grad_(True)
    trainer = make_trainer(model, pairs, tmp_path)
    trainer.callback_handler.callbacks.insert(0, Unfreeze(3, event))
    callback = scripted(trainer, tiny_golden, peak(best))
    start = training.state_of(model)
    weights = Weights()
    trainer.add_callback(weights)
    trainer.train()
    assert callback.best.step == best
    weights.at[0] = start
    norm = next(name for name in start if "LayerNorm" in name)
    assert torch.equal(weights.at[2][norm], start[norm])
    assert not torch.equal(weights.at[6][norm], start[norm])
    assert equal_weights(model, weights.at[best])
