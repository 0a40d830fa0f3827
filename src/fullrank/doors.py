"""What the doors of the command line share: the app, its options, progress bars, checks of paths."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Data",
    "Metrics",
    "Split",
    "app",
    "metric_names",
    "quiet_loading",
    "short_name",
]

app = typer.Typer(
    help="Rank the whole corpus, and keep the checkpoint that retrieves best.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Data = Annotated[str, typer.Option(help="BEIR folder, golden .jsonl, or hf:, ir_datasets:, mteb: source.")]
Split = Annotated[str, typer.Option(help="Which judgements: qrels/SPLIT.tsv.")]
Metrics = Annotated[str, typer.Option("--metrics", help="Comma-separated, for example recall@1,ndcg@10.")]


@app.callback()
def _common(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show log messages of the libraries below.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if not verbose:
        warnings.simplefilter("ignore")  # of the libraries below; ours are Findings
        for noisy in ("transformers", "sentence_transformers", "datasets", "peft", "httpx"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


def short_name(model: str) -> str:
    """Returns the last part of a path or hub id."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else path.name


def metric_names(metrics: str) -> list[str]:
    """Returns the names in a comma-separated option."""
    return [name.strip() for name in metrics.split(",") if name.strip()]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keeps the weight-loading bars of transformers off the screen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
