"""Progress bars of evaluations, on the console and in a notebook.

Promise: silent where nobody watches, and where it is soon over; a bar is gone when its work is done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

__all__ = ["progress_bars"]


@contextmanager
def progress_bars(*, after_seconds: float = 1, leading: str = "encode") -> Iterator[Callable[[str, int, int], None]]:
    """Yields a progress callback (phase, done, of all) that draws a bar a phase, below those that are there.

    Args:
        after_seconds: a phase that is done before shows none.
        leading: stands before the name of the phase.
    """
    bars: dict[str, Any] = {}

    def progress(phase: str, done: int, total: int) -> None:
        if phase not in bars:
            bars[phase] = tqdm(total=total, desc=f"{leading} {phase}", disable=None, leave=False, delay=after_seconds)
        bars[phase].update(done - bars[phase].n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()
