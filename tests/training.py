"""What several test files train with: a small run of a real trainer, and scores that the test chose."""

import json

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from fullrank import RetrievalCallback
from fullrank.encode import pool

LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["query", "value"]}
DEFAULTS = {
    "max_steps": 8,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 3,
}


def arguments(out, **options):
    return SentenceTransformerTrainingArguments(output_dir=str(out), **{**DEFAULTS, **options})


def make_trainer(model, pairs, out, *, callbacks=None, evaluated=False, **options):
    """Returns a trainer of 8 steps; ``evaluated``: with an evaluation dataset of its own."""
    return SentenceTransformerTrainer(
        model=model,
        args=arguments(out, **options),
        train_dataset=Dataset.from_dict(pairs),
        eval_dataset=Dataset.from_dict(pairs) if evaluated else None,
        loss=MultipleNegativesRankingLoss(model if isinstance(model, SentenceTransformer) else model.base_model.model),
        callbacks=callbacks,
    )


class Scripted(TrainerCallback):
    """Replaces what a callback's plans give at each step by a score that the test chose, or by an exception."""

    def __init__(self, callback, scores):
        self.scores, self.callback = scores, callback

    def on_train_begin(self, args, state, control, **kwargs):
        for plan in self.callback._session.plans.values():
            real = plan.run

            def run(*, real=real, **options):
                result = real(**options)
                score = self.scores[self.callback._session.step]
                if isinstance(score, Exception):
                    raise score
                result.metrics["recall@1"] = score
                return result

            plan.run = run


def scripted(trainer, golden, scores, *, every=2, **options):
    """Attaches a callback whose scores are those given, and returns it."""
    callback = RetrievalCallback(golden, every=every, **options).attach(trainer)
    trainer.callback_handler.callbacks.insert(1, Scripted(callback, scores))
    return callback


def scripted_run(tiny_st, golden, pairs, out, scores, **options):
    """Returns trainer and callback after a run with the scores given."""
    own = {name: options.pop(name) for name in ("patience", "keep_best", "confirm") if name in options}
    trainer = make_trainer(tiny_st(), pairs, out, **options)
    callback = scripted(trainer, golden, scores, **own)
    trainer.train()
    return trainer, callback


class Crash(TrainerCallback):
    """Ends a run before the step after ``step``, as a lost machine does."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def crash(trainer):
    """Trains until the crash."""
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal_weights(model, state):
    live = model.state_dict()
    return all(torch.equal(live[name], value) for name, value in state.items())


class Weights(TrainerCallback):
    """Keeps the weights of every step."""

    def __init__(self):
        self.at = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = state_of(model)


class BiEncoder(nn.Module):
    """A backbone with mean pooling; its forward gives the InfoNCE loss and the scores [B, B * (1 + K)]."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def embed(self, ids, mask):
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        return nn.functional.normalize(pool(hidden, mask, "mean"), dim=1)

    def forward(self, query_ids, query_mask, doc_ids, doc_mask, labels=None):
        scores = self.embed(query_ids, query_mask) @ self.embed(doc_ids, doc_mask).T
        return {"loss": nn.functional.cross_entropy(20 * scores, labels), "scores": scores}


def plain_trainer(backbone, tokenizer, pairs, out, *, n_negs=1, evaluated=False, **options):
    """Returns a Trainer of 6 steps of a `BiEncoder` around ``backbone``, with hard negatives."""

    def collate(rows):
        queries = tokenizer([row["anchor"] for row in rows], return_tensors="pt", padding=True, truncation=True)
        texts = []
        for i, row in enumerate(rows):
            texts += [row["positive"], *(rows[(i + 1 + j) % len(rows)]["anchor"] for j in range(n_negs))]
        documents = tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        return {
            "query_ids": queries["input_ids"],
            "query_mask": queries["attention_mask"],
            "doc_ids": documents["input_ids"],
            "doc_mask": documents["attention_mask"],
            "labels": torch.arange(len(rows)) * (1 + n_negs),
        }

    rows = [{"anchor": a, "positive": p} for a, p in zip(pairs["anchor"], pairs["positive"], strict=True)]
    options = {**DEFAULTS, "max_steps": 6, "remove_unused_columns": False, **options}
    return Trainer(
        model=BiEncoder(backbone),
        args=TrainingArguments(output_dir=str(out), **options),
        train_dataset=rows,
        eval_dataset=rows[:8] if evaluated else None,
        data_collator=collate,
        processing_class=tokenizer,
    )


def write_beir(golden, folder):
    """Writes a golden set as a BEIR folder."""
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("queries", golden.queries), ("corpus", golden.corpus)):
        text = "".join(json.dumps({"_id": key, "title": "", "text": value}) + "\n" for key, value in rows.items())
        (folder / f"{name}.jsonl").write_text(text)
    rows = [f"{q}\t{d}\t{grade}" for q, grades in golden.qrels.items() for d, grade in grades.items()]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
