"""LoRA fine-tuning of a SentenceTransformer; the checkpoint that retrieves best is kept, restored and verified.

    python recipes/lora_sentence_transformers.py --tiny
    python recipes/lora_sentence_transformers.py --model BAAI/bge-base-en-v1.5 --data beir/mine --train hard.jsonl

--data is a golden set (BEIR folder, golden .jsonl, hf:...) whose --split is held out; --train is JSONL, CSV, parquet or
hf: with query, positive and hard negatives, for example what mine_hard_negatives.py wrote. Without them the task is
code search over Python's own standard library, and without --model the model is the packaged all-MiniLM-L6-v2.

To begin with on one 24 GB GPU (not measured here):
    --batch 1024 --mini_batch 64 --negatives 3 --bf16 --max_tokens 256 --epochs 1 --rate 1e-4 --patience 3

A run that was cut off goes on with the same command and --resume. Three lines to change: the model, --data, --train.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers import HfArgumentParser, set_seed
from transformers.hf_argparser import HfArg
from transformers.trainer_utils import get_last_checkpoint

from fullrank import Guard, RetrievalCallback, TrainingExample, load_golden, read_training_data
from fullrank._errors import SettingError
from fullrank.codesearch import standard_library_task
from fullrank.demo import packaged_model
from fullrank.models import load_sentence_transformer
from fullrank.records import mistakes_as_messages, run_record, write_record
from fullrank.report import comparison_table, findings_text
from fullrank.training_data import refuse_half_a_task, training_columns


@dataclass(frozen=True)
class Knobs:
    """Everything there is to turn; each is an option of the command line."""

    model: str | None = HfArg(default=None, help="path or hub id")
    data: str | None = HfArg(default=None, help="golden set")
    split: str = HfArg(default="dev", help="of the golden set")
    train: str | None = HfArg(default=None, help="training data")
    output: str = HfArg(default="runs/lora", help="folder of the run")
    guard: str | None = HfArg(default=None, help="general golden set that must not get worse by over 2 points")
    select: str = HfArg(default="recall@1", help="metric that chooses")
    negatives: int = HfArg(default=0, help="hard negatives a row")
    batch: int = 32
    mini_batch: int = HfArg(default=0, help="above 0: the cached loss, which makes --batch as large as you like")
    epochs: float = 1.0
    steps: int = HfArg(default=-1, help="above 0: instead of --epochs")
    every: int | None = HfArg(default=None, help="steps between evaluations; default: ten a run")
    patience: int | None = HfArg(default=None, help="evaluations without an improvement")
    rate: float = 3e-4
    rank: int = 16
    max_tokens: int = 64
    bf16: bool = False
    resume: bool = HfArg(default=False, help="go on from the last checkpoint in --output")
    seed: int = 7
    tiny: bool = HfArg(default=False, help="a try-out of a minute on a CPU")
    json: str | None = HfArg(default=None, help="write cost and gain there")


TINY = {"steps": 6, "every": 3, "batch": 8, "max_tokens": 32}


def task(knobs: Knobs):
    """Returns the golden set and the training examples."""
    refuse_half_a_task(knobs.data, knobs.train, tiny=knobs.tiny)
    golden = load_golden(knobs.data, knobs.split) if knobs.data else None
    examples = read_training_data(knobs.train) if knobs.train else None
    if golden is None or examples is None:
        sizes = {"within": ("email", "json")} if knobs.tiny else {"n_documents": 2_000, "n_queries": 700}
        built_in = standard_library_task(**sizes)
        golden = golden or built_in.golden
        examples = examples or [TrainingExample(query, positive) for query, positive in built_in.pairs]
    return golden, examples


def adapted(knobs: Knobs):
    """Returns the model with a LoRA adapter in its backbone."""
    model = load_sentence_transformer(knobs.model or str(packaged_model()))
    model.max_seq_length = knobs.max_tokens
    config = LoraConfig(r=knobs.rank, lora_alpha=2 * knobs.rank, lora_dropout=0.05, target_modules="all-linear")
    model.model_card_data.generate_widget_examples = False  # a second pass over the data, for the card alone
    model[0].model = get_peft_model(model[0].model, config)  # not model[0].auto_model, which saves wrong
    return model


def main(knobs: Knobs) -> None:
    start = time.perf_counter()
    set_seed(knobs.seed)  # before the adapter is drawn
    golden, examples = task(knobs)
    columns = training_columns(examples, negatives=knobs.negatives, batch=knobs.batch)
    if knobs.resume and not (Path(knobs.output).is_dir() and get_last_checkpoint(knobs.output)):
        raise SettingError(f"{knobs.output} holds no checkpoint to --resume from; leave --resume out to begin")
    findings = golden.check(train_pairs=[example.pair for example in examples])
    print(findings_text(finding for finding in findings if finding.severity != "info"))
    model = adapted(knobs)
    if knobs.mini_batch:
        loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=knobs.mini_batch)
    else:
        loss = MultipleNegativesRankingLoss(model)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=knobs.output,
        num_train_epochs=knobs.epochs,
        max_steps=knobs.steps,
        per_device_train_batch_size=knobs.batch,
        batch_sampler="no_duplicates",  # an equal text in the batch would be a false negative
        learning_rate=knobs.rate,
        warmup_steps=0.1,  # share of the run
        bf16=knobs.bf16,
        logging_steps=5,
        save_strategy="steps",  # for --resume; the best step is kept apart from these
        save_steps=knobs.every or 100,
        save_total_limit=2,
        report_to=["tensorboard"],
        seed=knobs.seed,
        use_cpu=not torch.accelerator.is_available(),  # without it, processes on CPUs train apart
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
    )
    callback = RetrievalCallback(
        golden,
        select=knobs.select,
        every=knobs.every,
        patience=knobs.patience,
        guards=[Guard(load_golden(knobs.guard), metric="ndcg@10", max_drop=0.02)] if knobs.guard else [],
    ).attach(trainer)
    trainer.train(resume_from_checkpoint=knobs.resume or None)
    if not trainer.is_world_process_zero():
        return
    print(comparison_table(callback.base_result, callback.best_result, title=f"{golden.name}, full corpus"))
    print(f"Adapter: {callback.best.path}")
    print(f"Curves:  tensorboard --logdir {knobs.output}")
    if knobs.json:
        seconds = time.perf_counter() - start
        results = callback.base_result, callback.best_result
        write_record(knobs.json, run_record(*results, metric=knobs.select, seconds=seconds, settings=asdict(knobs)))


if __name__ == "__main__":
    (parsed,) = HfArgumentParser(Knobs, description=__doc__).parse_args_into_dataclasses()
    with mistakes_as_messages():
        main(replace(parsed, **TINY) if parsed.tiny else parsed)
