"""What a run tells people: a line an evaluation, each finding once, the verdict.

Promise: on the console where somebody watches, else in the log; nothing is said twice.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fullrank.data import GoldenSet
from fullrank.metrics import Metric
from fullrank.report import evaluation_line, say, tensorboard_layout, tensorboard_scalars, worst_text
from fullrank.result import Finding, Result

__all__ = ["Announcer", "Level"]

logger = logging.getLogger(__name__)

Level = Literal["info", "warning", "error"]
WORST_QUERIES = 10
THROUGHPUT = ("eval/documents_per_second", "eval/queries_per_second")


class Announcer:
    """Says what happens in a run.

    Args:
        golden, metric: what lines and worst queries are shown for.
        several: whether there are other golden sets as well.
        speaks: whether somebody watches the console.
        writes: False on ranks that only take part.
        writer: returns the TensorBoard writer in use, or None.
    """

    def __init__(
        self,
        golden: GoldenSet,
        metric: Metric,
        *,
        several: bool,
        speaks: bool,
        writes: bool,
        writer: Callable[[], Any],
    ) -> None:
        self.golden, self.metric, self.several = golden, metric, several
        self.speaks, self.writes, self.writer = speaks, writes, writer
        self._logs: tuple[int, dict[str, float]] = (-1, {})
        self._line: tuple[int, Result, bool, float | None] | None = None
        self._said: set[str] = set()

    def measured(self, step: int, result: Result, *, tag: str, floors: Mapping[str, float]) -> None:
        """Gives TensorBoard what goes with the metrics of an evaluation: interval, throughput, floors of guards.

        Args:
            step: of training.
            result: on the set that chooses.
            tag: of the value that is shown.
            floors: by the tag of the guard.
        """
        if (writer := self.writer()) is not None:
            scalars = tensorboard_scalars(result, str(self.metric), tag=tag)
            for name, value in (scalars | {f"{guard}_floor": floor for guard, floor in floors.items()}).items():
                writer.add_scalar(name, value, step)

    def hold(self, step: int, result: Result, *, is_best: bool, composite: float | None = None) -> None:
        """Takes the line of an evaluation, to be shown with the loss line of its step."""
        self._line = (step, result, is_best, composite)

    def loss_line(self, step: int, logs: Mapping[str, float]) -> None:
        """Takes the loss line of a step; it is shown with the evaluation of that step only."""
        self._logs = (step, dict(logs))

    def release(self, max_steps: int) -> None:
        """Shows the line that was held, if there is one."""
        if self._line is None:
            return
        (step, result, is_best, composite), self._line = self._line, None
        if self.speaks:
            logs = self._logs[1] if self._logs[0] == step else {}
            say(
                evaluation_line(
                    step,
                    max_steps,
                    result,
                    str(self.metric),
                    logs=logs,
                    is_best=is_best,
                    of=self.golden.name if self.several else "",
                    composite=composite,
                )
            )
        if (writer := self.writer()) is not None:
            corpus = dict(zip(self.golden.doc_ids, self.golden.doc_texts, strict=True))
            writer.add_text("worst queries", worst_text(result.worst(WORST_QUERIES, self.metric), corpus), step)

    def add_layout(self, tags: Sequence[str], *, shown: str, pooled: bool, guards: Sequence[str]) -> None:
        """Gives TensorBoard the view with loss, in-batch and full-corpus curves.

        Args:
            tags: of the metrics.
            shown: that of them which chooses, drawn with its interval unless it is ``pooled``.
            guards: their tags.
        """
        if (writer := self.writer()) is not None:
            layout = tensorboard_layout(tags, intervals=[] if pooled else [shown], guards=guards, throughput=THROUGHPUT)
            writer.add_custom_scalars(layout)

    def tell(self, level: Level, text: str) -> None:
        """Says something; without a console only what needs attention goes to the log."""
        if self.speaks:
            say(text)
        elif level != "info" and self.writes:
            getattr(logger, level)(text)

    def once(self, finding: Finding) -> None:
        """Says a finding, unless one of its kind was said before."""
        if finding.kind not in self._said:
            self._said.add(finding.kind)
            self.tell(finding.severity, str(finding))
