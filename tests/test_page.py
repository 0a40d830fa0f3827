"""The report page: whole, valid, escaped, and honest about what it could not read."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fullrank import BestStore, Finding, GoldenSet, Result
from fullrank._errors import DataError, MissingExtraError, SettingError
from fullrank.checkpoints import Evaluation
from fullrank.journal import result_name
from fullrank.page import _templates, write_report
from fullrank.pagerows import group_rows, percent
from fullrank.runfolder import read_run_folder

NASTY = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload='alert(1)'></style></svg></title>",
    "مرحبا بالعالم",
    "emoji 🚀🔥 $x_1^2$ \\ {{ 7 * 7 }} {% raw %}",
    "a | pipe and a `tick` [link](http://example.com/pixel) ![i](http://example.com/i.png)",
    "bell \x07, null \x00, half \ud83d, line \u2028 end",
]


def make_result(share, n=60, *, seed=0, metrics=("recall@1", "ndcg@10"), n_without=12, name="set", **fields):
    """A result on ``n`` queries with nasty texts, ids and types, of which ``share`` score 1."""
    rng = np.random.default_rng(seed)
    values = (rng.random(n) < share).astype(float)
    ids = tuple(f"q{i} {NASTY[i % 3]}" for i in range(n))
    without = [f"u{i}" for i in range(n_without)]
    order = [["good", "bad", "other"] if value else ["bad", "good", "other"] for value in values]
    hits = {
        q: [(f"{d}{i}", 0.9 - 0.1 * j) for j, d in enumerate(docs)]
        for i, (q, docs) in enumerate(zip(ids, order, strict=True))
    }
    hits |= {q: [("other0", 0.3 + 0.05 * i)] for i, q in enumerate(without)}
    body = {
        "hits": hits,
        "qrels": {q: {f"good{i}": 1} for i, q in enumerate(ids)} | {q: {} for q in without},
        "queries": {q: f"{NASTY[i % len(NASTY)]} {i}" for i, q in enumerate([*ids, *without])},
        "groups": {q: NASTY[i % 4] for i, q in enumerate(ids)} | dict.fromkeys(without, "no-answer"),
        "timing": {"encode": 1.5, "total": 2.0, "documents_per_second": 1234.5, "query_ms_p50": 3.25},
        "provenance": {"data": "abc", "name": name, "model": NASTY[0], "prompts": {"query": NASTY[1]}},
        "findings": (Finding("x", "warning", f"odd {NASTY[0]}", 2, (NASTY[1],), f"do {NASTY[2]}"),),
        **fields,
    }
    counts = {"n_scored": n, "n_unanswerable": n_without, "n_documents": 3 * n}
    return Result(dict.fromkeys(metrics, float(values.mean())), dict.fromkeys(metrics, values), ids, counts, **body)


def golden_of(result):
    """The golden set of a result, with a nasty text for every document."""
    docs = sorted({d for hits in result.hits.values() for d, _ in hits} | {d for g in result.qrels.values() for d in g})
    corpus = {d: f"{NASTY[i % len(NASTY)]} text of {d}" for i, d in enumerate(docs)}
    return GoldenSet(result.queries, corpus, result.qrels, name=NASTY[0])


def write_run(folder, shares, *, failed=(), every=10, sets=(None,), n=60):
    """A run folder: step-0 to step-N, with a share of right queries each."""
    home = folder / "fullrank"
    home.mkdir(parents=True)
    lines = []
    for i, share in enumerate(shares):
        step = i * every
        if step in failed:
            error = f"Traceback\nValueError: {NASTY[0]}"
            lines.append(Evaluation(step, float(i), "failed", seconds=1.0, error=error))
            continue
        results = {name: make_result(share, n, seed=i, name=name or "set") for name in sets}
        for name, result in results.items():
            result.save(home / (f"step-{step}.json" if name is None else f"step-{step}.{name}.json"))
        metrics = {m if s is None else f"{s}/{m}": v for s, r in results.items() for m, v in r.metrics.items()}
        lines.append(Evaluation(step, float(i), "ok", next(iter(metrics.values())), metrics, 1.5))
    (home / "history.jsonl").write_text("".join(json.dumps(line.as_dict()) + "\n" for line in lines))
    return folder


class Page(HTMLParser):
    """What a browser makes of a page: tags with their attributes, and the text that is seen."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.seen, self._style = [], [], 0
        self.feed(text)
        self.close()
        self.text = " ".join("".join(self.seen).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._style += tag in ("style", "script")

    def handle_endtag(self, tag):
        self._style -= tag in ("style", "script")

    def handle_data(self, data):
        if not self._style:
            self.seen.append(data)


def page_of(source, tmp_path, **options):
    text = write_report(source, tmp_path / "out.html", **options).read_text(encoding="utf-8")
    return Page(text), text


def errors_of(text):
    """Returns what a parser that follows the HTML standard to the letter has to object to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the old library that TensorBoard carries
        html5lib = pytest.importorskip("tensorboard._vendor.bleach._vendor.html5lib")
        parser = html5lib.HTMLParser(strict=False)
        parser.parse(text)
    return parser.errors


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / 'my <b>run</b> "🚀"', [0.3, 0.5, 0.4, 0.8, 0.6], failed=(20,))


@pytest.fixture(scope="module")
def written(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    golden = golden_of(make_result(0.8, seed=3))
    return page_of(run_folder, folder, golden=golden, guards={"ndcg@10": 0.45})


# ------------------------------------------------------------------------------------------------ one whole page


def test_the_page_is_valid_html(written):
    page, text = written
    assert errors_of(text) == []
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', text))
    assert used <= set(ids)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')


def test_the_page_needs_nothing_beside_it_and_runs_nothing(written):
    page, _ = written
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base", "form", "input"}
    for tag, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
        for name in ("href", "src", "xlink:href"):
            assert attrs.get(name, "#").startswith("#"), (tag, attrs)
        assert "url(" not in attrs.get("style", "").replace("url(#", "")
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_texts_of_the_data_are_shown_as_they_stand(written):
    page, text = written
    for nasty in NASTY[:6]:
        assert " ".join(nasty.split()) in page.text, nasty
    assert "bell �, null �, half �, line" in page.text
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", text)
    assert "{{ 7 * 7 }}" in page.text


def test_the_verdict_comes_first_and_every_part_is_there(written):
    page, text = written
    assert "Best: step 30 by recall@1: +" in page.text
    assert "better than the base model." in page.text
    headings = [html.unescape(re.sub("<.*?>", "", found)) for found in re.findall(r"<h2>(.*?)</h2>", text)]
    assert headings == [
        "Curves",
        "Base against best",
        "By query type",
        "Wins and losses",
        "Worst queries",
        "Queries without an answer",
        "Missing labels",
        "Guards",
        "Checks",
        "Time",
        "Evaluations",
        "All queries",
        "Where the numbers come from",
    ]
    assert text.index("Best: step 30") < text.index("<h2>")


def test_every_figure_says_in_words_what_it_shows(written):
    page, text = written
    figures = [attrs for tag, attrs in page.tags if attrs.get("role") == "img"]
    assert len(figures) == sum(tag == "svg" for tag, _ in page.tags) == 4
    for attrs in figures:
        assert len(attrs["aria-label"]) > 20
    assert "at 5 evaluations, of which 1 failed; step 30 was kept" in figures[0]["aria-label"]
    assert "failed: 1, no value" in text


def test_light_dark_print_and_phone(written):
    _, text = written
    for rule in ("prefers-color-scheme: dark", "@media print", "overflow-x: auto", "max-width: 40rem"):
        assert rule in text
    assert 'name="viewport"' in text
    assert not re.search(r"#01020\d", text)  # the colours that stand for variables
    tables, scrolled = text.count("<table"), len(re.findall(r'class="scroll"[^>]*>\s*<table', text))
    assert tables == scrolled


def test_the_numbers_are_those_of_the_results(run_folder, written):
    page, _ = written
    base = Result.load(run_folder / "fullrank" / "step-0.json")
    best = Result.load(run_folder / "fullrank" / "step-30.json")
    for result in (base, best):
        low, high = result.ci("recall@1")
        assert f"{result.metrics['recall@1']:.4f}" in page.text
        assert f"{low:.4f} to {high:.4f}" in page.text
    assert f"{len(best.holes())} unjudged documents rank above the answers" in page.text


def test_a_failed_evaluation_has_no_value(written):
    _, text = written
    row = re.search(r'<tr class="failed">.*?</tr>', text)[0]
    assert re.findall(r"<td[^>]*>(.*?)</td>", row)[1:4] == [
        "failed",
        '<span class="none">–</span>',
        '<span class="none">–</span>',
    ]
    assert "ValueError" in row


def test_times_have_their_units(written):
    page, _ = written
    for part in ("one query, p50 3.25 ms", "documents per second 1,234", "encode 1.50 s"):
        assert part.replace(" ", "") in page.text.replace(" ", "")


def test_a_finding_of_results_and_data_stands_once(tmp_path):
    result = make_result(0.5)
    again = golden_of(result).check()
    assert again
    page, _ = page_of(dataclasses.replace(result, findings=tuple(again)), tmp_path, golden=golden_of(result))
    assert page.text.count(again[0].message) == 1


def test_a_guard_below_its_floor_is_named(written):
    _, text = written
    row = re.search(r'<section id="guards">.*?</section>', text, re.S)[0]
    assert "0.4500" in row
    assert re.search(r"<td>0(, \d+)*</td>", row)  # the base is below


# ------------------------------------------------------------------------------------------------ sizes and shapes


def test_a_thousand_queries_stay_small(tmp_path):
    folder = write_run(tmp_path / "run", [0.4, 0.6], n=1_000)
    _, text = page_of(folder, tmp_path, golden=golden_of(make_result(0.6, 1_000, seed=1)))
    assert len(text.encode()) < 1_000_000
    assert errors_of(text) == []


def test_a_thousand_evaluations(tmp_path):
    home = tmp_path / "run" / "fullrank"
    home.mkdir(parents=True)
    lines = [Evaluation(i, i / 100, "ok", 0.3 + i / 2_000, {"recall@1": 0.3 + i / 2_000}, 1.0) for i in range(1_000)]
    (home / "history.jsonl").write_text("".join(json.dumps(line.as_dict()) + "\n" for line in lines))
    for step in (0, 999):
        make_result(0.3 + step / 2_000, seed=step).save(home / f"step-{step}.json")
    page, text = page_of(tmp_path / "run", tmp_path)
    assert "Best: step 999" in page.text
    assert "All 1000 evaluations" in page.text
    assert len(text.encode()) < 1_000_000


def test_one_evaluation(tmp_path):
    page, text = page_of(write_run(tmp_path / "run", [0.4]), tmp_path)
    assert "One evaluation, of the base model" in page.text
    assert errors_of(text) == []


def test_nothing_beat_the_base(tmp_path):
    page, _ = page_of(write_run(tmp_path / "run", [0.9, 0.3]), tmp_path)
    assert "Nothing beat the base model" in page.text


def test_all_failed(tmp_path):
    page, text = page_of(write_run(tmp_path / "run", [0.9, 0.3], failed=(0, 10)), tmp_path)
    assert "No evaluation succeeded: nothing was chosen" in page.text
    assert errors_of(text) == []


def test_several_golden_sets(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8], sets=("dev", "faq"))
    page, text = page_of(folder, tmp_path)
    assert "Best: step 10 by dev/recall@1" in page.text
    assert "Golden set faq" in page.text
    page, _ = page_of(folder, tmp_path, metric="faq/recall@1")
    assert "by faq/recall@1" in page.text
    assert "Golden set dev" in page.text
    assert errors_of(text) == []


def test_a_weighted_sum_has_no_interval_of_one_metric(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    path = folder / "fullrank" / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "score": line["score"] / 2 + 0.1}) + "\n" for line in lines))
    assert "Best: step 10 by objective" in page_of(folder, tmp_path)[0].text
    assert read_run_folder(folder).intervals == {}


def test_what_did_not_choose_is_not_said_to_have(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    with pytest.raises(SettingError, match="'map@3' did not choose in this run; what did is 'recall@1', 'ndcg@10'"):
        write_report(folder, tmp_path / "out.html", metric="map@3")
    assert "by ndcg@10" in page_of(folder, tmp_path, metric="ndcg@10")[0].text


def test_a_step_of_an_abandoned_branch_is_no_point_of_the_curve(tmp_path):
    """Resumed at step 10: the stored best of step 20 stays a candidate and is marked, but the line goes on without."""
    folder = write_run(tmp_path / "run", [0.3, 0.4, 0.9, 0.5])
    path = folder / "fullrank" / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["note"] = "abandoned branch"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], lines[3], lines[2]]))
    page, text = page_of(folder, tmp_path)
    assert "Best: step 20" in page.text
    assert "best; abandoned branch" in page.text
    (line,) = re.findall(
        r'<path d="([^"]*)" clip-path="[^"]*" style="[^"]*stroke: var\(--main\); stroke-width: 1.5', text
    )
    assert line.count(" L ") == 2


def rewritten(folder, change):
    """Changes the lines of a journal."""
    path = folder / "fullrank" / "history.jsonl"
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_weighted_sum_is_shown_as_one(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8], sets=("faq", "dev"))
    rewritten(folder, lambda lines: [{**line, "score": line["score"] / 2 + 0.1} for line in lines])
    rule = {"select": {"faq/recall@1": 0.3, "dev/ndcg@10": 0.7}}
    (folder / "fullrank" / "rules.json").write_text(json.dumps(rule))
    run = read_run_folder(folder)
    before, after = (line.score for line in run.history)
    assert (run.metric, run.best.provenance["name"]) == ("ndcg@10", "dev")
    page, _ = page_of(folder, tmp_path)
    assert f"Best: step 10 by objective: {before:.4f} -> {after:.4f}. Of it dev/ndcg@10: +" in page.text


def test_a_base_model_that_was_not_scored_is_not_said_to_be_beaten(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    rewritten(folder, lambda lines: lines[1:])
    assert "The base model was not scored in this run" in page_of(folder, tmp_path)[0].text


def test_a_step_that_a_guard_blocked_is_said_to_have_scored_higher(tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.9, 0.3])
    (folder / "fullrank" / "guards.json").write_text('{"guard/faq/ndcg@10": 0.6}')

    def blocked(lines):
        lines[1] |= {"note": "not eligible", "metrics": lines[1]["metrics"] | {"guard/faq/ndcg@10": 0.5}}
        return lines

    rewritten(folder, blocked)
    score = read_run_folder(folder).history[1].score
    page, text = page_of(folder, tmp_path)
    assert "Nothing beat the base model: no eligible step scored a higher recall@1 than step 0" in page.text
    assert (
        f"Step 10 scored higher, recall@1 {score:.4f}, but was not eligible: guard/faq/ndcg@10 0.5000 lies below its "
        "floor 0.6000. Step 0 is the best eligible one."
    ) in page.text
    assert "floor 0.6000" in text  # without any option
    said = "warning: step 10 lost 9.00 points of ndcg@10 on 'faq'; 2 are allowed, so it is not eligible. Try less."
    rewritten(folder, lambda lines: [lines[0], lines[1] | {"findings": [said]}, lines[2]])
    assert "but was not eligible: step 10 lost 9.00 points of ndcg@10 on 'faq'; 2" in page_of(folder, tmp_path)[0].text


def test_the_number_that_was_not_chosen_by_is_the_headline(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    make_result(0.4, seed=7, name="test").save(folder / "fullrank" / "confirm-base.json")
    assert "Confirmed" not in page_of(folder, tmp_path)[0].text
    now = make_result(0.7, seed=8, name="test")
    now.save(folder / "fullrank" / "confirm.json")
    low, high = now.ci("recall@1")
    says = f"Confirmed on 'test', which did not choose: recall@1 {now['recall@1']:.4f} [{low:.3f}, {high:.3f}], +"
    page, text = page_of(folder, tmp_path)
    assert page.text.index(says) < page.text.index("Best: step 10")
    assert "Golden set test, which did not choose" in page.text
    assert "recall@1, confirmed" in page.text
    assert errors_of(text) == []
    markdown = html.unescape(write_report(folder, tmp_path / "out.md").read_text())
    assert markdown.splitlines()[2].startswith(f"**{says}")


def test_the_best_of_an_abandoned_branch_keeps_its_own_line(tmp_path):
    """Resumed at step 0: step 10 was evaluated again, and its file is that of the second time."""
    folder = write_run(tmp_path / "run", [0.3, 0.1, 0.2])
    home, best = folder / "fullrank", make_result(0.9, seed=9)
    store = BestStore(home / "best")
    store.offer(10, best["recall@1"], lambda path: best.save(path / result_name("result", "set")))
    gone = {"step": 10, "epoch": 1.0, "status": "ok", "score": best["recall@1"], "metrics": best.metrics}
    rewritten(folder, lambda lines: [lines[0], {**gone, "seconds": 1.0, "note": "abandoned branch"}, *lines[1:]])
    _, text = page_of(folder, tmp_path)
    low, high = best.ci("recall@1")
    (row,) = re.findall(r'<tr class="best">.*?</tr>', text)
    assert f"{best['recall@1']:.4f}" in row
    assert f"{low:.4f} to {high:.4f}" in row
    assert f">best: step 10, {best['recall@1']:.4f}</text>" in text


def test_a_bad_line_of_a_journal_is_a_note(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    path = folder / "fullrank" / "history.jsonl"
    for bad in ('{"step": 20, "ep', "[" * 100_000):
        path.write_text(path.read_text().split("\n", 2)[0] + "\n" + path.read_text().split("\n", 2)[1] + f"\n{bad}\n")
        page, _ = page_of(folder, tmp_path)
        assert "Best: step 10" in page.text
        assert "history.jsonl, line 3: not an entry of a journal" in page.text


def test_names_that_look_like_formulas_are_names(tmp_path):
    """Matplotlib reads text between dollar signs as mathematics, and raises where it is none."""
    odd = r"a $\frac{$ b $x_1^2$"
    folder = write_run(tmp_path / "run", [0.3, 0.8], sets=(odd, "faq"))
    for step in (0, 10):
        (folder / "fullrank" / f"step-{step}.{odd}.json").rename(folder / "fullrank" / result_name(f"step-{step}", odd))
    _, text = page_of(folder, tmp_path, guards={f"{odd}/ndcg@10": 0.2})
    assert text.count(f">{odd}/recall@1</text>") == 1
    assert text.count(f">{odd}/ndcg@10</text>") == 1
    _, text = page_of([make_result(0.3), make_result(0.8, name=odd)], tmp_path)
    assert f">{odd}</text>" in text
    with pytest.raises(SettingError, match="unknown metric"):
        write_report(make_result(0.5, metrics=(odd,)), tmp_path / "no.html")


def test_the_fullrank_folder_itself(run_folder, tmp_path):
    page, _ = page_of(run_folder / "fullrank", tmp_path)
    assert "Best: step 30" in page.text


# ------------------------------------------------------------------------------------------------ results


def test_results_the_first_is_the_base(tmp_path):
    paths = [
        make_result(s, seed=i).save(tmp_path / f"{n}.json")
        for i, (s, n) in enumerate([(0.3, "base"), (0.8, "a $b$"), (0.5, "c")])
    ]
    page, text = page_of(paths, tmp_path)
    assert "a $b$ against base" in page.text
    assert "better than base." in page.text
    assert "p (Holm)" in page.text
    assert errors_of(text) == []
    page, text = page_of(make_result(0.5), tmp_path)
    assert re.search(r"recall@1 0\.\d{4} \[0\.\d{4}, 0\.\d{4}\] over 60 queries\.", page.text)
    assert errors_of(text) == []


def test_results_of_other_data_are_shown_and_not_compared(tmp_path):
    other = make_result(0.8, seed=1, provenance={"data": "xyz", "name": "other"})
    page, text = page_of([make_result(0.3), other], tmp_path)
    assert "not compared: the two results differ in data" in page.text
    assert "Wins and losses" not in page.text
    assert errors_of(text) == []


def test_a_bad_file_of_several_is_a_note(tmp_path):
    files = [make_result(s, seed=i).save(tmp_path / f"{i}.json") for i, s in enumerate([0.3, 0.8])]
    (tmp_path / "bad.json").write_text("{")
    page, _ = page_of([files[0], tmp_path / "bad.json", files[1]], tmp_path)
    assert "bad.json is not a result file" in page.text
    assert "better than 0." in page.text


def test_files_of_one_name_are_told_apart_by_their_folder(tmp_path):
    files = []
    for i, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        files.append(make_result(0.3 + i / 2, seed=i).save(tmp_path / folder / "result.json"))
    assert "b/result against a/result" in page_of(files, tmp_path)[0].text


def test_one_refused_comparison_does_not_drop_the_others(tmp_path):
    base, best = (make_result(s, seed=i, metrics=("recall@1", "mrr")) for i, s in enumerate([0.3, 0.8]))
    base, best = (
        dataclasses.replace(r, provenance={**r.provenance, "truncated_run": cut})
        for r, cut in ((base, False), (best, True))
    )
    page, _ = page_of([base, best], tmp_path)
    assert "mrr not compared: the two results differ in truncated_run; evaluate both on the same data" in page.text
    assert "recall@1: +" in page.text
    assert "allow" not in page.text


def test_query_types_are_those_of_one_result(tmp_path):
    base, best = make_result(0.3, seed=1), make_result(0.8)
    moved = dict.fromkeys(base.query_ids, "a") | {base.query_ids[0]: "b"}
    base, best = (
        dataclasses.replace(base, groups=moved),
        dataclasses.replace(best, groups=dict.fromkeys(best.query_ids, "a")),
    )
    (row,) = group_rows(base, best, "recall@1")
    assert (row["base"], row["best"]) == (base["recall@1"], best["recall@1"])
    assert row["delta"] == pytest.approx(100 * (row["best"] - row["base"]))


def test_names_with_signs_that_no_page_can_hold(tmp_path):
    for name in ("a\x01b", "a\udcffb"):
        _, text = page_of([make_result(0.3), make_result(0.8, name=name)], tmp_path)
        assert "a\ufffdb</text>" in text


def test_percentages_keep_what_matters(tmp_path):
    assert [percent(x) for x in (0.025, 0.001, 0.5, 1.0, 0.0)] == ["2.5", "0.1", "50", "100", "0"]
    assert percent(0.99996) == "99.996"
    page, _ = page_of(make_result(0.5), tmp_path, max_false_answer_rate=0.025)
    assert "at most 2.5 % of the 12 queries" in page.text


def test_values_of_bounds_stand_without_an_interval(tmp_path):
    bound = make_result(0.8, bound=True)
    bound.counts["n_ranked"] = 90
    text = write_report([make_result(0.3), bound], tmp_path / "out.md").read_text()
    assert f"| &lt;= {bound['recall@1']:.4f} | – |" in text
    assert f"<= {bound['recall@1']:.4f}" in page_of(bound, tmp_path)[0].text


def test_bounds_are_called_bounds(tmp_path):
    bound = make_result(0.8, bound=True)
    bound.counts["n_ranked"] = 90
    page, _ = page_of(bound, tmp_path)
    assert page.text.count("Upper bounds, not scores: 50% of the corpus was ranked.") == 2


def test_without_unanswerable_queries_it_says_so(tmp_path):
    page, _ = page_of(make_result(0.5, n_without=0), tmp_path)
    assert "Not measured: all 60 queries have an answer" in page.text


def test_the_target_of_the_threshold_can_be_set(tmp_path):
    page, _ = page_of(make_result(0.5), tmp_path, max_false_answer_rate=0.25)
    assert "answers at most 25 % of the 12 queries without an answer" in page.text
    with pytest.raises(SettingError, match="must lie between 0 and 1"):
        write_report(make_result(0.5), tmp_path / "no.html", max_false_answer_rate=2)


def test_results_without_lists_texts_or_types(tmp_path):
    bare = make_result(0.5, hits={}, queries={}, groups={}, qrels={}, provenance={}, timing={}, findings=())
    page, text = page_of(bare, tmp_path)
    assert "No findings." in page.text
    assert errors_of(text) == []


# ------------------------------------------------------------------------------------------------ what is wrong


def test_what_cannot_be_read_is_named_and_left_out(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    path = folder / "fullrank" / "step-10.json"
    path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 99'))
    page, text = page_of(folder, tmp_path)
    assert "step-10.json has the schema version 99; this fullrank reads version 1" in page.text
    assert "Best: step 10 by recall@1." in page.text
    path.unlink()
    assert "there is no result of the best step" in page_of(folder, tmp_path)[0].text
    assert errors_of(text) == []


def test_damaged_event_files_are_named(tmp_path):
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    (folder / "runs" / "x").mkdir(parents=True)
    (folder / "runs" / "x" / "events.out.tfevents.1.h.1").write_bytes(b"\x00garbage" * 50)
    assert "Best: step 10" in page_of(folder, tmp_path)[0].text


def test_huge_event_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("fullrank.runfolder.MAX_EVENT_BYTES", 100)
    folder = write_run(tmp_path / "run", [0.3, 0.8])
    (folder / "runs" / "x").mkdir(parents=True)
    (folder / "runs" / "x" / "events.out.tfevents.1.h.1").write_bytes(b"x" * 101)
    assert "have 0 MiB and were not read" in page_of(folder, tmp_path)[0].text


def test_in_batch_curves_come_from_the_events(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    folder = write_run(tmp_path / "run", [0.3, 0.8])
    with SummaryWriter(str(folder / "runs" / "x")) as writer:
        for step in range(5):
            writer.add_scalar("train/in_batch_acc", 0.5 + step / 10, step)
            writer.add_scalar("train/loss", 1 / (1 + step), step)
    page, text = page_of(folder, tmp_path)
    assert "Below: in-batch accuracy, loss." in page.text
    assert text.count(">in-batch accuracy</text>") == 1


def test_in_batch_numbers_that_go_another_way_are_a_warning(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    folder = write_run(tmp_path / "run", [0.9, 0.7, 0.5, 0.3, 0.1])
    with SummaryWriter(str(folder / "runs" / "x")) as writer:
        for step in range(41):
            writer.add_scalar("train/in_batch_acc", 0.5 + step / 100, step)
    page, _ = page_of(folder, tmp_path)
    assert "warning" in page.text
    assert "in-batch accuracy" in page.text.split("Checks")[-1]


def test_other_data_gives_a_note(tmp_path):
    result = make_result(0.5)
    page, _ = page_of(result, tmp_path, golden=golden_of(result))
    assert "is not that of the results (abc): texts are shown by id" in page.text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "missing.json", "missing.json: there is no such file"),
        (lambda p: (p / "x.json").write_text("{}") and p / "x.json", "x.json is not a result file"),
        (lambda p: p, "holds no run: expected a history.jsonl"),
        (lambda p: [], "there is no result to report on"),
        (lambda p: Result({}, {}, (), {}), "holds no metric or no query"),
    ],
)
def test_nothing_to_report_on_is_one_clear_error(tmp_path, make, says):
    with pytest.raises(DataError) as caught:
        write_report(make(tmp_path), tmp_path / "out.html")
    assert says in str(caught.value)
    assert not (tmp_path / "out.html").exists()


def test_other_bad_settings(run_folder, tmp_path):
    with pytest.raises(SettingError, match="is a folder; a report is of one run folder, or of result files"):
        write_report([run_folder, tmp_path / "r.json"], tmp_path / "out.html")
    with pytest.raises(SettingError, match="was not computed"):
        write_report(make_result(0.5), tmp_path / "out.html", metric="map@3")


def test_a_journal_that_is_none_is_one_clear_error(tmp_path):
    folder = write_run(tmp_path / "run", [0.3])
    (folder / "fullrank" / "history.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match=r"history\.jsonl, line 1: not an entry of a journal"):
        write_report(folder, tmp_path / "out.html")


# ------------------------------------------------------------------------------------------------ Markdown


def test_markdown_shows_markup_as_text(run_folder, tmp_path):
    text = write_report(run_folder, tmp_path / "out.md", golden=golden_of(make_result(0.8, seed=3))).read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        markdown = pytest.importorskip("markdown")
        page = Page(markdown.markdown(text, extensions=["tables"]))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "svg", "a", "b", "title"}
    assert page.text.count("recall@1") >= 2
    assert "Best: step 30 by recall@1: +" in text.splitlines()[2]


def test_markdown_is_the_expected_file(tmp_path):
    def make(right, name):
        ids = ("q1", "q2", "q3", "q4")
        values = np.array([1.0] * right + [0.0] * (4 - right))
        hits = {q: [("good", 0.9), ("x", 0.5)] if i < right else [("x", 0.8), ("good", 0.6)] for i, q in enumerate(ids)}
        return Result(
            {"recall@1": right / 4},
            {"recall@1": values},
            ids,
            {"n_unanswerable": 2, "n_documents": 3},
            hits={**hits, "u1": [("x", 0.55)], "u2": [("x", 0.3)]},
            qrels={**{q: {"good": 1} for q in ids}, "u1": {}, "u2": {}},
            queries={q: f"question {q}" for q in ids},
            groups={"q1": "fact", "q2": "fact", "q3": "how-to|x", "q4": "how-to|x"},
            provenance={"name": name, "data": "abc"},
        )

    text = write_report([make(1, "base"), make(3, "tuned")], tmp_path / "out.md").read_text()
    assert text == (Path(__file__).parent / "expected" / "report.md").read_text()


def test_markdown_tables_have_the_columns_of_their_heads(run_folder, tmp_path):
    text = write_report(run_folder, tmp_path / "out.md").read_text()
    tables = [block.splitlines() for block in text.split("\n\n") if block.lstrip().startswith("|")]
    assert len(tables) >= 2
    for rows in tables:
        assert len({row.count("|") for row in rows}) == 1, rows
        assert set(rows[1]) <= set("|-:")


def test_markdown_of_one_result(tmp_path):
    text = write_report(make_result(0.5), tmp_path / "out.md").read_text()
    assert "| metric | value | 95 % interval |" in text


# ------------------------------------------------------------------------------------------------ what it needs


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_the_extra_it_says_how_to_install_it(run_folder, tmp_path, monkeypatch, package):
    class Gone:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Gone(), *sys.meta_path])
    _templates.cache_clear()
    with pytest.raises(MissingExtraError, match=rf"'{package}[.\w]*' is needed .* pip install 'fullrank\[report\]'"):
        write_report(run_folder, tmp_path / "out.html")


def test_the_wheel_holds_the_templates(tmp_path, request):
    root, copy = request.config.rootpath, tmp_path / "copy"
    shutil.copytree(root / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    run = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        pytest.skip(f"no wheel can be built here: {run.stderr[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("report.html.j2", "report.css", "report.md.j2", "golden/README.md", "golden/golden.jsonl"):
        assert f"fullrank/templates/{name}" in names
