"""Golden sets made by hand: the template, what is missing, labels out and back in."""

import csv
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank import GoldenSet, Result, load_golden
from fullrank._errors import DataError, SettingError
from fullrank.labelling import COLUMNS, golden_gaps, init_golden, merge_labels, write_holes

CORPUS = {"d1": "first", "d2": "second", "d3": "third", "=d4": "=1+1", "d 5": "fifth"}
GOLDEN = [
    '{"id": "q1",  "query": "one", "relevant": ["d1"], "type": "fact", "note": "kept as it is"}',
    "",
    '{"id": "q2", "query": "two", "relevant": {"d2": 2}, "own": [1, 2]}',
    '{"id": "q3", "query": "none", "relevant": []}',
]


@pytest.fixture
def golden_file(tmp_path):
    rows = [json.dumps({"_id": key, "text": text}) for key, text in CORPUS.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    path = tmp_path / "golden.jsonl"
    path.write_text("\n".join(GOLDEN) + "\n")
    return path


def make_result(holes, queries=None):
    """A result in which these (query, document, score) stand unjudged above the answers."""
    ids = tuple(dict.fromkeys(q for q, *_ in holes))
    hits = {q: sorted([(d, s) for p, d, s in holes if p == q], key=lambda hit: -hit[1]) for q in ids}
    values = np.zeros(len(ids))
    qrels = {q: {"answer": 1} for q in ids}
    return Result({"recall@1": 0.0}, {"recall@1": values}, ids, {}, hits=hits, qrels=qrels, queries=queries or {})


def labels(path, rows, header="query_id,document_id,grade"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ the template


def test_the_template_loads_and_says_what_it_lacks(tmp_path):
    assert [path.name for path in init_golden(tmp_path / "new")] == ["README.md", "corpus.jsonl", "golden.jsonl"]
    golden = load_golden(tmp_path / "new" / "golden.jsonl")
    share = 1 - golden.n_answerable / len(golden.queries)
    assert 0.10 <= share <= 0.20
    assert len(set(golden.groups.values())) >= 3
    assert not [finding for finding in golden.check() if finding.severity == "error"]
    gaps = {finding.kind: str(finding) for finding in golden_gaps(golden)}
    assert gaps["golden-size"].startswith("info: 14 of the 50 to 200 questions")
    assert "Add 36 or more" in gaps["golden-size"]
    assert "unanswerable-share" not in gaps
    rows = [json.loads(line) for line in (tmp_path / "new" / "golden.jsonl").read_text().splitlines()]
    assert all(row["note"] for row in rows)


def test_the_template_is_not_written_over_another(tmp_path):
    (tmp_path / "golden.jsonl").write_text("mine")
    with pytest.raises(SettingError, match=r"golden\.jsonl is there already and is not written over"):
        init_golden(tmp_path)
    assert (tmp_path / "golden.jsonl").read_text() == "mine"
    assert not (tmp_path / "corpus.jsonl").exists()
    with pytest.raises(SettingError, match="is a file; name a folder"):
        init_golden(tmp_path / "golden.jsonl")


def make_golden(n, n_without, groups=None):
    queries = {f"q{i}": f"question {i}" for i in range(n)}
    qrels = {q: {} if i < n_without else {"d": 1} for i, q in enumerate(queries)}
    return GoldenSet(queries, {"d": "x", "e": "y"}, qrels, groups=groups and dict.fromkeys(queries, groups))


@pytest.mark.parametrize(
    ("n", "n_without", "groups", "kinds"),
    [
        (60, 9, "fact", []),
        (60, 6, "fact", []),
        (60, 12, "fact", []),
        (60, 13, "fact", ["unanswerable-share"]),
        (60, 0, "fact", ["unanswerable-share"]),
        (60, 9, None, ["no-types"]),
        (49, 7, "fact", ["golden-size"]),
        (4, 0, "fact", ["golden-size", "unanswerable-share", "few-of-a-type"]),
    ],
)
def test_what_a_set_lacks(n, n_without, groups, kinds):
    assert [finding.kind for finding in golden_gaps(make_golden(n, n_without, groups))] == kinds


# ------------------------------------------------------------------------------------------------ out


HOLES = [("q1", "d2", 0.9), ("q2", "=d4", 0.8), ("q1", "d 5", 0.7)]


def test_holes_as_jsonl(tmp_path, golden_file):
    result = make_result(HOLES, {"q1": "one\nline", "q2": "two"})
    path = write_holes(result, tmp_path / "h.jsonl", golden=load_golden(golden_file))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == dict(zip(COLUMNS, ("q1", "one line", "d2", "second", 0.9, None), strict=True))
    assert [(row["query_id"], row["document_id"]) for row in rows] == [(q, d) for q, d, _ in HOLES]


def test_holes_as_csv_run_nothing_in_a_spreadsheet(tmp_path, golden_file):
    path = write_holes(make_result(HOLES, {"q2": "@two"}), tmp_path / "h.csv", golden=load_golden(golden_file))
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    header, *rows = csv.reader(path.read_text(encoding="utf-8-sig").splitlines())
    assert tuple(header) == COLUMNS
    assert rows[1] == ["q2", "'@two", "'=d4", "'=1+1", "0.8", ""]
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@"))]


def test_holes_are_limited_and_need_a_known_ending(tmp_path):
    assert len(write_holes(make_result(HOLES), tmp_path / "h.jsonl", n=2).read_text().splitlines()) == 2
    assert write_holes(make_result(HOLES), tmp_path / "h.csv").read_text(encoding="utf-8-sig").count("\n") == 4
    with pytest.raises(SettingError, match=r"h\.txt must end in \.csv or \.jsonl"):
        write_holes(make_result(HOLES), tmp_path / "h.txt")
    with pytest.raises(SettingError, match="n=0 must be"):
        write_holes(make_result(HOLES), tmp_path / "h.csv", n=0)


# ------------------------------------------------------------------------------------------------ back in


def test_merging_adds_the_grades_and_keeps_every_other_byte(tmp_path, golden_file):
    found = labels(tmp_path / "l.csv", ["q1,d2,1", "q2,d3,0", "q2,'=d4,1"])
    done = merge_labels(golden_file, found, out=tmp_path / "new.jsonl")
    assert (done.n_added, done.n_relevant, done.n_skipped) == (3, 2, 0)
    lines = (tmp_path / "new.jsonl").read_text().split("\n")
    assert json.loads(lines[0]) == {**json.loads(GOLDEN[0]), "relevant": ["d1", "d2"]}
    assert json.loads(lines[2]) == {**json.loads(GOLDEN[2]), "relevant": {"d2": 2, "d3": 0, "=d4": 1}}
    assert (lines[1], lines[3], lines[4:]) == (GOLDEN[1], GOLDEN[3], [""])
    merged = load_golden(tmp_path / "new.jsonl")
    assert merged.qrels == {"q1": {"d1": 1, "d2": 1}, "q2": {"d2": 2, "d3": 0, "=d4": 1}, "q3": {}}
    assert golden_file.read_text() == "\n".join(GOLDEN) + "\n"


def test_a_list_becomes_grades_where_it_must(tmp_path, golden_file):
    merge_labels(golden_file, labels(tmp_path / "l.csv", ["q1,d2,0"]), out=tmp_path / "new.jsonl")
    assert load_golden(tmp_path / "new.jsonl").qrels["q1"] == {"d1": 1, "d2": 0}


def test_what_was_written_comes_back(tmp_path, golden_file):
    """Out, labelled as a spreadsheet of semicolons writes it, and back."""
    path = write_holes(make_result(HOLES, {"q1": "a; b, c"}), tmp_path / "h.csv", golden=load_golden(golden_file))
    rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=";").writerows([rows[0], *([*row[:-1], "1"] for row in rows[1:])])
    assert merge_labels(golden_file, path, out=tmp_path / "new.jsonl").n_added == 3
    assert load_golden(tmp_path / "new.jsonl").qrels["q2"] == {"d2": 2, "=d4": 1}
    lines = write_holes(make_result(HOLES), tmp_path / "h.jsonl").read_text().splitlines()
    (tmp_path / "h.jsonl").write_text("\n".join(json.dumps({**json.loads(x), "grade": 1}) for x in lines))
    merge_labels(golden_file, tmp_path / "h.jsonl", out=tmp_path / "other.jsonl")
    assert (tmp_path / "other.jsonl").read_text() == (tmp_path / "new.jsonl").read_text()


@settings(deadline=None, max_examples=40)
@given(st.text(alphabet="'=+-@ab\"", min_size=1, max_size=5).filter(lambda text: text.strip()))
def test_any_id_survives_a_spreadsheet(tmp_path_factory, doc_id):
    folder = tmp_path_factory.mktemp("ids")
    (folder / "corpus.jsonl").write_text(json.dumps({"_id": doc_id, "text": "x"}) + "\n")
    (folder / "golden.jsonl").write_text('{"id": "q", "query": "x", "relevant": []}\n')
    path = write_holes(make_result([("q", doc_id, 0.5)]), folder / "h.csv")
    path.write_text("".join(line + ("1\n" if i else "\n") for i, line in enumerate(path.read_text().splitlines())))
    merge_labels(folder / "golden.jsonl", path, out=folder / "new.jsonl")
    assert load_golden(folder / "new.jsonl").qrels == {"q": {doc_id: 1}}


def test_every_bad_row_is_named(tmp_path, golden_file):
    rows = ["q1,d2,", "q9,d2,1", "q1,d9,1", "q1,d3,yes", "q1,d3,1.5", "q1,d3,-1", "q1,d1,0", "q1"]
    with pytest.raises(DataError) as caught:
        merge_labels(golden_file, labels(tmp_path / "l.csv", rows), out=tmp_path / "new.jsonl")
    text = str(caught.value)
    for part in (
        "l.csv: 8 problems",
        "line 2: the grade is empty",
        "line 3: the golden set has no query 'q9'",
        "line 4: the corpus has no document 'd9'",
        "line 5: the grade 'yes' is not a whole number from 0",
        "line 6: the grade '1.5' is not a whole number from 0",
        "and 3 more",
        "with a whole number in every grade",
        "--skip-empty",
    ):
        assert part in text
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["q1,d1,0"], "line 2: query 'q1' and document 'd1' have the grade 0 here, 1 in the golden set"),
        (["q1,d3,0", "q1,d3,1"], "line 3: query 'q1' and document 'd3' have the grade 1 here, 0 further up"),
        (["q1,d3,1,7"], "line 2: expected 3 columns, found 4"),
        (["q1,d3,1000"], "line 2: the grade '1000' is not a whole number from 0"),
        (["q1,d3,²"], "line 2: the grade '²' is not a whole number from 0"),
    ],
)
def test_what_contradicts_is_refused(tmp_path, golden_file, rows, says):
    with pytest.raises(DataError) as caught:
        merge_labels(golden_file, labels(tmp_path / "l.csv", rows), out=tmp_path / "new.jsonl")
    assert says in str(caught.value)


def test_equal_rows_and_grades_that_are_there_are_no_contradiction(tmp_path, golden_file):
    rows = ["q1,d3,1.0", "q1,d3,1", "q1,d1,1"]
    assert merge_labels(golden_file, labels(tmp_path / "l.csv", rows), out=tmp_path / "new.jsonl").n_added == 1


def test_empty_grades_are_skipped_where_that_was_asked_for(tmp_path, golden_file):
    found = labels(tmp_path / "l.csv", ["q1,d2,1", "q1,d3, "])
    done = merge_labels(golden_file, found, out=tmp_path / "new.jsonl", skip_empty=True)
    assert (done.n_added, done.n_skipped) == (1, 1)


def test_nothing_is_written_over(tmp_path, golden_file):
    found = labels(tmp_path / "l.csv", ["q1,d2,1"])
    with pytest.raises(SettingError, match=r"golden\.jsonl is there already; name another file, or pass --overwrite"):
        merge_labels(golden_file, found, out=golden_file)
    merge_labels(golden_file, found, out=golden_file, overwrite=True)
    assert load_golden(golden_file).qrels["q1"] == {"d1": 1, "d2": 1}


def test_the_files_must_be_of_the_kinds_that_are_known(tmp_path, golden_file):
    found = labels(tmp_path / "l.csv", ["q1,d2,1"])
    with pytest.raises(SettingError, match=r"new\.tsv must end in \.jsonl, as golden\.jsonl does"):
        merge_labels(golden_file, found, out=tmp_path / "new.tsv")
    with pytest.raises(DataError, match=r"is no golden \.jsonl and no \.tsv of judgements"):
        merge_labels(tmp_path, found, out=tmp_path / "new.jsonl")
    with pytest.raises(DataError, match=r"must end in \.csv or \.jsonl"):
        merge_labels(golden_file, tmp_path / "l.xlsx", out=tmp_path / "new.jsonl")
    wrong = labels(tmp_path / "w.csv", ["q1,d2,1"], header="query,document_id,grade")
    with pytest.raises(DataError, match="the header has no column 'query_id'"):
        merge_labels(golden_file, wrong, out=tmp_path / "new.jsonl")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match="the header has no column 'query_id'"):
        merge_labels(golden_file, tmp_path / "empty.csv", out=tmp_path / "new.jsonl")
    with pytest.raises(DataError, match=r"only\.csv is empty"):
        merge_labels(golden_file, labels(tmp_path / "only.csv", []), out=tmp_path / "new.jsonl")


def test_marks_line_ends_and_numbers_of_other_lines_stay(tmp_path, golden_file):
    lines = [json.loads(line) for line in golden_file.read_text().splitlines() if line.strip()]
    lines[1]["extra"] = "NUMBER"
    texts = [json.dumps(line).replace('"NUMBER"', "1.50E+1") for line in lines]
    golden_file.write_bytes(("\ufeff" + "\r\n".join(texts)).encode())
    pair = f"{lines[0]['id']},d2,1"
    merge_labels(golden_file, labels(tmp_path / "l.csv", [pair]), out=tmp_path / "new.jsonl")
    before, after = golden_file.read_bytes().split(b"\n"), (tmp_path / "new.jsonl").read_bytes().split(b"\n")
    assert after[1:] == before[1:]
    assert after[0].startswith(b"\xef\xbb\xbf{")
    assert after[0].endswith(b"}\r")
    assert json.loads(after[0].decode("utf-8-sig")) != json.loads(before[0].decode("utf-8-sig"))


def test_judgements_with_windows_line_ends_keep_them(tmp_path):
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": d, "text": t}) + "\n" for d, t in CORPUS.items()))
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "one"}\n')
    old = b"query-id\tcorpus-id\tscore\r\nq1\td1\t1\r\n"
    (folder / "qrels" / "test.tsv").write_bytes(old)
    out = folder / "qrels" / "labelled.tsv"
    merge_labels(folder / "qrels" / "test.tsv", labels(tmp_path / "l.csv", ["q1,d2,0"]), out=out)
    assert out.read_bytes() == old + b"q1\td2\t0\r\n"


def test_judgements_of_a_beir_folder(tmp_path):
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": d, "text": t}) + "\n" for d, t in CORPUS.items()))
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "one"}\n')
    old = "query-id\tcorpus-id\tscore\nq1\td1\t1"
    (folder / "qrels" / "test.tsv").write_text(old)
    out = folder / "qrels" / "labelled.tsv"
    merge_labels(folder / "qrels" / "test.tsv", labels(tmp_path / "l.csv", ["q1,d2,0", "q1,d 5,2"]), out=out)
    assert out.read_text() == old + "\nq1\td2\t0\nq1\td 5\t2\n"
    assert load_golden(folder, "labelled").qrels == {"q1": {"d1": 1, "d2": 0, "d 5": 2}}


def test_a_labelled_hole_is_none_any_more(tiny_st, tiny_golden, tmp_path):
    """The whole way round, with a real model: evaluate, export, label at random, merge, evaluate."""
    from fullrank import evaluate

    corpus = "".join(json.dumps({"_id": d, "text": t}) + "\n" for d, t in tiny_golden.corpus.items())
    (tmp_path / "corpus.jsonl").write_text(corpus)
    rows = [{"id": q, "query": t, "relevant": list(tiny_golden.qrels[q])} for q, t in tiny_golden.queries.items()]
    (tmp_path / "golden.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    golden = load_golden(tmp_path / "golden.jsonl")
    model, rng = tiny_st(), random.Random(0)
    before = evaluate(model, golden)
    assert before.holes()
    path = write_holes(before, tmp_path / "h.jsonl", golden=golden)
    lines = [{**json.loads(line), "grade": rng.randint(0, 1)} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = merge_labels(tmp_path / "golden.jsonl", path, out=tmp_path / "new.jsonl")
    assert done.n_added == len(before.holes())
    after = evaluate(model, load_golden(tmp_path / "new.jsonl"))
    labelled = {(line["query_id"], line["document_id"]) for line in lines}
    assert not labelled & {(q, d) for q, d, _ in after.holes()}
