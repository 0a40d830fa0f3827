"""What the recipes share: what a run cost and gained, as one JSON file; mistakes of the user as one message.

Promise: every number in a record was measured by the run that wrote it.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fullrank._errors import FullrankError
from fullrank._files import write_atomically
from fullrank.comparison import compare
from fullrank.result import Result

__all__ = ["mistakes_as_messages", "peak_memory_mib", "run_record", "write_record"]


@contextmanager
def mistakes_as_messages() -> Iterator[None]:
    """Ends the process with one message and exit code 2 where the body raises what its user can put right."""
    try:
        yield
    except (FullrankError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error


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
