"""A selection as people read it: the leaderboard, the sentence it ends with, the section of the model card.

Promise: text is a pure function of a selection; a bound is called a bound, and 'proved lower' says no more than that.
"""

import re

from rich.markup import escape

from fullrank.checkpoints import Evaluation
from fullrank.comparison import Comparison
from fullrank.report import render, slim_table
from fullrank.selection import BASE, Row, Selection

__all__ = ["choice_text", "leaderboard_table", "nothing_evaluated", "watch_line"]


def leaderboard_table(selection: Selection, *, title: str | None = None) -> str:
    """Returns the leaderboard: step, score with interval, delta to base, speed, share of the corpus seen, remarks.

    Below it, why candidates failed or were not finished, a common cause once.
    """
    table = slim_table(title)
    table.padding = (0, 0)  # with it 80 columns are enough
    for name in ("step", "candidate", selection.objective, "95 % interval", "points", "docs/s", "seen", ""):
        words = name in ("candidate", "")
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in selection.rows:
        table.add_row(*_cells(row, selection))
    return "\n".join([render(table), *_causes(selection)])


def _cells(row: Row, selection: Selection) -> list[str]:
    interval = "" if row.interval is None else f"{row.interval.low:.4f} to {row.interval.high:.4f}"
    value = "" if row.bound is None else f"{row.bound:.4f}"
    return [
        "-" if row.step is None else str(row.step),
        escape(row.name).replace("/", "/\n"),  # may wrap there
        f"<= {value}" if row.status == "pruned" and value else value,
        interval,
        _delta(row, selection),
        "" if row.documents_per_second is None else f"{row.documents_per_second:,.0f}",
        f"{row.coverage:.0%}",
        _remark(row, selection),
    ]


def _remark(row: Row, selection: Selection) -> str:
    if row.status == "failed":
        return "failed"
    if row.is_that_of(selection.winner):
        return "* chosen"
    if row.eligible is False:
        return "not eligible"
    if row.tied or row.status == "pruned":
        return "tied" if row.tied else "pruned"
    return "not judged" if row.eligible is None else ""


def _causes(selection: Selection) -> list[str]:
    """Returns a line for each cause, with the candidates that it concerns."""
    named: dict[str, list[str]] = {}
    for row in selection.rows:
        if row.why:
            kind = "failed: " if row.status == "failed" else "not eligible: " if row.eligible is False else ""
            named.setdefault(kind + _common(row), []).append(row.name)
    lines = [f"{', '.join(names)}: {cause}" for cause, names in named.items()]
    if any(row.tied for row in selection.rows):
        lines.append("tied: not to be told apart from the best")
    return lines


def _common(row: Row) -> str:
    """Returns why, with the folder of the row called so: others may have the same fault. A base model has its name."""
    return row.why if row.origin == BASE else re.sub(rf"{re.escape(row.path)}(?![\w.-])", "the folder", row.why)


def _delta(row: Row, selection: Selection) -> str:
    if row.delta is None:
        return ""
    at_least = ">= " if selection.base is not None and selection.base.status == "pruned" else ""
    return f"{at_least}{100 * row.delta:+.2f}"


def nothing_evaluated(selection: Selection) -> str:
    """Returns why nothing could be evaluated: each cause once."""
    return "no candidate could be evaluated. " + "; ".join(_causes(selection))


def choice_text(selection: Selection) -> str:
    """Returns the lines that a selection ends with: what was chosen, how sure that is, what it cost."""
    winner, lines = selection.winner, []
    if winner is None:
        failed = all(row.status == "failed" for row in selection.rows)
        why = "no candidate could be evaluated" if failed else "no candidate that could be evaluated was eligible"
        return f"Nothing was chosen: {why}."
    where = winner.name if winner.step is None else f"step {winner.step} ({winner.name})"
    if selection.improved:
        lines.append(f"Chosen: {where} by {selection.objective}{_rule(selection)}{_against_base(selection)}.")
    else:
        lines.append(_base_stays(winner, selection))
    if selection.passed_over:
        lines.append(selection.passed_over)
    if selection.confirmed is not None and selection.headline is not None and selection.headline_interval is not None:
        low, high = selection.headline_interval
        against = "" if selection.comparison is None else f"; {_compared(selection.comparison)}"
        lines.append(
            f"Confirmed on {len(selection.confirmed.query_ids):,} queries that took no part in the choice: "
            f"{selection.leading} {selection.headline:.4f} [{low:.4f}, {high:.4f}]{against}."
        )
    if selection.tied is not None:
        tied = ", ".join(selection.tied)
        lines.append(
            f"Not to be told apart from the best on these queries (Holm, 95 %): {tied}."
            if tied
            else "All others can be told apart from the best on these queries (Holm, 95 %)."
        )
    n_candidates = sum(row.status != "failed" for row in selection.rows)
    spent = selection.documents_spent
    beside = f" ({spent:,} in all passes)" if spent > selection.documents_encoded else ""
    lines.append(
        f"{selection.documents_encoded:,} documents encoded{beside}, {selection.share:.0%} of {n_candidates} full "
        "evaluations."
    )
    return "\n".join(lines)


def _base_stays(winner: Row, selection: Selection) -> str:
    """Returns the sentence of a selection that chose nothing better than the base."""
    if selection.base is not None and not winner.is_that_of(selection.base):  # by the rule `one-se`
        return (
            f"Chosen: {winner.name} by {selection.objective}{_rule(selection)}. But the base model scored "
            f"{selection.base.score or 0.0:.4f} against its {winner.score:.4f}: --rule max names the best."
        )
    others = [row for row in selection.rows if not row.is_that_of(winner)]
    scored = [row for row in others if row.status != "failed"]
    if not scored:
        return "Nothing to compare with the base model: " + (
            "there is no other candidate." if not others else "all other candidates failed."
        )
    higher = [row for row in scored if row.eligible and row.score is not None and row.score > (winner.score or 0.0)]
    if higher:  # by the rule `one-se`
        best = max(higher, key=lambda row: row.score or 0.0)
        return (
            f"The base model stays: {best.name} scored higher, {selection.objective} {best.score:.4f} against "
            f"{winner.score:.4f}, but the base lies within one standard error of it."
        )
    if selection.passed_over:
        return f"Nothing eligible beat the base model by {selection.objective}."
    return (
        f"Nothing beat the base model by {selection.objective}. Try a lower learning rate, more or cleaner pairs, or "
        "harder negatives."
    )


def _rule(selection: Selection) -> str:
    return "" if selection.rule == "max" else ", the earliest within one standard error of the best"


def _compared(found: Comparison) -> str:
    low, high = found.interval
    sure = {
        "better": "better than the base model",
        "worse": "worse than the base model",
        "not separable": "not separable from the base model on these queries",
    }[found.verdict]
    return (
        f"{found.metric} {100 * found.delta:+.2f} points [{100 * low:+.2f}, {100 * high:+.2f}], "
        f"p = {found.p_value:.4f} over {found.n} queries: {sure}"
    )


def _against_base(selection: Selection) -> str:
    """Returns how the choice stands to the base on the queries that chose; what confirms it has a line of its own."""
    if selection.comparison is not None:
        return f": {_compared(selection.comparison)}" if selection.confirmed is None else ""
    if selection.base is not None and selection.base.status == "failed":
        return "; not compared with the base model, which could not be evaluated"
    if selection.base is None:
        return "; no base model is known to compare with (pass --base)"
    if selection.winner is not None and selection.winner.delta is not None and selection.base.status == "pruned":
        sure = (
            "" if selection.p_at_most is None else f", p at most {selection.p_at_most:.4f}: better than the base model"
        )
        seen = f"{selection.base.coverage:.0%} of the documents were ranked for it; --compare-base for the interval"
        return f": at least {100 * selection.winner.delta:+.2f} points over the base model{sure} ({seen})"
    return ""


def watch_line(line: Evaluation, best: Evaluation | None, label: str) -> str:
    """Returns the line of one evaluation of a watched run."""
    if line.status != "ok" or line.score is None:
        last = (line.error or line.note or "").strip().splitlines()
        return f"step {line.step}  {line.status}: {last[-1] if last else 'no reason given'}"
    also = "".join(f"  {n} {v:.4f}" for n, v in line.metrics.items() if n in ("ndcg@10",) and n != label)
    mark = "  * best" if best is not None and best.step == line.step else "" if line.eligible else f"  {line.note}"
    return f"step {line.step}  {label} {line.score:.4f}{also}  {line.seconds:.0f} s{mark}"
