"""A training loop of one's own under accelerate, on one process or several, with fullrank's evaluation and store.

    python recipes/accelerate_loop.py --tiny
    torchrun --nproc_per_node 2 recipes/accelerate_loop.py --tiny
    accelerate launch --num_processes 8 recipes/accelerate_loop.py --data beir/mine --train pairs.jsonl

On CPUs it has to be torchrun: accelerate 1.15 starts one process there, whatever --num_processes says.
Every process makes the same call of fullrank.evaluate, which shares the documents among them: the numbers are those of
one process. The main process alone stores; the others wait, and read the best weights at the end.

To begin with on one 24 GB GPU (not measured here): --batch 256 --max_tokens 256 --rate 2e-5
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from fullrank import BestStore, Result, evaluate, load_golden, read_training_data
from fullrank._errors import SettingError
from fullrank.codesearch import standard_library_task
from fullrank.demo import packaged_model
from fullrank.metrics import Metric
from fullrank.models import load_sentence_transformer
from fullrank.records import mistakes_as_messages, run_record, write_record
from fullrank.report import comparison_table, evaluation_line
from fullrank.settings import DEFAULT_METRICS
from fullrank.training_data import refuse_half_a_task, refuse_less_than_a_batch


@dataclass(frozen=True)
class Knobs:
    """Everything there is to turn; each is an option of the command line."""

    model: str | None = HfArg(default=None, help="path or hub id")
    data: str | None = HfArg(default=None, help="golden set; default: code search")
    split: str = HfArg(default="dev", help="of the golden set")
    train: str | None = HfArg(default=None, help="training data")
    output: str = HfArg(default="runs/loop", help="a new folder for the run")
    select: str = HfArg(default="recall@1", help="metric that chooses")
    batch: int = HfArg(default=32, help="on each process")
    steps: int = 40
    every: int = HfArg(default=10, help="steps between evaluations")
    rate: float = 2e-5
    scale: float = HfArg(default=20.0, help="1 / temperature")
    max_tokens: int = 64
    seed: int = 7
    tiny: bool = HfArg(default=False, help="a try-out of a minute on a CPU")
    json: str | None = HfArg(default=None, help="write cost and gain there")


TINY = {"steps": 4, "every": 2, "batch": 8, "max_tokens": 32}


class BiEncoder(nn.Module):
    """Scores a batch: queries against the documents of all of them; one forward, as DDP wants it."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, queries, documents):
        """Returns [B, B]: the positive of query i is column i."""
        q, d = (F.normalize(self.model(f)["sentence_embedding"].float(), dim=1) for f in (queries, documents))
        return self.scale * q @ d.T


def task(knobs: Knobs):
    """Returns the golden set and the training pairs."""
    refuse_half_a_task(knobs.data, knobs.train, tiny=knobs.tiny)
    golden = load_golden(knobs.data, knobs.split) if knobs.data else None
    pairs = [example.pair for example in read_training_data(knobs.train)] if knobs.train else None
    if golden is None or pairs is None:
        sizes = {"within": ("email", "json")} if knobs.tiny else {"n_documents": 2_000, "n_queries": 700}
        built_in = standard_library_task(**sizes)
        golden, pairs = golden or built_in.golden, pairs or built_in.pairs
    return golden, pairs


def endless(batches):
    """Yields batches, epoch after epoch."""
    while True:
        yield from batches


def main(knobs: Knobs) -> None:
    start = time.perf_counter()
    if (Path(knobs.output) / "best").exists():
        raise SettingError(f"{knobs.output} holds an earlier run; give another --output")
    # A BERT has a pooler of its own that no embedding goes through, and DDP waits for its gradients.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=knobs.tiny, kwargs_handlers=[unused])
    set_seed(knobs.seed)
    golden, pairs = task(knobs)
    refuse_less_than_a_batch(len(pairs), knobs.batch * accelerator.num_processes)
    metrics = list(dict.fromkeys(map(Metric.parse, (*DEFAULT_METRICS, knobs.select))))
    model = load_sentence_transformer(knobs.model or str(packaged_model()))
    model.max_seq_length = knobs.max_tokens

    def collate(rows):
        queries, documents = zip(*rows, strict=True)
        return model.preprocess(list(queries)), model.preprocess(list(documents))

    loader = DataLoader(pairs, batch_size=knobs.batch, shuffle=True, drop_last=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=knobs.rate)
    scorer, optimizer, loader = accelerator.prepare(BiEncoder(model, knobs.scale), optimizer, loader)
    store = BestStore(Path(knobs.output) / "best")
    base, loss = None, None

    batches = endless(loader)
    for step in range(knobs.steps + 1):
        if step:  # step 0 is the base model, a candidate like any other
            scorer.train()
            scores = scorer(*next(batches))
            loss = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step % knobs.every and step != knobs.steps:
            continue
        result = evaluate(model, golden, metrics=metrics)  # on every process: they share the documents
        base = base or result
        if accelerator.is_main_process:

            def save(folder: Path, result: Result = result) -> None:
                model.save_pretrained(str(folder))
                result.save(folder / "result.json")

            is_best = store.offer(step, result[knobs.select], save)
            logs = {} if loss is None else {"loss": loss.item()}
            print(evaluation_line(step, knobs.steps, result, knobs.select, logs=logs, is_best=is_best))
        accelerator.wait_for_everyone()

    best = BestStore(store.folder).best
    model = load_sentence_transformer(str(best.path))  # on every process: go on from here
    if accelerator.is_main_process:
        kept = Result.load(best.path / "result.json")
        print(
            comparison_table(base, kept, title=f"{golden.name}, full corpus, {accelerator.num_processes} process(es)")
        )
        print(f"Best: step {best.step}, {best.path}")
        if knobs.json:
            seconds = time.perf_counter() - start
            record = run_record(base, kept, metric=knobs.select, seconds=seconds, settings=asdict(knobs))
            write_record(knobs.json, record | {"processes": accelerator.num_processes})
    accelerator.end_training()


if __name__ == "__main__":
    (parsed,) = HfArgumentParser(Knobs, description=__doc__).parse_args_into_dataclasses()
    with mistakes_as_messages():
        main(replace(parsed, **TINY) if parsed.tiny else parsed)
