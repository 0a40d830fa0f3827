"""What people look at: lines, tables, sentences, and the Markdown as TensorBoard shows it."""

import contextlib
import dataclasses
import html
import io
import os
import re
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table

from fullrank import Finding, Result, compare
from fullrank.comparison import Comparison
from fullrank.report import (
    comparison_table,
    evaluation_line,
    findings_text,
    render,
    result_table,
    say,
    tensorboard_layout,
    tensorboard_scalars,
    verdict,
    worst_text,
)
from fullrank.result import Miss
from fullrank.stats import Interval

METRICS = ("recall@1", "recall@5", "ndcg@10", "mrr@10")


def make_result(ones, n=100, *, metrics=METRICS, n_documents=12_345):
    """A result in which the first ``ones`` of ``n`` queries score 1 and the others 0, in every metric."""
    values = np.array([1.0] * ones + [0.0] * (n - ones))
    return Result(
        dict.fromkeys(metrics, ones / n),
        dict.fromkeys(metrics, values),
        tuple(f"q{i}" for i in range(n)),
        {"n_scored": n, "n_documents": n_documents},
    )


def make_comparison(verdict_, delta=0.034, low=0.01, high=0.058, p=0.0123):
    return Comparison("recall@1", 809, delta, Interval(low, high, 0.95, "bootstrap"), p, verdict_, ("a",), ())


def numbers(text):
    return [float(x) for x in re.findall(r"[-+]?\d+\.\d+", text)]


# ------------------------------------------------------------------------------------------------ one evaluation


def test_evaluation_line_says_everything():
    result = make_result(50)
    logs = {"loss": 0.98765, "in_batch_acc": 0.71234, "in_batch_mrr": 0.81234, "in_batch_candidates": 32.0}
    line = evaluation_line(12, 600, result, "recall@1", logs=logs, is_best=True)
    low, high = result.ci("recall@1")
    assert line.startswith("step  12/600 ")
    for part in (
        "loss 0.988",
        "in-batch acc 0.712 mrr 0.812 (of 32)",
        f"recall@1 0.5000 [{low:.3f}, {high:.3f}] of 12,345",
        "ndcg@10 0.5000",
    ):
        assert part in line
    assert line.endswith("* best")
    assert "\n" not in line
    assert 0.38 < low < 0.42
    assert 0.58 < high < 0.62


def test_evaluation_line_without_logs_and_not_best():
    line = evaluation_line(0, 600, make_result(50), "recall@1")
    assert line.startswith("step   0/600 ")
    assert "best" not in line
    assert "(of" not in line
    assert numbers(line)[0] == 0.5  # no number is invented for the loss and the batch
    assert re.search(r"loss +-", line)
    assert re.search(r"in-batch acc +- mrr +-", line)


@pytest.mark.parametrize("step", [0, 7, 60, 600])
def test_evaluation_lines_of_one_run_stand_in_columns(step):
    logs = {"loss": 1.0, "in_batch_acc": 0.5, "in_batch_mrr": 0.5, "in_batch_candidates": 32.0}
    line = evaluation_line(step, 600, make_result(50), "recall@1", logs=logs)
    assert line.index("recall@1") == evaluation_line(600, 600, make_result(50), "recall@1", logs=logs).index("recall@1")


def test_the_first_line_stands_in_the_columns_of_the_others():
    """Step 0 has no loss and no batches yet."""
    logs = {"loss": 1.0, "in_batch_acc": 0.5, "in_batch_mrr": 0.5, "in_batch_candidates": 32.0}
    first = evaluation_line(0, 60, make_result(50), "recall@1")
    later = evaluation_line(12, 60, make_result(50), "recall@1", logs=logs)
    assert first.index("in-batch") == later.index("in-batch")


def test_evaluation_line_names_no_metric_twice_and_none_that_is_missing():
    assert evaluation_line(1, 2, make_result(50), "ndcg@10").count("ndcg@10") == 1
    assert "ndcg" not in evaluation_line(1, 2, make_result(50, metrics=("recall@1",)), "recall@1")
    assert "mrr@10 0.5000" in evaluation_line(1, 2, make_result(50), "recall@1", also="mrr@10")


@pytest.mark.parametrize("ones", [0, 100])
def test_evaluation_line_of_all_right_or_all_wrong_is_not_certain(ones):
    low, high = numbers(re.search(r"\[.*?\]", evaluation_line(1, 2, make_result(ones), "recall@1"))[0])
    assert high - low > 0.02


# ------------------------------------------------------------------------------------------------ tables


def rows_of(table):
    """Returns the cells of every row that starts with a metric."""
    rows = [[cell.strip() for cell in re.split(r"[│|┃]", line) if cell.strip()] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if row and "@" in row[0]}


def test_result_table_shows_values_and_intervals():
    result = make_result(50)
    table = result_table(result, title="dev: 100 queries")
    low, high = result.ci("recall@1")
    assert rows_of(table) == {name: ["0.5000", f"{low:.4f} to {high:.4f}"] for name in METRICS}
    assert table.splitlines()[0].strip() == "dev: 100 queries"
    assert "95% interval" in table
    assert "\x1b" not in table


def test_result_table_at_another_level():
    result = make_result(50)
    narrow = numbers(rows_of(result_table(result, level=0.8))["recall@1"][1])
    wide = numbers(rows_of(result_table(result, level=0.99))["recall@1"][1])
    assert "80% interval" in result_table(result, level=0.8)
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]


def test_tables_do_not_wrap_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert len(rows_of(result_table(make_result(50)))) == 4
    table = comparison_table(make_result(40), make_result(60), title="x")
    assert {name: len(cells) for name, cells in rows_of(table).items()} == dict.fromkeys(METRICS, 6)


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_tables_neither_cut_nor_wrap_and_fit_into_80_columns(tmp_path, columns, is_terminal):
    """A real process, in a real terminal of that width and in a pipe."""
    code = (
        "import numpy as np\nfrom fullrank import Result\nfrom fullrank.report import comparison_table, result_table\n"
        "def make(n):\n"
        "    v = np.array([1.0] * n + [0.0] * (1000 - n))\n"
        "    names = ('recall@1', 'recall@5', 'ndcg@10', 'mrr@10')\n"
        "    return Result(dict.fromkeys(names, n / 1000), dict.fromkeys(names, v), tuple(map(str, range(1000))), {})\n"
        "print(comparison_table(make(0), make(1000), title='Held out, full corpus'))\n"
        "print(result_table(make(500)))\n"
    )
    (tmp_path / "show.py").write_text(code)
    found = output_in_terminal(tmp_path / "show.py", columns) if is_terminal else output_in_pipe(tmp_path / "show.py")
    assert is_terminal or "\x1b" not in found
    lines = re.sub(r"\x1b\[[\d;]*m", "", found).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in found
    assert any(re.match(r"recall@1 +│ 0\.0000 │ 1\.0000 │ \+100\.00 │", line) for line in lines)
    assert sum(line.startswith(("recall@", "ndcg@", "mrr@")) for line in lines) == 8


def test_words_wrap_where_a_column_allows_it():
    table = Table()
    table.add_column("value", no_wrap=True)
    table.add_column("remark")
    table.add_row("0.1234 to 0.5678", "a remark of many words " * 20)
    lines = render(table).splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) > 6
    assert "0.1234 to 0.5678" in lines[3]


def output_in_pipe(script):
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout


def output_in_terminal(script, columns):
    """Runs a script in a pseudo-terminal of this width and returns what it wrote."""
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm"}
    with subprocess.Popen([sys.executable, script], stdout=theirs, env=environment) as process:
        os.close(theirs)
        parts = []
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            while part := os.read(ours, 65_536):
                parts.append(part)
    os.close(ours)
    assert process.returncode == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_a_long_name_does_not_cut_a_number():
    result = make_result(50, metrics=("recall_cap@1000000000",))
    assert rows_of(result_table(result, title="a title that is long " * 20))["recall_cap@1000000000"][0] == "0.5000"


def test_comparison_table_shows_what_compare_says():
    base, best = make_result(40), make_result(60)
    table = comparison_table(base, best, title="Held out")
    found = compare(base, best, "recall@1")
    low, high = found.interval
    assert rows_of(table) == {
        name: [
            "0.4000",
            "0.6000",
            "+20.00",
            f"{100 * low:+.2f} to {100 * high:+.2f}",
            f"{found.p_value:.4f}",
            "20 / 0",
        ]
        for name in METRICS
    }
    assert table.splitlines()[0].strip() == "Held out"
    assert "points" in table
    assert "won / lost" in table
    assert "\x1b" not in table


def test_tables_are_the_expected_text():
    assert comparison_table(make_result(40), make_result(60), metrics=["recall@1", "mrr@10"], title="Held out") == (
        "Held out\n"
        "metric   ┃   base ┃   best ┃ points ┃    95 % interval ┃      p ┃ won / lost\n"
        "━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━\n"
        "recall@1 │ 0.4000 │ 0.6000 │ +20.00 │ +12.00 to +28.00 │ 0.0001 │     20 / 0\n"
        "mrr@10   │ 0.4000 │ 0.6000 │ +20.00 │ +12.00 to +28.00 │ 0.0001 │     20 / 0"
    )
    assert result_table(make_result(50, metrics=("recall@1",)), title="dev") == (
        "dev\n"
        "metric   ┃  value ┃     95% interval\n"
        "━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━\n"
        "recall@1 │ 0.5000 │ 0.4000 to 0.6000"
    )


def test_comparison_table_of_a_loss_and_of_no_change():
    assert rows_of(comparison_table(make_result(60), make_result(40)))["mrr@10"][2] == "-20.00"
    assert rows_of(comparison_table(make_result(60), make_result(40)))["mrr@10"][5] == "0 / 20"
    same = rows_of(comparison_table(make_result(60), make_result(60)))["mrr@10"]
    assert same[2] == "+0.00"
    low, high = numbers(same[3])
    assert low < 0 < high
    assert same[4:] == ["1.0000", "0 / 0"]


def test_comparison_table_leaves_out_what_one_side_lacks():
    table = comparison_table(make_result(40, metrics=("recall@1", "mrr@10")), make_result(60))
    assert list(rows_of(table)) == ["recall@1", "mrr@10"]
    table = comparison_table(make_result(40), make_result(60), metrics=["mrr@10", "map@3"])
    assert list(rows_of(table)) == ["mrr@10"]


def test_reports_change_nothing_and_print_nothing(capsys):
    base, best = make_result(40), make_result(60)
    before = (make_result(40), make_result(60))
    comparison_table(base, best)
    result_table(base)
    evaluation_line(1, 2, best, "recall@1")
    assert (base, best) == before
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------ the verdict


def test_verdict_without_any_evaluation():
    text = verdict(None, improved=False, step=None, metric="recall@1")
    assert text.startswith("No evaluation succeeded")
    assert "nothing was chosen" in text


@pytest.mark.parametrize("comparison", [None, make_comparison("not separable")])
def test_verdict_where_nothing_beat_the_base(comparison):
    text = verdict(comparison, improved=False, step=0, metric="recall@1")
    assert text.startswith("Nothing beat the base model")
    assert "recall@1" in text
    assert "base weights are restored" in text
    assert "lower learning rate" in text
    assert "Best:" not in text


def test_verdict_without_a_comparison():
    assert verdict(None, improved=True, step=12, metric="objective") == "Best: step 12 by objective."


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("better", "better than the base model"),
        ("worse", "worse than the base model"),
        ("not separable", "not separable from the base model on these queries"),
    ],
)
def test_verdict_says_how_sure_it_is(kind, says):
    text = verdict(make_comparison(kind), improved=True, step=12, metric="recall@1")
    assert text == f"Best: step 12 by recall@1: +3.40 points [+1.00, +5.80], p = 0.0123 over 809 queries: {says}."


def test_verdict_from_real_comparisons():
    sure = compare(make_result(40), make_result(60), "recall@1")
    assert verdict(sure, improved=True, step=5, metric="recall@1").endswith(
        "over 100 queries: better than the base model."
    )
    unsure = compare(make_result(40), make_result(41), "recall@1")
    assert "+1.00 points" in verdict(unsure, improved=True, step=5, metric="recall@1")
    assert "not separable" in verdict(unsure, improved=True, step=5, metric="recall@1")
    worse = compare(make_result(60), make_result(40), "recall@1")
    assert "-20.00 points" in verdict(worse, improved=True, step=5, metric="recall@1")
    assert "worse than the base model" in verdict(worse, improved=True, step=5, metric="recall@1")


# ------------------------------------------------------------------------------------------------ findings, say


def test_findings_text_is_a_line_each():
    found = [
        Finding("a", "warning", "first", examples=("x", "y"), remedy="Do this"),
        Finding("b", "error", "second", count=3),
    ]
    assert findings_text(found) == "warning: first ('x', 'y'). Do this\nerror: second"
    assert findings_text([]) == ""


def test_say_writes_a_line(capsys):
    say("one line")
    assert capsys.readouterr().out == "one line\n"
    file = io.StringIO()
    say("elsewhere", file=file)
    assert file.getvalue() == "elsewhere\n"
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------ the worst queries


def shown(markdown):
    """Returns (HTML, the text that a reader sees), as TensorBoard's text plugin renders it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the html5lib that TensorBoard carries
        from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(markdown)
    text = html.unescape(re.sub(r"<[^>]*>", " ", page))
    return page, " ".join(text.split())


def miss(query="what is it", doc_id="d1", retrieved="d2", value=0.25):
    return Miss("q1", query, value, {doc_id: 1}, [(retrieved, 0.75), ("d3", 0.5), ("d4", 0.25), ("d5", 0.125)])


CORPUS = {"d1": "the answer", "d2": "a competitor", "d3": "third", "d4": "fourth", "d5": "fifth"}


def test_worst_text_shows_what_was_asked_expected_and_retrieved():
    text = worst_text([miss()], CORPUS)
    page, seen = shown(text)
    for part in ("what is it", "0.25", "expected d1 : the answer", "d2 (0.750): a competitor", "d3 (0.500): third"):
        assert part in seen
    assert "fifth" not in seen
    assert seen.index("what is it") < seen.index("the answer") < seen.index("a competitor") < seen.index("third")
    assert "<strong>what is it</strong>" in page


def test_worst_text_shows_ranks_that_count():
    """``- 1. x`` is a list within a list; each starts anew, so that a reader sees rank 1 three times."""
    page, seen = shown(worst_text([miss()], CORPUS))
    assert page.count("<ol>") <= 1
    assert ("<ol>" in page) or all(f"{rank}. {doc_id}" in seen for rank, doc_id in ((1, "d2"), (2, "d3"), (3, "d4")))


def test_worst_text_of_nothing_and_of_a_query_without_text():
    assert worst_text([], CORPUS) == ""
    assert "q1" in shown(worst_text([miss(query="")], CORPUS))[1]


def test_worst_text_of_a_document_that_the_corpus_lacks():
    assert "expected gone" in shown(worst_text([miss(doc_id="gone")], CORPUS))[1]


def test_worst_text_shortens_long_texts_at_the_width():
    corpus = {**CORPUS, "d1": "x" * 500, "d2": "y" * 40}
    seen = shown(worst_text([miss()], corpus, width=40))[1]
    assert "x" * 39 + "…" in seen
    assert "x" * 40 not in seen
    assert "y" * 40 in seen


NASTY = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "1 < 2 > 0 && 3 &lt; 4 &amp; 5",
    "*stars* and **two**",
    "_under_ and __init__ of snake_case_name",
    "a `tick` and ``two``",
    "[a link](http://example.com/track)",
    "![an image](http://example.com/pixel.png)",
    "<http://example.com/auto>",
    r"a back\slash \* and \_ here",
    "line one\n\n# heading\n\n- item\n\n    code",
    "line one\n===\nline two\n---\n",
]


def tags(page):
    return re.findall(r"<(\w+)", page)


@pytest.mark.parametrize("place", ["query", "text"])
@pytest.mark.parametrize("nasty", NASTY)
def test_worst_text_shows_markup_as_text(nasty, place):
    """No text of the user's data becomes HTML or Markdown: no image is fetched, no link made, no word lost."""
    if place == "query":
        text = worst_text([miss(query=nasty)], CORPUS)
    else:
        text = worst_text([miss()], {**CORPUS, "d1": nasty, "d2": nasty})
    page, seen = shown(text)
    assert tags(page) == tags(shown(worst_text([miss()], CORPUS))[0])
    # A back-tick may be shown as a quote.
    assert " ".join(nasty.split()).replace("`", "'") in seen.replace("`", "'")


@pytest.mark.parametrize("doc_id", ["<b>", "a*b*c", "a_b_c", "a`b`c", "a` <img src=x> `c", "[x](http://example.com)"])
def test_worst_text_shows_ids_as_text(doc_id):
    page, seen = shown(worst_text([miss(doc_id=doc_id, retrieved=doc_id)], {doc_id: "its text", **CORPUS}))
    assert tags(page) == tags(shown(worst_text([miss()], CORPUS))[0])
    assert seen.replace("`", "'").count(doc_id.replace("`", "'")) == 2


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab <>&*_`[]()!#\\|~-\n", min_size=1, max_size=20).filter(lambda text: text.strip()))
def test_worst_text_of_any_query_is_one_bold_line_and_its_items(query):
    assert tags(shown(worst_text([miss(query=query)], CORPUS))[0]) == tags(shown(worst_text([miss()], CORPUS))[0])


# ------------------------------------------------------------------------------------------------ TensorBoard


def test_tensorboard_layout_puts_three_kinds_of_curves_side_by_side():
    layout = tensorboard_layout(["eval/recall@1", "eval/ndcg@10"])
    assert len(layout) == 1
    (charts,) = layout.values()
    assert [tags for _, tags in charts.values()] == [
        ["^train/loss$"],
        ["^train/in_batch_acc$", "^train/in_batch_mrr$"],
        ["^eval/recall@1$", "^eval/ndcg@10$"],
    ]
    assert {kind for kind, _ in charts.values()} == {"Multiline"}
    assert [name for name in charts if "diagnostic" in name] == [list(charts)[1]]


def test_tensorboard_takes_the_layout(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(tensorboard_layout(("eval/recall@1",)))
    events = EventAccumulator(str(tmp_path)).Reload()
    (tag,) = events.PluginTagToContent("custom_scalars")
    layout = layout_pb2.Layout.FromString(events.Tensors(tag)[0].tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == "fullrank"
    assert [list(chart.multiline.tag) for chart in category.chart] == [
        ["^train/loss$"],
        ["^train/in_batch_acc$", "^train/in_batch_mrr$"],
        ["^eval/recall@1$"],
    ]


def test_a_line_of_the_layout_brings_no_other():
    """TensorBoard matches tags as regular expressions from their beginning."""
    tags = ["eval/recall@1", "eval/recall@10", "eval/recall@1_low", "eval/dev-a.b/recall@1", "eval/dev-axb/recall@1"]
    (charts,) = tensorboard_layout(tags).values()
    patterns = charts["full corpus, held out"][1]
    assert [[tag for tag in tags if re.compile(pattern).match(tag)] for pattern in patterns] == [[tag] for tag in tags]


def test_tensorboard_shows_bands_guards_and_throughput_from_scalars_that_are_there(tmp_path):
    """The event files are read back: each chart finds its scalars, and the band is the interval."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard import SummaryWriter

    results = [dataclasses.replace(make_result(n), timing={"documents_per_second": 10.0 * n}) for n in (40, 60)]
    layout = tensorboard_layout(
        ["eval/recall@1"],
        intervals=["eval/recall@1"],
        guards=["eval/general/ndcg@10"],
        throughput=["eval/documents_per_second"],
    )
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(layout)
        for step, result in enumerate(results):
            scalars = {"eval/recall@1": result["recall@1"], **tensorboard_scalars(result, "recall@1")}
            scalars |= {"eval/general/ndcg@10": 0.5, "eval/general/ndcg@10_floor": 0.48}
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()["scalars"]
    (tag,) = events.PluginTagToContent("custom_scalars")
    (category,) = layout_pb2.Layout.FromString(events.Tensors(tag)[0].tensor_proto.string_val[0]).category
    charts = {chart.title: chart for chart in category.chart}
    assert list(charts)[3:] == ["recall@1 with its interval", "guard eval/general/ndcg@10", "throughput"]
    (series,) = charts["recall@1 with its interval"].margin.series
    for step, result in enumerate(results):
        found = [events.Scalars(name)[step].value for name in (series.lower, series.value, series.upper)]
        low, high = result.ci("recall@1")
        assert found == pytest.approx([low, result["recall@1"], high])
    for name in ("guard eval/general/ndcg@10", "throughput"):
        for pattern in charts[name].multiline.tag:
            assert [t for t in tags if re.match(pattern, t)], pattern
    assert [event.value for event in events.Scalars("eval/documents_per_second")] == [400.0, 600.0]
    assert all(type(v) is float for v in tensorboard_scalars(results[0], "recall@1").values())
