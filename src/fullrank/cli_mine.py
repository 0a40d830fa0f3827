"""Door to mining: `mine`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fullrank._errors import SettingError
from fullrank._files import refuse_unwritable
from fullrank.doors import Split, app, quiet_loading
from fullrank.loaders import load_golden, read_corpus
from fullrank.progress import progress_bars
from fullrank.report import say
from fullrank.training_data import read_training_data, write_training_data

__all__ = ["mine"]


@app.command()
def mine(
    model: Annotated[str, typer.Argument(help="Path or hub id of a SentenceTransformer.")],
    out: Annotated[Path, typer.Option(help="Where the examples go, as JSONL: query, positive, negatives.")],
    data: Annotated[str | None, typer.Option(help="Golden set whose SPLIT is trained on, see 'eval'.")] = None,
    split: Split = "train",
    train: Annotated[str | None, typer.Option(help="Instead of --data: pairs (JSONL, CSV, parquet, hf:REPO).")] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="With --train: corpus.jsonl to mine in beside the positives.")
    ] = None,
    from_rank: Annotated[int, typer.Option(help="First rank to look at.")] = 10,
    to_rank: Annotated[int, typer.Option(help="Last rank to look at.")] = 100,
    max_ratio: Annotated[float, typer.Option(help="A negative scores at most this share of the positive.")] = 0.95,
    margin: Annotated[float | None, typer.Option(help="It scores at least this much below the positive.")] = None,
    any_score: Annotated[bool, typer.Option("--any-score", help="No bar: take also what scores higher.")] = False,
    negatives: Annotated[int, typer.Option(help="For each example at most so many.")] = 5,
    sampling: Annotated[str, typer.Option(help="Of the fit ones: the top, or random ones.")] = "top",
    seed: Annotated[int, typer.Option(help="Of the random ones.")] = 0,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: the model as it stands.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON instead of a table.")] = False,
) -> None:
    """Mine hard negatives with a model over the full corpus. Exit code 1 if it found none at all.

    Example: fullrank mine sentence-transformers/all-MiniLM-L6-v2 --train pairs.jsonl --out hard.jsonl
    """
    if (data is None) == (train is None):
        raise SettingError("give either --data (a golden set's training split) or --train (pairs), and not both")
    if corpus is not None and train is None:
        raise SettingError("--corpus goes with --train; a golden set brings its own corpus")
    if any_score and margin is not None:
        raise SettingError("--any-score says that there is no bar, and --margin sets one; give one of them")
    refuse_unwritable(out)
    with quiet_loading():
        from fullrank.mine import MiningRules, golden_from_examples, mine_negatives, mined_table
        from fullrank.models import load_sentence_transformer

        bar = None if any_score else max_ratio
        rules = MiningRules(from_rank, to_rank, bar, margin, negatives, sampling, seed)  # type: ignore[arg-type]
        if data is not None:
            golden = load_golden(data, split)
        else:
            texts = () if corpus is None else read_corpus(corpus).values()
            golden = golden_from_examples(read_training_data(str(train)), texts)
        network = load_sentence_transformer(model)
    with progress_bars() as progress:
        mined = mine_negatives(network, golden, rules=rules, precision=precision, progress=progress)  # type: ignore[arg-type]
    path = write_training_data(out, mined.examples)
    found = mined.summary()
    if as_json:
        say(json.dumps({**found, "out": str(path)}))
    else:
        say(
            mined_table(
                mined, title=f"{golden.name}: {len(golden.queries):,} queries, {len(golden.corpus):,} documents"
            )
        )
        say(f"Training data in {path}")
    raise typer.Exit(0 if found["negatives"] else 1)
