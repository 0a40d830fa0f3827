"""Hard negatives, mined with the current model over the full corpus, in the form that the other recipes train on.

    python recipes/mine_hard_negatives.py --tiny
    python recipes/mine_hard_negatives.py --model BAAI/bge-base-en-v1.5 --train pairs.jsonl --corpus beir/mine

Then: python recipes/lora_sentence_transformers.py --train hard.jsonl --negatives 3 ...

The same from the shell is 'fullrank mine'; this file is for those who want to change how negatives are picked, or to
mine again with a model that has been trained (--model runs/lora/...). Documents that rank high and nobody judged are
often answers: read what is printed before you train on it, and lower --max_ratio where you see answers.

To begin with on one 24 GB GPU (not measured here): --precision bf16
"""

import time
from dataclasses import asdict, dataclass, replace

from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from fullrank import TrainingExample, mine_negatives, read_training_data
from fullrank._errors import SettingError
from fullrank.codesearch import standard_library_task
from fullrank.demo import packaged_model
from fullrank.loaders import read_corpus
from fullrank.mine import MiningRules, golden_from_examples, mined_table
from fullrank.models import load_sentence_transformer
from fullrank.progress import progress_bars
from fullrank.records import mistakes_as_messages, peak_memory_mib, write_record
from fullrank.training_data import write_training_data

SHOWN = 3


@dataclass(frozen=True)
class Knobs:
    """Everything there is to turn; each is an option of the command line."""

    model: str | None = HfArg(default=None, help="path or hub id")
    train: str | None = HfArg(default=None, help="pairs: JSONL, CSV, parquet or hf:")
    corpus: str | None = HfArg(default=None, help="corpus.jsonl to mine in, beside the positives")
    output: str = HfArg(default="hard.jsonl", help="training data with negatives")
    from_rank: int = HfArg(default=10, help="first rank to look at: those before are often answers")
    to_rank: int = 100
    max_ratio: float = HfArg(default=0.95, help="a negative scores at most this share of the positive")
    margin: float | None = HfArg(default=None, help="and at least this much below it")
    negatives: int = HfArg(default=5, help="for each example at most so many")
    sampling: str = HfArg(default="top", help="top or random")
    precision: str | None = HfArg(default=None, help="of encoding: fp32, bf16, fp16")
    max_tokens: int | None = HfArg(default=None, help="of a text; default: what the model declares")
    seed: int = 7
    tiny: bool = HfArg(default=False, help="a try-out of a minute on a CPU")
    json: str | None = HfArg(default=None, help="write the counts there")


TINY = {"from_rank": 3, "to_rank": 30, "negatives": 2, "max_tokens": 32}


def task(knobs: Knobs):
    """Returns the pairs to mine for, and the texts to mine in."""
    if knobs.corpus and not knobs.train:
        raise SettingError("--corpus goes with --train; the built-in task brings its own corpus")
    if knobs.train:
        return read_training_data(knobs.train), list(read_corpus(knobs.corpus).values()) if knobs.corpus else []
    sizes = {"within": ("email", "json")} if knobs.tiny else {"n_documents": 2_000, "n_queries": 700}
    built_in = standard_library_task(**sizes)
    # The held-out documents are in the index, so they are there to mine in; the held-out queries are not looked at.
    return [TrainingExample(query, positive) for query, positive in built_in.pairs], built_in.golden.doc_texts


def main(knobs: Knobs) -> None:
    start = time.perf_counter()
    pairs, corpus = task(knobs)
    golden = golden_from_examples(pairs, corpus)
    model = load_sentence_transformer(knobs.model or str(packaged_model()))
    if knobs.max_tokens:
        model.max_seq_length = knobs.max_tokens
    rules = MiningRules(
        from_rank=knobs.from_rank,
        to_rank=knobs.to_rank,
        max_ratio=knobs.max_ratio,
        margin=knobs.margin,
        negatives=knobs.negatives,
        sampling=knobs.sampling,
        seed=knobs.seed,
    )
    with progress_bars() as progress:
        mined = mine_negatives(model, golden, rules=rules, precision=knobs.precision, progress=progress)
    path = write_training_data(knobs.output, mined.examples)
    for example in [example for example in mined.examples if example.negatives][:SHOWN]:
        print(f"\nquery     {_line(example.query)}\npositive  {_line(example.positive)}")
        print("\n".join(f"negative  {_line(text)}" for text in example.negatives))
    print()
    print(mined_table(mined, title=f"{len(golden.queries):,} queries, {len(golden.corpus):,} documents"))
    print(f"Training data: {path}")
    if knobs.json:
        seconds = round(time.perf_counter() - start, 1)
        cost = {"settings": asdict(knobs), "seconds": seconds, "peak_memory_mib": peak_memory_mib()}
        write_record(knobs.json, cost | {"documents": len(golden.corpus), "mined": mined.summary()})


def _line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 100 else f"{flat[:99]}…"


if __name__ == "__main__":
    (parsed,) = HfArgumentParser(Knobs, description=__doc__).parse_args_into_dataclasses()
    with mistakes_as_messages():
        main(replace(parsed, **TINY) if parsed.tiny else parsed)
