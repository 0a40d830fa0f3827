"""fullrank: rank the whole corpus while you train, and keep the checkpoint that retrieves best.

Importing the package costs nothing: names are loaded when they are first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "FullrankError": "_errors",
    "Metric": "metrics",
    "GoldenSet": "data",
    "load_golden": "loaders",
    "Finding": "result",
    "Result": "result",
    "Comparison": "comparison",
    "compare": "comparison",
    "gate": "gating",
    "abstention": "abstention",
    "threshold_for": "abstention",
    "Encoder": "encode",
    "Backbone": "encode",
    "evaluate": "evaluate",
    "evaluate_dims": "evaluate",
    "evaluate_embeddings": "evaluate",
    "evaluate_run": "run",
    "mteb_task": "mteb_io",
    "to_mteb": "mteb_io",
    "mine_negatives": "mine",
    "in_batch_metrics": "in_batch",
    "BestStore": "store",
    "CollapseThresholds": "guards",
    "Guard": "guards",
    "TrainingExample": "training_data",
    "read_training_data": "training_data",
    "RetrievalCallback": "callback",
    "write_report": "page",
    "Selection": "selection",
    "select_checkpoint": "select",
}
__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from fullrank._errors import FullrankError as FullrankError
    from fullrank.abstention import abstention as abstention
    from fullrank.abstention import threshold_for as threshold_for
    from fullrank.callback import RetrievalCallback as RetrievalCallback
    from fullrank.comparison import Comparison as Comparison
    from fullrank.comparison import compare as compare
    from fullrank.data import GoldenSet as GoldenSet
    from fullrank.encode import Backbone as Backbone
    from fullrank.encode import Encoder as Encoder
    from fullrank.evaluate import evaluate as evaluate
    from fullrank.evaluate import evaluate_dims as evaluate_dims
    from fullrank.evaluate import evaluate_embeddings as evaluate_embeddings
    from fullrank.gating import gate as gate
    from fullrank.guards import CollapseThresholds as CollapseThresholds
    from fullrank.guards import Guard as Guard
    from fullrank.in_batch import in_batch_metrics as in_batch_metrics
    from fullrank.loaders import load_golden as load_golden
    from fullrank.metrics import Metric as Metric
    from fullrank.mine import mine_negatives as mine_negatives
    from fullrank.mteb_io import mteb_task as mteb_task
    from fullrank.mteb_io import to_mteb as to_mteb
    from fullrank.page import write_report as write_report
    from fullrank.result import Finding as Finding
    from fullrank.result import Result as Result
    from fullrank.run import evaluate_run as evaluate_run
    from fullrank.select import select_checkpoint as select_checkpoint
    from fullrank.selection import Selection as Selection
    from fullrank.store import BestStore as BestStore
    from fullrank.training_data import TrainingExample as TrainingExample
    from fullrank.training_data import read_training_data as read_training_data


class _Package(ModuleType):
    """Keeps public names what they are: importing the module ``fullrank.evaluate`` must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fullrank' has no attribute {name!r}")
    value = getattr(import_module(f"fullrank.{_HOME[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
