"""Figures of a report as SVG that lies inside a page.

Promise: a figure is a string of plain SVG: no script, no link, no font; text stays text; colours are CSS variables, so
that a page may be light or dark; names that come from data are shown and nothing else.
"""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np

from fullrank._optional import require
from fullrank.abstention import Abstention, Threshold, threshold_text
from fullrank.checkpoints import NOT_ELIGIBLE, Evaluation
from fullrank.journal import ABANDONED
from fullrank.objective import POOL
from fullrank.runfolder import Curve
from fullrank.stats import Interval

__all__ = ["abstention_figure", "curve_figure", "differences_figure", "guards_figure", "printable", "results_figure"]

# Neither HTML nor XML can hold these; half of a surrogate pair cannot be written as UTF-8 at all.
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd")

SVG = "http://www.w3.org/2000/svg"
# Matplotlib knows no variables: it draws in these colours, which are then replaced in the attributes.
INK, MUTED, GRID, MAIN, BASE, GOOD, BAD, EXTRA = (f"#01020{i}" for i in range(1, 9))
VARIABLES = dict(
    zip(
        (INK, MUTED, GRID, MAIN, BASE, GOOD, BAD, EXTRA),
        ("ink", "muted", "grid", "main", "base", "good", "bad", "extra"),
        strict=True,
    )
)
WIDTH = 7.6
MAX_POINTS = 500


def curve_figure(
    history: Sequence[Evaluation],
    *,
    label: str,
    intervals: Mapping[int, Interval],
    curves: Mapping[str, Curve],
    best: Evaluation | None,
) -> str:
    """Returns the objective over steps with its interval, base line, best and failed steps.

    Below it, where ``curves`` has them, stand the in-batch diagnostics and the loss, each with a scale of its own.
    """
    rows = [names for names in (_in_batch(curves), _loss(curves)) if names]
    figure, axes = _figure(2.9 + 1.35 * len(rows), rows=1 + len(rows), ratios=[2.4, *([1.0] * len(rows))])
    top = axes[0]
    scored = _thinned(
        [(e.step, e.score) for e in history if e.status == "ok" and e.score is not None and e.note != ABANDONED],
        None if best is None else best.step,
    )
    steps, scores = [s for s, _ in scored], [v for _, v in scored]
    banded = sorted(intervals)
    if len(banded) > 1:
        low, high = [intervals[s].low for s in banded], [intervals[s].high for s in banded]
        top.fill_between(banded, low, high, color=MAIN, alpha=0.16, linewidth=0)
    elif banded:
        (step,) = banded
        top.plot([step, step], [intervals[step].low, intervals[step].high], color=MAIN, alpha=0.5, linewidth=2)
    top.plot(steps, scores, color=MAIN, marker="o", markersize=4 if len(steps) <= 60 else 0, label=label)
    base = next((e.score for e in history if e.step == 0 and e.status == "ok"), None)
    if base is not None:
        top.axhline(base, color=BASE, linestyle="--", linewidth=1.2, label=f"base model {base:.4f}")
    if best is not None and best.score is not None:
        text = f"best: step {best.step}, {best.score:.4f}"
        top.plot([best.step], [best.score], color=GOOD, marker="*", markersize=15, linestyle="none", label=text)
    failed = [e.step for e in history if e.status == "failed"]
    if failed:
        # On the lower edge of the axes, not at a value: a failed evaluation has none.
        text = f"failed: {len(failed)}, no value"
        across = top.get_xaxis_transform()
        top.plot(
            failed, [0.03] * len(failed), "x", color=BAD, markersize=8, transform=across, label=text, clip_on=False
        )
    _legend(top)
    top.set_ylabel("pool" if label.endswith(POOL) else "full corpus")
    for axis, names in zip(axes[1:], rows, strict=True):
        for name, colour in zip(names, (EXTRA, MUTED), strict=False):
            x, y = zip(*_thinned(list(curves[name]), None), strict=True)
            axis.plot(x, y, color=colour, linewidth=1.3, label=name)
        _legend(axis)
        axis.set_ylabel("in-batch" if names[0].startswith("in-batch") else "loss")
    axes[-1].set_xlabel("optimizer step")
    return _svg(figure, "curve")


def guards_figure(history: Sequence[Evaluation], guards: Mapping[str, float], best_step: int | None) -> str:
    """Returns the guards over steps, each with its floor as a broken line."""
    figure, axes = _figure(0.6 + 1.6 * len(guards), rows=len(guards), ratios=[1.0] * len(guards))
    for axis, (name, floor) in zip(axes, guards.items(), strict=True):
        current = [e for e in history if e.note != ABANDONED]
        points = [(e.step, e.metrics[name]) for e in current if e.status == "ok" and name in e.metrics]
        if points:
            x, y = zip(*_thinned(points, best_step), strict=True)
            axis.plot(x, y, color=MAIN, marker="o", markersize=3.5, label=name)
        out = [(e.step, e.metrics[name]) for e in history if e.note == NOT_ELIGIBLE and name in e.metrics]
        if out:
            x, y = zip(*out, strict=True)
            axis.plot(x, y, "x", color=BAD, markersize=8, label=f"not eligible: {len(out)}")
        axis.axhline(floor, color=BAD, linestyle="--", linewidth=1.2, label=f"floor {floor:.4f}")
        if best_step is not None:
            axis.axvline(best_step, color=GOOD, linestyle=":", linewidth=1.2, label=f"best: step {best_step}")
        _legend(axis)
    axes[-1].set_xlabel("optimizer step")
    return _svg(figure, "guards")


def results_figure(rows: Sequence[tuple[str, float, Interval]], *, metric: str) -> str:
    """Returns results (name, value, interval) as a row of points with their intervals, first on top."""
    figure, (axis,) = _figure(0.9 + 0.32 * len(rows))
    for place, (_, value, interval) in enumerate(rows):
        y = len(rows) - place
        colour = BASE if place == 0 else MAIN
        axis.plot([interval.low, interval.high], [y, y], color=colour, linewidth=2, alpha=0.6)
        axis.plot([value], [y], "o", color=colour, markersize=6)
    axis.set_yticks(range(len(rows), 0, -1), [_cut(name) for name, _, _ in rows])
    axis.set_ylim(0.4, len(rows) + 0.6)
    axis.set_xlabel(f"{metric}, 95 % interval")
    return _svg(figure, "results")


def differences_figure(differences: Sequence[float], *, metric: str) -> str:
    """Returns the differences of the queries ([n], best - base), sorted: losses left, wins right."""
    values = np.sort(np.asarray(differences, dtype=np.float64))
    if len(values) > MAX_POINTS:
        values = values[np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(int)]
    place = np.linspace(0, 100, len(values)) if len(values) > 1 else np.array([50.0])
    figure, (axis,) = _figure(2.2)
    axis.fill_between(place, values, 0, where=list(values < 0), step="mid", color=BAD, alpha=0.75, linewidth=0)
    axis.fill_between(place, values, 0, where=list(values > 0), step="mid", color=GOOD, alpha=0.75, linewidth=0)
    axis.axhline(0, color=MUTED, linewidth=0.8)
    axis.set_xlim(0, 100)
    axis.set_xlabel("queries, in %, from the largest loss to the largest win")
    axis.set_ylabel(f"change of {metric}")
    return _svg(figure, "differences")


def abstention_figure(found: Abstention, threshold: Threshold) -> str:
    """Returns answer rate and correct-answer rate against the false-answer rate, with the suggested threshold."""
    figure, (axis,) = _figure(3.1)
    rows = sorted(set(zip(*(np.round(r, 4) for r in _rates(found)), strict=True)))
    kept = rows if len(rows) <= MAX_POINTS else [rows[round(i)] for i in np.linspace(0, len(rows) - 1, MAX_POINTS)]
    false, answered, correct = zip(*kept, strict=True)
    axis.plot(false, answered, color=MAIN, linewidth=1.8, drawstyle="steps-post", label="answered")
    axis.plot(
        false, correct, color=GOOD, linewidth=1.8, drawstyle="steps-post", label="answered, right document on top"
    )
    axis.plot([0, 1], [0, 1], color=MUTED, linestyle=":", linewidth=1, label="chance")
    text = f"threshold {threshold_text(found, threshold)}"
    axis.axvline(threshold.false_answer_rate, color=BAD, linestyle="--", linewidth=1.2, label=text)
    axis.plot([threshold.false_answer_rate], [threshold.answer_rate], "o", color=BAD, markersize=6)
    axis.set_xlim(-0.01, 1.01)
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("false-answer rate (unanswerable queries that are answered)")
    axis.set_ylabel("share of answerable queries")
    _legend(axis)
    return _svg(figure, "abstention")


def printable(text: str) -> str:
    """Returns text with a mark in place of every sign that no page can hold."""
    return text.translate(_UNPRINTABLE)


def _rates(found: Abstention) -> tuple[Any, Any, Any]:
    return found.false_answer_rate, found.answer_rate, found.correct_answer_rate


def _in_batch(curves: Mapping[str, Curve]) -> list[str]:
    return [name for name in curves if name.startswith("in-batch") and curves[name]]


def _loss(curves: Mapping[str, Curve]) -> list[str]:
    return [name for name in curves if name == "loss" and curves[name]]


def _thinned(points: list[tuple[Any, Any]], keep: int | None) -> list[tuple[Any, Any]]:
    """Returns at most about `MAX_POINTS` finite points, the one at step ``keep`` and the last among them."""
    finite = [point for point in points if math.isfinite(point[1])]
    stride = max(1, math.ceil(len(finite) / MAX_POINTS))
    last = len(finite) - 1
    return [p for i, p in enumerate(finite) if i % stride == 0 or i == last or p[0] == keep] or [(0, math.nan)]


def _cut(name: str, width: int = 42) -> str:
    return printable(name if len(name) <= width else f"{name[: width - 1]}…")


def _figure(height: float, *, rows: int = 1, ratios: Sequence[float] = (1.0,)) -> tuple[Any, list[Any]]:
    # Not pyplot, which keeps figures and picks a backend for the whole process.
    figure = require("matplotlib.figure", extra="report").Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=list(ratios))[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(GRID)
        axis.tick_params(colors=MUTED, labelsize=9)
        axis.grid(axis="y", color=GRID, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.xaxis.label.set_color(MUTED)
        axis.yaxis.label.set_color(MUTED)
    return figure, list(axes)


def _legend(axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=9, labelcolor=INK,
        borderaxespad=0.2, handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip


def _svg(figure: Any, prefix: str) -> str:
    matplotlib = require("matplotlib", extra="report")
    for text in figure.findobj(require("matplotlib.text", extra="report").Text):
        text.set_parse_math(False)  # a name may hold a dollar sign
        text.set_text(printable(text.get_text()))
    file = io.BytesIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": prefix, "font.family": "sans-serif"}
    with warnings.catch_warnings(), matplotlib.rc_context(options):
        warnings.simplefilter("ignore", UserWarning)  # a glyph that the font lacks: the browser has it, or another
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _embedded(file.getvalue(), prefix)


def _embedded(document: bytes, prefix: str) -> str:
    """Returns an SVG file as an element of a page: no prolog, no metadata, ids that no other figure has."""
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(document)
    used = set(re.findall(rb"#([\w.-]+)", document))
    for parent in root.iter():
        for child in list(parent):
            if child.tag in {f"{{{SVG}}}{name}" for name in ("metadata", "style")}:
                parent.remove(child)
        for name, value in list(parent.attrib.items()):
            if name == "id" and value.encode() not in used:
                del parent.attrib[name]
                continue
            if name.endswith("}href"):
                del parent.attrib[name]
                name = "href"
            parent.set(name, _attribute(name, value, prefix))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    value = re.sub(r"(^|url\()#(?!\d)", rf"\1#{prefix}-", value) if "#" in value else value
    for colour, variable in VARIABLES.items():
        value = value.replace(colour, f"var(--{variable})")
    # The page's own font: a list of names in every text is half of the file.
    return re.sub(r"font-family:[^;]*;? ?", "", value) if name == "style" else value
