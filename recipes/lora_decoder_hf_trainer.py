"""LoRA fine-tuning of a decoder as an embedding model (0.6B to 8B), with the plain Hugging Face Trainer.

    python recipes/lora_decoder_hf_trainer.py --tiny
    python recipes/lora_decoder_hf_trainer.py --model Qwen/Qwen3-Embedding-0.6B --data beir/mine --train hard.jsonl

The embedding is the last token's hidden state; the end-of-text token stands there, whichever side is padded. Queries
carry an instruction, documents do not. The loss is InfoNCE over [B, B * (1 + K)] scores: the positive of query i is
column i * (1 + K), its K hard negatives follow, and the documents of other queries are negatives too. At the end the
adapter is merged into a fresh base model, which is scored again: that number is the one to deploy by.

To begin with on one 24 GB GPU (not measured here):
    0.6B: --bf16 --batch 64 --negatives 3 --checkpointing --max_tokens 256
    8B:   --bf16 --four_bit --batch 8 --negatives 3 --checkpointing --max_tokens 256 --rank 16   (needs bitsandbytes)
"""

import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments
from transformers.hf_argparser import HfArg

from fullrank import Backbone, Guard, RetrievalCallback, TrainingExample, evaluate, load_golden, read_training_data
from fullrank.codesearch import standard_library_task
from fullrank.decoders import end_every_text, tiny_decoder
from fullrank.encode import pool
from fullrank.records import mistakes_as_messages, run_record, write_record
from fullrank.report import comparison_table
from fullrank.training_data import refuse_half_a_task, training_columns


@dataclass(frozen=True)
class Knobs:
    """Everything there is to turn; each is an option of the command line."""

    model: str = HfArg(default="Qwen/Qwen3-Embedding-0.6B", help="path or hub id")
    data: str | None = HfArg(default=None, help="golden set; without --data and --train: code search")
    split: str = HfArg(default="dev", help="of the golden set")
    train: str | None = HfArg(default=None, help="training data, see mine_hard_negatives.py")
    output: str = HfArg(default="runs/decoder", help="folder of the run")
    instruction: str = "Instruct: Given a search query, retrieve passages that answer it\nQuery: "
    guard: str | None = HfArg(default=None, help="general golden set that must not get worse by over 2 points")
    select: str = HfArg(default="recall@1", help="metric that chooses")
    negatives: int = HfArg(default=0, help="K hard negatives a query")
    temperature: float = 0.05
    batch: int = 16
    epochs: float = 1.0
    steps: int = HfArg(default=-1, help="above 0: instead of --epochs")
    every: int | None = HfArg(default=None, help="steps between evaluations; default: ten a run")
    patience: int | None = HfArg(default=None, help="evaluations without an improvement")
    rate: float = 1e-4
    rank: int = 16
    max_tokens: int = 256
    padding: str = HfArg(default="left", help="left or right")
    bf16: bool = False
    four_bit: bool = HfArg(default=False, help="keep the base in 4 bits")
    checkpointing: bool = HfArg(default=False, help="less memory for a third more time")
    seed: int = 7
    tiny: bool = HfArg(default=False, help="a try-out of a minute on a CPU, on a random decoder")
    json: str | None = HfArg(default=None, help="write cost and gain there")


TINY = {"steps": 60, "every": 20, "batch": 8, "negatives": 1, "max_tokens": 32, "rate": 3e-3, "select": "ndcg@10"}


class BiEncoder(nn.Module):
    """Scores a batch: queries against the documents of all of them."""

    def __init__(self, backbone: nn.Module, temperature: float) -> None:
        super().__init__()
        self.backbone, self.temperature = backbone, temperature

    def embed(self, features):
        """Returns [n, d], unit length."""
        hidden = self.backbone(**features).last_hidden_state
        return F.normalize(pool(hidden, features["attention_mask"], "last").float(), dim=1)

    def forward(self, queries, documents, equal):
        """Returns loss and scores [B, B * (1 + K)]; ``equal`` marks documents that are answers all the same."""
        scores = self.embed(queries) @ self.embed(documents).T / self.temperature
        scores = scores.masked_fill(equal, -torch.inf)
        positives = torch.arange(len(scores), device=scores.device) * (scores.shape[1] // len(scores))
        return {"loss": F.cross_entropy(scores, positives), "scores": scores}


class AdapterTrainer(Trainer):
    """Saves the adapter, not the base that never changes."""

    def _save(self, output_dir=None, state_dict=None):
        self.model.backbone.save_pretrained(output_dir or self.args.output_dir)


def collator(tokenizer, knobs: Knobs):
    """Returns the function that makes a batch of rows (query, positive, K negatives)."""

    def tokens(texts):
        return tokenizer(texts, padding=True, truncation=True, max_length=knobs.max_tokens, return_tensors="pt")

    def collate(rows):
        documents, answers = [text for row in rows for text in row[1:]], defaultdict(set)
        for query, positive, *_ in rows:
            answers[query].add(positive)
        equal = torch.tensor([[text in answers[query] for text in documents] for query, *_ in rows])
        equal[range(len(rows)), range(0, len(documents), len(rows[0]) - 1)] = False  # its own column
        prompted = tokens([knobs.instruction + row[0] for row in rows])
        return {"queries": prompted, "documents": tokens(documents), "equal": equal}

    return collate


def adapted(knobs: Knobs):
    """Returns the base with a LoRA adapter."""
    dtype, small = torch.bfloat16 if knobs.bf16 else torch.float32, None
    if knobs.four_bit:  # bitsandbytes must be installed
        small = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    base = AutoModel.from_pretrained(knobs.model, use_safetensors=True, dtype=dtype, quantization_config=small)
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False) if small else base
    if knobs.checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
        base.config.use_cache = False
    return get_peft_model(base, LoraConfig(r=knobs.rank, lora_alpha=2 * knobs.rank, target_modules="all-linear"))


def task(knobs: Knobs):
    """Returns the golden set and the training examples; other answers in place of mined negatives, for a try-out."""
    refuse_half_a_task(knobs.data, knobs.train, tiny=knobs.tiny)
    if knobs.data:
        return load_golden(knobs.data, knobs.split), read_training_data(knobs.train)
    sizes = {"within": ("email", "json")} if knobs.tiny else {"n_documents": 2_000, "n_queries": 700}
    built_in = standard_library_task(**sizes)
    examples = [TrainingExample(*pair, (built_in.pairs[i - 1][1],)) for i, pair in enumerate(built_in.pairs)]
    return built_in.golden, read_training_data(knobs.train) if knobs.train else examples


def main(knobs: Knobs) -> None:
    start = time.perf_counter()
    torch.manual_seed(knobs.seed)  # before the adapter is drawn
    golden, examples = task(knobs)
    rows = list(zip(*training_columns(examples, negatives=knobs.negatives, batch=knobs.batch).values(), strict=True))
    if knobs.tiny:
        knobs = replace(knobs, model=tiny_decoder(Path(knobs.output) / "base", golden.doc_texts))
    tokenizer = end_every_text(AutoTokenizer.from_pretrained(knobs.model), padding=knobs.padding)
    model = BiEncoder(adapted(knobs), knobs.temperature)
    sides = {"query_prompt": knobs.instruction, "max_length": knobs.max_tokens}
    encoder = partial(Backbone, tokenizer=tokenizer, pooling="last", **sides)
    arguments = TrainingArguments(
        output_dir=knobs.output,
        num_train_epochs=knobs.epochs,
        max_steps=knobs.steps,
        per_device_train_batch_size=knobs.batch,
        learning_rate=knobs.rate,
        warmup_steps=0.1,  # share of the run
        bf16=knobs.bf16,
        logging_steps=5,
        save_strategy="no",  # the best steps are kept, adapter alone
        remove_unused_columns=False,
        dataloader_drop_last=True,
        report_to=["tensorboard"],
        seed=knobs.seed,
        use_cpu=not torch.accelerator.is_available(),  # without it, processes on CPUs train apart
    )
    trainer = AdapterTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collator(tokenizer, knobs))
    callback = RetrievalCallback(
        golden,
        select=knobs.select,
        every=knobs.every,
        patience=knobs.patience,
        guards=[Guard(load_golden(knobs.guard), metric="ndcg@10", max_drop=0.02)] if knobs.guard else [],
        encoder=encoder(model.backbone),
    ).attach(trainer)
    trainer.train()
    if not trainer.is_world_process_zero():
        return
    base, best = callback.base_result, callback.best_result
    print(comparison_table(base, best, title=f"{golden.name}, full corpus"))
    print(f"Adapter: {callback.best.path}")
    fresh = AutoModel.from_pretrained(knobs.model, dtype=torch.bfloat16 if knobs.bf16 else torch.float32)
    merged = PeftModel.from_pretrained(fresh, callback.best.path).merge_and_unload().to(arguments.device)
    options = {"precision": "bf16" if knobs.bf16 else None, "distributed": False}
    again = evaluate(encoder(merged), golden, metrics=list(best.metrics), **options)
    for part in (merged, tokenizer):
        part.save_pretrained(folder := Path(knobs.output) / "merged")
    after, before = again[knobs.select], best[knobs.select]
    print(f"Merged:  {folder}, {knobs.select} {after:.4f}, {100 * (after - before):+.2f} points by merging")
    if knobs.json:
        cost = {"seconds": time.perf_counter() - start, "settings": asdict(knobs)}
        record = run_record(base, best, metric=knobs.select, **cost)
        write_record(knobs.json, record | {"merged": again.metrics})


if __name__ == "__main__":
    (parsed,) = HfArgumentParser(Knobs, description=__doc__).parse_args_into_dataclasses()
    with mistakes_as_messages():
        main(replace(parsed, **TINY) if parsed.tiny else parsed)
