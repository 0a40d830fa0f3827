"""Where the time of an evaluation goes."""

import time

__all__ = ["Clock"]


class Clock:
    """Seconds by phase, and how much was encoded."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()
        self.texts: dict[str, int] = {}
        self.tokens = self.padded = 0

    def __call__(self, phase: str) -> "_Phase":
        """Returns a context that adds the time of its body to ``phase``."""
        return _Phase(self, phase)

    def count(self, phase: str, texts: int, tokens: int, padded: int) -> None:
        """Notes a batch: its texts, their tokens, and the tokens with padding (0 where the model tokenises itself)."""
        self.texts[phase] = self.texts.get(phase, 0) + texts
        self.tokens += tokens
        self.padded += padded

    def report(self) -> dict[str, float]:
        """Returns seconds by phase and in all, queries/s and documents/s of encoding, and the share of padding."""
        rates = {
            f"{what}_per_second": self.texts[phase] / self.seconds[phase]
            for what, phase in (("queries", "encode_queries"), ("documents", "encode"))
            if self.seconds.get(phase) and phase in self.texts
        }
        waste = {"padding": 1 - self.tokens / self.padded} if self.padded else {}
        return {**self.seconds, "total": time.perf_counter() - self.started, **rates, **waste}


class _Phase:
    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self.start
        self.clock.seconds[self.name] = self.clock.seconds.get(self.name, 0.0) + spent
