"""The doors to the report, to missing labels and to golden sets made by hand."""

import json

import numpy as np
import pytest

from fullrank import Result, load_golden


@pytest.fixture
def golden_folder(here, run_main):
    code, out, err = run_main("golden", "init", "golden")
    assert code == 0, err
    assert out.count("written: ") == 3
    assert "fullrank check --data golden/golden.jsonl" in out
    return here / "golden"


@pytest.fixture
def results(here):
    """Two results on the template: base.json and tuned.json."""

    def make(right, path):
        golden = load_golden(here / "golden" / "golden.jsonl")
        ids = [q for q in golden.query_ids if golden.qrels[q]]
        values = np.array([1.0] * right + [0.0] * (len(ids) - right))
        hits = {q: [(next(iter(golden.qrels[q])), 0.9), ("jobs", 0.5)] for q in ids[:right]}
        hits |= {q: [("jobs", 0.8), (next(iter(golden.qrels[q])), 0.6)] for q in ids[right:]}
        hits |= {q: [("jobs", 0.4 + i / 10)] for i, q in enumerate(q for q in golden.query_ids if not golden.qrels[q])}
        return Result(
            {"recall@1": float(values.mean())},
            {"recall@1": values},
            tuple(ids),
            {"n_scored": len(ids), "n_unanswerable": 2, "n_documents": len(golden.corpus)},
            hits=hits,
            qrels={q: dict(g) for q, g in golden.qrels.items()},
            queries=dict(golden.queries),
            groups=dict(golden.groups),
            provenance={"data": golden.fingerprint(), "name": "golden"},
        ).save(here / path)

    def both():
        return make(4, "base.json"), make(11, "tuned.json")

    return both


def test_check_says_what_a_golden_set_lacks(golden_folder, run_main):
    code, out, err = run_main("check", "--data", golden_folder / "golden.jsonl")
    assert code == 0, err
    assert "golden: 24 documents, 14 queries, of which 2 have no answer" in out
    assert "info: 14 of the 50 to 200 questions that a golden set made by hand should have. Add 36 or more" in out
    assert "types with fewer than 5 questions" in out
    code, out, _ = run_main("check", "--data", golden_folder / "golden.jsonl", "--json")
    assert {"golden-size", "few-of-a-type"} <= {finding["kind"] for finding in json.loads(out)}


def test_report_writes_both_forms_and_says_the_verdict(golden_folder, results, run_main, here):
    results()
    data = golden_folder / "golden.jsonl"
    arguments = ("base.json", "tuned.json", "--html", "out/r.html", "--markdown", "out/r.md", "--data", data)
    code, out, err = run_main("report", *arguments)
    assert code == 0, err
    assert out.splitlines()[0].startswith("recall@1: +58.33 points [")
    assert out.splitlines()[1:] == ["written: out/r.html", "written: out/r.md"]
    page = (here / "out" / "r.html").read_text()
    assert "tuned against base" in page
    assert "Open positions are published" in page  # a text of the corpus
    assert (here / "out" / "r.md").read_text().startswith("## tuned against base")


def test_no_output_is_written_over_a_source_or_another(golden_folder, results, run_main, here):
    results()
    before = (here / "base.json").read_bytes()
    code, _, err = run_main("report", "base.json", "--html", "./base.json")
    assert code == 2
    assert "base.json is read by this command and would be written over; name another file" in err
    assert (here / "base.json").read_bytes() == before
    code, _, err = run_main("report", "base.json", "--html", "x.md", "--markdown", "x.md")
    assert (code, (here / "x.md").exists()) == (2, False)
    assert "x.md is written by this command and would be written over" in err


def test_report_as_json_carries_the_threshold(golden_folder, results, run_main):
    results()
    _, out, _ = run_main("report", "base.json", "--json")
    threshold = json.loads(out)["threshold"]
    assert threshold["target"] == 0.05
    assert threshold["false_answer_rate"] == 0
    assert threshold["value"] > 0.5


def test_report_as_json_and_its_default_file(golden_folder, results, run_main, here):
    results()
    code, out, err = run_main("report", "base.json", "--json")
    assert code == 0, err
    body = json.loads(out)
    assert body["written"] == ["report.html"]
    assert body["metrics"][0]["metric"] == "recall@1"
    assert (here / "report.html").is_file()


def test_holes_out_of_a_report_or_of_a_result_and_back_in(golden_folder, results, run_main, here):
    results()
    data = golden_folder / "golden.jsonl"
    code, out, err = run_main("report", "base.json", "--holes", "a.csv", "--data", data)
    assert (code, err) == (0, "")
    assert "report.html" not in out
    code, out, _ = run_main("holes", "base.json", "--out", "b.csv", "--data", data)
    assert code == 0
    assert "8 unjudged documents in b.csv" in out
    assert (here / "a.csv").read_bytes() == (here / "b.csv").read_bytes()
    code, out, _ = run_main("holes", "base.json", "--out", "c.jsonl", "-n", "3")
    assert "3 unjudged documents in c.jsonl" in out

    code, out, err = run_main("golden", "merge", data, "b.csv", "--out", golden_folder / "new.jsonl")
    assert (code, out) == (2, "")
    assert "error: b.csv: 8 problems\n  line 2: the grade is empty" in err
    header, *rows = (here / "b.csv").read_text(encoding="utf-8-sig").splitlines()
    (here / "b.csv").write_text("\n".join([header, *(row + "1" for row in rows[:3]), *rows[3:]]))
    arguments = ("golden", "merge", data, "b.csv", "--out", golden_folder / "new.jsonl", "--skip-empty")
    code, out, err = run_main(*arguments)
    assert code == 0, err
    assert "3 judgements added, 3 of them relevant, 5 rows skipped" in out
    assert sum("jobs" in grades for grades in load_golden(golden_folder / "new.jsonl").qrels.values()) == 3
    code, _, err = run_main(*arguments)
    assert code == 2
    assert "is there already; name another file, or pass --overwrite" in err
    code, out, _ = run_main(*arguments, "--overwrite", "--json")
    assert json.loads(out) == {"golden": str(golden_folder / "new.jsonl"), "added": 3, "relevant": 3, "skipped": 5}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("report", "none.json"), "none.json: there is no such file"),
        (("report", "."), "holds no run: expected a history.jsonl"),
        (("report", "base.json", "--html", "golden"), "golden is a folder; give the name of a file"),
        (("report", "base.json", "--metric", "map@3"), "metric 'map@3' was not computed; there are recall@1"),
        (("report", "base.json", "--data", "nothing"), "'nothing' does not exist"),
        (("holes", "base.json", "--out", "x.txt"), "x.txt must end in .csv or .jsonl"),
        (("holes", "base.json", "--out", "x.csv", "-n", "0"), "n=0 must be a whole number from 1"),
        (("golden", "init", "golden"), "README.md is there already and is not written over"),
        (
            ("golden", "merge", "base.json", "b.csv", "--out", "x.jsonl"),
            "is no golden .jsonl and no .tsv of judgements",
        ),
    ],
)
def test_wrong_input_is_one_error_and_writes_nothing(golden_folder, results, run_main, here, arguments, says):
    results()
    before = sorted(path.name for path in here.iterdir())
    code, out, err = run_main(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert "Traceback" not in err
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.parametrize("words", [("report",), ("holes",), ("golden", "init"), ("golden", "merge")])
def test_help_has_an_example(run_main, words):
    code, out, _ = run_main(*words, "--help")
    assert code == 0
    assert f"Example: fullrank {' '.join(words)} " in " ".join(out.split())


def test_eval_says_when_to_answer(golden_folder, run_main, tiny_bert_path, here):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    modules = [Transformer(str(tiny_bert_path)), Pooling(32, pooling_mode="mean")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(here / "model"))
    code, out, err = run_main("eval", "model", "--data", golden_folder / "golden.jsonl", "--out", "r.json")
    assert code == 0, err
    assert "2 queries without an answer: AUROC " in out
    assert " % of the others" in out
