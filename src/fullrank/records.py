"""What a training run cost and gained, as one JSON file.

Promise: every number in it was measured by the run that wrote it.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fullrank._files import write_atomically
from fullrank.comparison import compare
from fullrank.result import Result

__all__ = ["peak_memory_mib", "run_record", "write_record"]


def run_record(
    base: Result, best: Result, *, metric: str, seconds: float, settings: Mapping[str, object]
) -> dict[str, Any]:
    """Returns what a run cost and gained: settings, time, peak memory, both results, their paired comparison.

    Args:
        base: the model as it was when training began.
        best: the model that was kept, on the same golden set.
        metric: that chose.
        seconds: the run took, evaluations included.
        settings: of the run.
    """
    found = compare(base, best, metric)
    return {
        "settings": dict(settings),
        "seconds": round(seconds, 1),
        "peak_memory_mib": peak_memory_mib(),
        "cores": os.cpu_count(),
        "documents": best.counts["n_documents"],
        "queries": best.counts["n_scored"],
        "metric": metric,
        "base": base.metrics,
        "best": best.metrics,
        "delta": found.delta,
        "interval": list(found.interval),
        "p_value": found.p_value,
        "verdict": found.verdict,
        "versions": {name: version(name) for name in ("fullrank", "torch", "transformers")},
    }


def write_record(path: str | Path, record: Mapping[str, Any]) -> Path:
    """Writes a record as JSON, atomically, and returns the path."""
    return write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def peak_memory_mib() -> dict[str, int]:
    """Returns the most memory that this process has held, in MiB: ``host``, and ``device`` where there is one."""
    unit = 1 if sys.platform == "darwin" else 1 << 10  # bytes there, kilobytes elsewhere
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["device"] = torch.cuda.max_memory_allocated() >> 20
    return found
