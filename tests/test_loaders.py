"""Golden sets, judgements and runs are read as they stand in the file, and bad files are refused with reasons."""

import gzip
import importlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import pytest

from fullrank._errors import DataError, MissingExtraError, SettingError
from fullrank.loaders import load_golden, read_qrels, read_run
from fullrank.sources import hub_rows, judgement_columns

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_hub = pytest.mark.skipif(
    not os.environ.get("FULLRANK_TEST_HUB"), reason="needs a hub: set FULLRANK_TEST_HUB=1 where one can be reached"
)

DOCUMENTS = [
    {"_id": "d1", "title": "Paris", "text": "is the capital of France"},
    {"_id": "d2", "title": "", "text": "Rome is in Italy"},
    {"_id": "d3", "text": "Bern"},
]
QUERIES = [
    {"_id": "q1", "text": "capital of France"},
    {"_id": "q2", "text": "Italian city"},
    {"_id": "q9", "text": "dev"},
]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq2\td2\t1\nq2\td3\t0\n"


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def beir(folder: Path, *, documents=DOCUMENTS, queries=QUERIES, qrels: str | bytes = QRELS, end: str = "") -> Path:
    write(folder / f"corpus.jsonl{end}", lines(documents) if isinstance(documents, list) else documents)
    write(folder / f"queries.jsonl{end}", lines(queries) if isinstance(queries, list) else queries)
    write(folder / "qrels" / f"test.tsv{end}", qrels)
    return folder


def refusal(source: object, *args: object, load=load_golden) -> str:
    with pytest.raises(DataError) as caught:
        load(source, *args)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ BEIR folders


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("as_type", [str, Path])
def test_a_beir_folder_loads_with_the_queries_of_its_split(tmp_path, end, as_type):
    golden = load_golden(as_type(beir(tmp_path / "small", end=end)))
    assert golden.name == "small"
    assert golden.queries == {"q1": "capital of France", "q2": "Italian city"}
    assert golden.doc_texts == ["Paris is the capital of France", "Rome is in Italy", "Bern"]
    assert golden.qrels == {"q1": {"d1": 2}, "q2": {"d2": 1, "d3": 0}}
    assert golden.groups is None


def test_another_split_brings_its_own_queries_and_its_name(tmp_path):
    beir(tmp_path / "small")
    write(tmp_path / "small" / "qrels" / "dev.tsv", "query-id\tcorpus-id\tscore\nq9\td3\t1\n")
    golden = load_golden(tmp_path / "small", "dev")
    assert list(golden.queries) == ["q9"]
    assert golden.name == "small-dev"


def test_a_missing_split_lists_those_there_are(tmp_path):
    beir(tmp_path)
    write(tmp_path / "qrels" / "dev.tsv.gz", QRELS)
    write(tmp_path / "qrels" / "train.txt", "q1 0 d1 1\n")
    write(tmp_path / "qrels" / "notes.md", "no split")
    assert "has no split 'val'; there are 'dev', 'test', 'train'" in refusal(tmp_path, "val")


def test_a_split_is_a_name_and_no_path(tmp_path):
    beir(tmp_path / "one")
    beir(tmp_path / "two")
    assert "has no split '../../one/qrels/test'" in refusal(tmp_path / "two", "../../one/qrels/test")


@pytest.mark.parametrize(
    "table",
    [
        "q1\td1\t2\nq2\td2\t1\nq2\td3\t0\n",
        "score\tcorpus-id\tquery-id\n2\td1\tq1\n1\td2\tq2\n0\td3\tq2\n",
        "qid\tpid\tlabel\nq1\td1\t2\nq2\td2\t1\nq2\td3\t0\n",
        "doc_id\tquery_id\trelevance\tnote\nd1\tq1\t2\tx\nd2\tq2\t1\ty\nd3\tq2\t0\t\n",
        "Query-ID\tdocid\tGRADE\nq1\td1\t2.0\nq2\td2\t1\nq2\td3\t0\n",
        "q1\t0\td1\t2\nq2\t0\td2\t1\nq2\t0\td3\t0\n",
        "\ufeff" + QRELS.replace("\n", "\r\n") + "\r\n\r\n",
        "\n\n" + QRELS.replace("\n", "\n\n"),
        QRELS + "q1\td1\t2\n",
        QRELS.removesuffix("\n"),
    ],
    ids=["no header", "order", "qid pid", "extra column", "case", "trec", "bom crlf", "blank", "twice", "no last end"],
)
def test_judgements_are_read_by_column_name(tmp_path, table):
    assert read_qrels(write(tmp_path / "test.tsv", table)) == {"q1": {"d1": 2}, "q2": {"d2": 1, "d3": 0}}


def test_ids_stay_as_they_are_written(tmp_path):
    documents = lines([{"_id": key, "text": "x"} for key in ("007", 7, "1e3", " x")])
    queries = '{"_id": 12, "text": "one"}\n{"_id": "012", "text": "two"}\n'
    golden = load_golden(
        beir(tmp_path, documents=documents, queries=queries, qrels="12\t007\t1\n012\t7\t1\n012\t1e3\t1\n")
    )
    assert golden.doc_ids == ("007", "7", "1e3", " x")
    assert golden.queries == {"12": "one", "012": "two"}
    assert golden.qrels == {"12": {"007": 1}, "012": {"7": 1, "1e3": 1}}


def test_unicode_crlf_blank_lines_and_bom(tmp_path):
    text = "Zürich \u2028 東京 \x85 naïve 🙂\ttab"
    raw = (
        "\ufeff"
        + "\r\n\r\n".join(json.dumps({"_id": f"d{i}", "text": text}, ensure_ascii=i < 3) for i in range(1, 5))
        + "\r\n"
    )
    golden = load_golden(beir(tmp_path, documents=raw, qrels="q1\td1\t1\nq2\td4\t1\n"))
    assert golden.doc_texts == [text] * 4
    ids = "q\u00e9\tdoc\u00a0one\t1\n"
    assert read_qrels(write(tmp_path / "x.tsv", ids)) == {"q\u00e9": {"doc\u00a0one": 1}}
    assert read_qrels(write(tmp_path / "x.txt", "q\u00e9 0 doc\u00a0one 1\n")) == {"q\u00e9": {"doc\u00a0one": 1}}


def test_ids_that_do_not_match_are_dealt_with_as_asked(tmp_path):
    beir(tmp_path, qrels=QRELS + "q1\tzz\t1\nq77\td1\t1\n")
    message = refusal(tmp_path)
    assert "judged queries that are not among the queries: 'q77'" in message
    assert "judged documents that the corpus does not hold: 'zz'" in message
    assert load_golden(tmp_path, missing="keep").qrels["q1"] == {"d1": 2, "zz": 1}
    assert load_golden(tmp_path, missing="drop").qrels == {"q1": {"d1": 2}, "q2": {"d2": 1, "d3": 0}}
    with pytest.raises(SettingError, match="missing='no' is unknown"):
        load_golden(tmp_path, missing="no")  # type: ignore[arg-type]


def test_relevant_from_is_passed_on(tmp_path):
    beir(tmp_path)
    assert load_golden(tmp_path).n_answerable == 2
    assert load_golden(tmp_path, relevant_from=2).answerable.tolist() == [True, False]


@pytest.mark.parametrize("name", ["test.txt", "test.qrels", "test.txt.gz"])
def test_trec_judgements_serve_in_place_of_the_tsv(tmp_path, name):
    beir(tmp_path)
    (tmp_path / "qrels" / "test.tsv").unlink()
    path = write(tmp_path / "qrels" / name, "q1 0 d1 2\nq2\t0\t d2   1\n")
    for source in (tmp_path, path):
        golden = load_golden(source)
        assert golden.qrels == {"q1": {"d1": 2}, "q2": {"d2": 1}}
        assert golden.name == tmp_path.name


def test_a_file_of_judgements_beside_the_texts_is_a_source(tmp_path):
    beir(tmp_path)
    path = write(tmp_path / "hard.tsv", "q9\td1\t1\n")
    golden = load_golden(path)
    assert (list(golden.queries), golden.name) == (["q9"], f"{tmp_path.name}-hard")


# ------------------------------------------------------------------------------------------------ bad sources


def test_a_source_that_does_not_exist_says_what_was_expected(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert "nowhere' does not exist. Expected a folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv" in message
    assert "hf:REPO, ir_datasets:ID or mteb:TASK" in message
    assert "'beir:scifact' does not exist" in refusal("beir:scifact")


def test_a_folder_without_the_files_says_what_is_there(tmp_path):
    assert "is not a golden set: expected corpus.jsonl" in refusal(tmp_path)
    assert "found no files" in refusal(tmp_path)
    beir(tmp_path)
    (tmp_path / "queries.jsonl").rename(tmp_path / "questions.jsonl")
    assert "found 'corpus.jsonl', 'qrels/test.tsv', 'questions.jsonl'" in refusal(tmp_path)
    (tmp_path / "questions.jsonl").rename(tmp_path / "queries.jsonl")
    (tmp_path / "qrels" / "test.tsv").unlink()
    assert "found 'corpus.jsonl', 'queries.jsonl'" in refusal(tmp_path)


def test_files_that_are_no_source(tmp_path):
    beir(tmp_path)
    assert f"is one part of a golden set; pass its folder, {str(tmp_path)!r}" in refusal(tmp_path / "corpus.jsonl")
    assert "is not a kind of file that is known here" in refusal(write(tmp_path / "set.parquet", "x"))
    assert "there is no such file" in refusal(tmp_path / "none.tsv", load=read_qrels)


def test_queries_of_another_data_set(tmp_path):
    message = refusal(beir(tmp_path, qrels="a\td1\t1\n"))
    assert "holds none of the queries that the judgements name, such as 'a'; it holds 'q1', 'q2', 'q9'" in message


# ------------------------------------------------------------------------------------------------ bad rows


def test_all_problems_of_a_file_are_in_one_error(tmp_path):
    bad = "\n".join(['{"_id": "a", "text": "x"}', "", *["{"] * 7, '{"_id": "a", "text": "again"}'])
    message = refusal(beir(tmp_path, documents=bad))
    assert message.splitlines() == [
        f"{tmp_path / 'corpus.jsonl'}: 8 problems",
        *(
            f"  line {n}: broken JSON at column 2: Expecting property name enclosed in double quotes"
            for n in range(3, 8)
        ),
        "  and 3 more",
        'Expected one JSON object a line: {"_id": "...", "title": "...", "text": "..."}; title may be missing.',
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"_id": "x"}', "the field 'text' is missing"),
        ('{"text": "x"}', "the field '_id' or 'id' is missing"),
        ('{"_id": "x", "text": null}', "'text' must be a string, got None"),
        ('{"_id": "x", "text": ["a"]}', "'text' must be a string, got ['a']"),
        ('{"_id": "x", "text": "a", "title": 3}', "'title' must be a string, got 3"),
        ('{"_id": true, "text": "a"}', "an id must be a string, got True"),
        ('{"_id": 1.5, "text": "a"}', "an id must be a string, got 1.5"),
        ('{"_id": "  ", "text": "a"}', "an id is empty"),
        ('["_id", "x"]', "a JSON object is expected, got ['_id', 'x']"),
        ('{"_id": "x", "text": "a"} {}', "broken JSON at column 27: Extra data"),
        ('{"_id": "x", "_id": "y", "text": "a"}', "the key '_id' stands there twice, with different values"),
        ('{"_id": "x", "text": "half \\ud83d"}', "'text' holds half of a surrogate pair ('\\ud83d'), which is no text"),
        ('{"_id": "d1", "text": "a"}', "the id 'd1' stands here a second time"),
        ("[" * 100_000, "broken JSON: nested too deeply"),
        ('{"_id": ' + "9" * 5000 + ', "text": "a"}', "Exceeds the limit"),
    ],
)
def test_a_bad_document_is_named_with_its_line(tmp_path, line, problem):
    message = refusal(beir(tmp_path, documents='{"_id": "d1", "text": "a"}\n' + line + "\n"))
    assert "corpus.jsonl: 1 problem\n" in message
    assert f"  line 2: {problem}" in message
    assert len(message) < 1000


def test_a_title_of_null_is_none(tmp_path):
    golden = load_golden(
        beir(tmp_path, documents=lines([{"_id": f"d{i}", "title": None, "text": "x"} for i in (1, 2, 3)]))
    )
    assert golden.doc_texts == ["x", "x", "x"]


def test_a_query_that_comes_twice_is_refused_even_outside_the_split(tmp_path):
    message = refusal(beir(tmp_path, queries=[*QUERIES, QUERIES[0], QUERIES[2]]))
    assert "queries.jsonl: 2 problems" in message
    assert "line 4: the id 'q1' stands here a second time" in message
    assert "line 5: the id 'q9' stands here a second time" in message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("q1 d1 1", "expected 3 columns, found 1; are the tabs missing?"),
        ("q1\td2", "expected 3 columns, found 2"),
        ("q1\td2\t1\t1", "expected 3 columns, found 4"),
        ("q1\td2\tgood", "the grade 'good' is not a whole number"),
        ("q1\td2\t0.5", "the grade '0.5' is not a whole number"),
        ("q1\td2\tnan", "the grade 'nan' is not a whole number"),
        ("q1\td2\t", "the grade '' is not a whole number"),
        ("q1\td2\t1_0", "the grade '1_0' is not a whole number"),
        ("q1\td2\t" + "9" * 30, "is not a number that can be used"),
        ("\td2\t1", "an id is empty"),
        ("q1\td1\t1", "query 'q1' and document 'd1' stand here with 1, further up with 2"),
    ],
)
def test_a_bad_judgement_is_named_with_its_line(tmp_path, line, problem):
    message = refusal(beir(tmp_path, qrels=QRELS + line + "\n"))
    assert "test.tsv: 1 problem\n  line 5: " in message
    assert problem in message
    assert "below the header 'query-id corpus-id score'" in message


def test_an_unknown_header_is_a_problem_of_line_1(tmp_path):
    message = refusal(write(tmp_path / "test.tsv", "question\tdocument_uid\tscore\nq1\td1\t1\n"), load=read_qrels)
    assert "line 1: the grade 'score' is not a whole number" in message


@pytest.mark.parametrize("content", ["", "\n \r\n", "\ufeff"])
def test_an_empty_file_is_refused(tmp_path, content):
    for part, name in (("documents", "corpus.jsonl"), ("queries", "queries.jsonl"), ("qrels", "test.tsv")):
        assert f"{name} is empty. Expected" in refusal(beir(tmp_path / part, **{part: content}))
    assert "test.tsv is empty" in refusal(beir(tmp_path / "h", qrels="query-id\tcorpus-id\tscore\n"))


def test_bytes_that_are_not_utf_8_are_named_with_line_and_offset(tmp_path):
    raw = "\ufeff".encode() + b'{"_id": "d1", "text": "a"}\n{"_id": "d2", "text": "caf\xe9"}\n'
    message = refusal(beir(tmp_path, documents=raw))
    assert f"line 2: not UTF-8: byte 0xe9 at offset {raw.index(0xE9)} of the file" in message
    assert "line 1: the file is UTF-16; save it as UTF-8" in refusal(
        beir(tmp_path, documents=lines(DOCUMENTS).encode("utf-16"))
    )


def test_a_line_without_end_is_an_error_and_not_the_end_of_memory(tmp_path):
    bomb = b'{"_id": "d1", "text": "' + b"a" * (200 << 20)
    beir(tmp_path, documents="x")
    (tmp_path / "corpus.jsonl").unlink()
    write(tmp_path / "corpus.jsonl.gz", bomb)
    del bomb
    tracemalloc.start()
    try:
        message = refusal(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "line 1: longer than 64 MiB; the lines after it were not read" in message
    assert peak < 160 << 20


def test_a_broken_gzip_file_is_refused(tmp_path):
    beir(tmp_path, end=".gz")
    path = tmp_path / "corpus.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert "ends in the middle: it is not a whole gzip file" in refusal(tmp_path)
    path.write_bytes(b"plain text")
    assert "corpus.jsonl.gz cannot be read: Not a gzipped file" in refusal(tmp_path)


def test_no_pickle_is_ever_read(tmp_path):
    import pickle

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    for name in ("set.pkl", "set.jsonl"):
        refusal(write(tmp_path / name, pickle.dumps(Trap())))
    assert not (tmp_path / "sprung").exists()


def test_reading_holds_the_golden_set_once(tmp_path):
    n = 30_000
    documents = "".join(f'{{"_id": "d{i}", "text": "{i:0400d}"}}\n' for i in range(n))
    beir(tmp_path, documents=documents, queries='{"_id": "q", "text": "x"}\n', qrels="q\td0\t1\n")
    size = len(documents)
    del documents
    tracemalloc.start()
    try:
        golden = load_golden(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(golden.corpus) == n
    assert peak < 1.9 * size


def test_nothing_is_written_to_a_console_that_is_no_terminal(tmp_path, capfd):
    load_golden(beir(tmp_path))
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------ golden .jsonl


GOLDEN = [
    {"id": "g1", "query": "capital of France", "relevant": ["d1", "d1"], "type": "fact"},
    {"_id": 2, "query": "cities", "relevant": {"d2": 2, "d3": 0.5}, "type": "list"},
    {"id": "g3", "query": "capital of Mars", "relevant": []},
]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_golden_file_loads_beside_its_corpus(tmp_path, end):
    write(tmp_path / f"corpus.jsonl{end}", lines([{"id": d["_id"], **d} for d in DOCUMENTS]))
    golden = load_golden(write(tmp_path / f"faq.v2.jsonl{end}", lines(GOLDEN)))
    assert golden.name == "faq.v2"
    assert golden.queries == {"g1": "capital of France", "2": "cities", "g3": "capital of Mars"}
    assert golden.qrels == {"g1": {"d1": 1}, "2": {"d2": 2, "d3": 0.5}, "g3": {}}
    assert golden.groups == {"g1": "fact", "2": "list"}
    assert golden.answerable.tolist() == [True, True, False]


def test_a_golden_file_without_types_has_no_groups(tmp_path):
    write(tmp_path / "corpus.jsonl", lines(DOCUMENTS))
    assert load_golden(write(tmp_path / "g.jsonl", lines([GOLDEN[2], {**GOLDEN[0], "type": None}]))).groups is None


def test_a_golden_file_needs_a_corpus_beside_it(tmp_path):
    message = refusal(write(tmp_path / "faq.jsonl", lines(GOLDEN)))
    assert "needs its documents in a corpus.jsonl (or .gz) beside it; its folder holds 'faq.jsonl'" in message


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"id": "x", "query": "a"}, "the field 'relevant' is missing"),
        ({"id": "x", "relevant": []}, "the field 'query' is missing"),
        ({"query": "a", "relevant": []}, "the field 'id' or '_id' is missing"),
        ({"id": "x", "query": 5, "relevant": []}, "'query' must be a string, got 5"),
        ({"id": "x", "query": "a", "relevant": "d1"}, "'relevant' must be a list of document ids or an object"),
        ({"id": "x", "query": "a", "relevant": [["d1"]]}, "an id must be a string, got ['d1']"),
        ({"id": "x", "query": "a", "relevant": {"d1": "1"}}, "a grade must be a number, got '1'"),
        ({"id": "x", "query": "a", "relevant": {"d1": True}}, "a grade must be a number, got True"),
        ({"id": "x", "query": "a", "relevant": {"d1": float("nan")}}, "the grade nan is not a number that can be used"),
        ({"id": "x", "query": "a", "relevant": {"d1": 10**400}}, "is not a number that can be used"),
        ({"id": "x", "query": "a", "relevant": [], "type": 3}, "'type' must be a string, got 3"),
        ({"id": "g1", "query": "a", "relevant": []}, "the id 'g1' stands here a second time"),
    ],
)
def test_a_bad_golden_row_is_named_with_its_line(tmp_path, row, problem):
    write(tmp_path / "corpus.jsonl", lines(DOCUMENTS))
    message = refusal(write(tmp_path / "faq.jsonl", lines([*GOLDEN, row])))
    assert "faq.jsonl: 1 problem\n  line 4: " in message
    assert problem in message
    assert 'an empty "relevant" marks an unanswerable query' in message


def test_a_document_with_two_grades_in_a_golden_row_is_refused(tmp_path):
    write(tmp_path / "corpus.jsonl", lines(DOCUMENTS))
    row = '{"id": "x", "query": "a", "relevant": {"d1": 1, "d1": 2}}\n'
    assert "line 1: the key 'd1' stands there twice" in refusal(write(tmp_path / "faq.jsonl", row))
    assert load_golden(write(tmp_path / "faq.jsonl", row.replace("2}", "1}"))).qrels == {"x": {"d1": 1}}


# ------------------------------------------------------------------------------------------------ TREC


def test_trec_judgements(tmp_path):
    path = write(tmp_path / "qrels.txt", "q1 0 d1 1\r\n  q1\t0  d2\t-1 \n\nq2 Q0 d1 0\n")
    assert read_qrels(path) == {"q1": {"d1": 1, "d2": -1}, "q2": {"d1": 0}}
    assert read_qrels(str(path)) == read_qrels(path)
    message = refusal(write(tmp_path / "bad.txt", "q1 0 d1 1\nq1 d2 1\n"), load=read_qrels)
    assert "line 2: expected 4 columns, found 3" in message


def test_a_run(tmp_path):
    text = "q1 Q0 d1 1 0.75 my tag\nq1\tQ0\td2\t2\t-1e-3\tt\n\nq2 Q0 007 1 3 t\nq1 Q0 d1 1 0.75 t\n"
    for name in ("run.txt", "run.trec.gz"):
        assert read_run(write(tmp_path / name, text)) == {"q1": {"d1": 0.75, "d2": -0.001}, "q2": {"007": 3.0}}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("q1 Q0 d1 1 0.5", "expected 6 columns, found 5"),
        ("q1 Q0 d2 1 high t", "the score 'high' is not a number"),
        ("q1 Q0 d2 1 nan t", "the score 'nan' cannot be ranked"),
        ("q1 Q0 d2 1 -inf t", "the score '-inf' cannot be ranked"),
        ("q1 Q0 d1 9 0.25 t", "query 'q1' and document 'd1' stand here with 0.25, further up with 0.5"),
    ],
)
def test_a_bad_run_line_is_named(tmp_path, line, problem):
    message = refusal(write(tmp_path / "run", f"q1 Q0 d1 1 0.5 t\n{line}\n"), load=read_run)
    assert f"run: 1 problem\n  line 2: {problem}" in message
    assert "six TREC columns" in message
    assert "is empty" in refusal(write(tmp_path / "none", "\n"), load=read_run)


def test_columns_are_found_by_name():
    assert judgement_columns(["qid", "query", "docid", "x", "rel"]) == (0, 2, 4)
    assert judgement_columns(["query-id", "corpus-id"]) is None


# ------------------------------------------------------------------------------------------------ real collections


@pytest.mark.parametrize(
    ("name", "documents", "answerable", "judgements"),
    [
        ("scifact", 5183, 300, 339),
        ("cranfield", 1400, 225, 1612),
        ("nq-test-small", 2665, 2725, 2725),
        ("cosqa", 6267, 500, 500),
        ("covidfaq", 67, 1037, 1343),
        ("medquad-liveqa", 1935, 96, 2311),
    ],
)
def test_real_collections_load_whole(name, documents, answerable, judgements):
    if not (DATA / name).is_dir():
        pytest.skip("the shared collections are not here")
    golden = load_golden(DATA / name)
    assert len(golden.corpus) == documents
    assert golden.n_answerable == answerable
    assert len(golden.judgements.grade) == judgements
    assert golden.name == name


# ------------------------------------------------------------------------------------------------ hubs


def test_a_hub_needs_its_package_and_a_name(monkeypatch):
    for name in ("hf:", "mteb:", "ir_datasets:"):
        assert f"{name!r} names no data set; write it as {name}NAME" in refusal(name)
    for module, extra, source in (
        ("datasets", "hf", "hf:org/set"),
        ("ir_datasets", "ir-datasets", "ir_datasets:set"),
        ("mteb", "mteb", "mteb:Task"),
    ):
        if importlib.util.find_spec(module) is None:
            with pytest.raises(MissingExtraError, match=rf"pip install 'fullrank\[{extra}\]'"):
                load_golden(source)


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def hf_repo(folder: Path, configs: dict[str, dict[str, str]]) -> Path:
    head = ["---", "configs:"]
    for config, splits in configs.items():
        head += [f"- config_name: {config}", "  data_files:"]
        for split, path in splits.items():
            head += [f"  - split: {split}", f"    path: {path}"]
    write(folder / "README.md", "\n".join([*head, "---", ""]))
    return folder


def hf_beir(folder: Path, **parts: object) -> Path:
    """A BEIR folder whose judgements are JSON too: one repository is read by one kind of reader."""
    rows = [{"query-id": "q1", "corpus-id": "d1", "score": 2}, {"query-id": "q2", "corpus-id": "d2", "score": 1.0}]
    write(folder / "qrels" / "test.jsonl", lines([*rows, {"query-id": "q2", "corpus-id": "d3", "score": 0}]))
    write(folder / "qrels" / "dev.jsonl", lines([{"query-id": "q9", "corpus-id": "d3", "score": 1}]))
    return beir(folder, **parts)


TEXTS = {"corpus": {"corpus": "corpus.jsonl"}, "queries": {"queries": "queries.jsonl"}}


@pytest.mark.parametrize("config", ["default", "qrels"])
def test_hf_reads_the_beir_layout(tmp_path, hf_cache, config):
    repo = hf_repo(
        hf_beir(tmp_path / "tiny"), {**TEXTS, config: {"test": "qrels/test.jsonl", "dev": "qrels/dev.jsonl"}}
    )
    golden = load_golden(f"hf:{repo}")
    assert golden.queries == {"q1": "capital of France", "q2": "Italian city"}
    assert golden.doc_texts == ["Paris is the capital of France", "Rome is in Italy", "Bern"]
    assert golden.qrels == {"q1": {"d1": 2}, "q2": {"d2": 1, "d3": 0}}
    assert golden.name == "tiny"
    assert load_golden(f"hf:{repo}", "dev").name == "tiny-dev"
    assert "has no split 'val' in the config" in refusal(f"hf:{repo}", "val")


def test_hf_reads_judgements_from_a_repository_of_their_own(tmp_path, hf_cache):
    beir(tmp_path / "tiny")
    write(tmp_path / "tiny" / "queries.jsonl", '{"_id": "1", "text": "a"}\n{"_id": "2", "text": "b"}\n')
    repo = hf_repo(tmp_path / "tiny", {"corpus": {"train": "corpus.jsonl"}, "queries": {"train": "queries.jsonl"}})
    qrels = write(tmp_path / "tiny-qrels" / "test.tsv", "query-id\tcorpus-id\tscore\n1\td1\t1\n2\td3\t1\n")
    hf_repo(qrels.parent, {"default": {"test": "test.tsv"}})
    golden = load_golden(f"hf:{repo}")
    assert golden.qrels == {"1": {"d1": 1}, "2": {"d3": 1}}


def test_hf_says_what_is_missing_or_wrong(tmp_path, hf_cache):
    repo = hf_repo(beir(tmp_path / "a"), {"corpus": {"corpus": "corpus.jsonl"}})
    assert "has the configs 'corpus'; expected 'corpus', 'queries' and the judgements" in refusal(f"hf:{repo}")
    repo = hf_repo(beir(tmp_path / "b"), {**TEXTS, "default": {"test": "queries.jsonl"}})
    assert "the judgements have the columns '_id', 'text'; expected query-id" in refusal(f"hf:{repo}")
    repo = hf_repo(
        hf_beir(tmp_path / "c", documents=[*DOCUMENTS, DOCUMENTS[0]]),
        {**TEXTS, "default": {"test": "qrels/test.jsonl"}},
    )
    message = refusal(f"hf:{repo}")
    assert f"hf:{repo} corpus: 1 problem\n  row 4: the id 'd1' stands here a second time" in message
    assert "could not be loaded" in refusal(f"hf:{tmp_path / 'nowhere'}")
    repo = hf_repo(beir(tmp_path / "d"), {**TEXTS, "default": {"test": "qrels/test.tsv"}})
    assert "could not be loaded: DatasetGenerationError: An error occurred while generating the dataset (" in refusal(
        f"hf:{repo}"
    )


class Doc(NamedTuple):
    doc_id: str
    title: str
    text: str

    def default_text(self) -> str:
        return f"{self.title} {self.text}"


class Query(NamedTuple):
    query_id: str
    text: str


class Qrel(NamedTuple):
    query_id: str
    doc_id: str
    relevance: int
    iteration: str = "0"


@pytest.mark.filterwarnings("ignore")
def test_ir_datasets_reads_what_is_registered():
    ir_datasets = pytest.importorskip("ir_datasets")
    from ir_datasets.formats import BaseDocs, BaseQrels, BaseQueries

    class Docs(BaseDocs):
        def docs_iter(self):
            return iter([Doc(d["_id"], d.get("title", ""), d["text"]) for d in DOCUMENTS])

    class Queries(BaseQueries):
        def queries_iter(self):
            return iter([Query(q["_id"], q["text"]) for q in QUERIES])

    class Qrels(BaseQrels):
        def __init__(self, *rows):
            self.rows = rows

        def qrels_iter(self):
            yield from self.rows
            if not self.rows:
                raise ConnectionError("cable cut")

    register, dataset = ir_datasets.registry.register, ir_datasets.Dataset
    register("fullrank-tiny", dataset(Docs()))
    register("fullrank-tiny/test", dataset(Docs(), Queries(), Qrels(Qrel("q1", "d1", 2), Qrel("q2", "d3", 0))))
    register("fullrank-tiny/dev", dataset(Docs(), Queries(), Qrels(Qrel("q9", "d1", 1))))
    register("fullrank-cut", dataset(Docs(), Queries(), Qrels()))
    for source in ("ir_datasets:fullrank-tiny/test", "ir_datasets:fullrank-tiny"):
        golden = load_golden(source)
        assert golden.qrels == {"q1": {"d1": 2}, "q2": {"d3": 0}}
        assert golden.doc_texts == ["Paris is the capital of France", "Rome is in Italy", "Bern"]
        assert golden.name == "fullrank-tiny"
    for source in ("ir_datasets:fullrank-tiny/dev", "ir_datasets:fullrank-tiny"):
        golden = load_golden(source, "dev")
        assert (list(golden.queries), golden.name) == (["q9"], "fullrank-tiny-dev")
    message = refusal("ir_datasets:fullrank-tiny/test", "dev")
    assert "has neither 'fullrank-tiny/test' nor 'fullrank-tiny/test/dev' with documents" in message
    assert "qrels, could not be loaded: ConnectionError: cable cut" in refusal("ir_datasets:fullrank-cut")


@pytest.mark.filterwarnings("ignore")
def test_mteb_reads_a_registered_task(tmp_path, hf_cache, monkeypatch):
    pytest.importorskip("mteb")
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    repo = hf_repo(hf_beir(tmp_path / "tiny"), {**TEXTS, "default": {"test": "qrels/test.jsonl"}})
    spoken = {
        f"{lang}-{part}": {"test": path}
        for lang in ("en", "de")
        for part, path in (("corpus", "corpus.jsonl"), ("queries", "queries.jsonl"), ("qrels", "qrels/test.jsonl"))
    }
    both = hf_repo(hf_beir(tmp_path / "both"), spoken)

    def task(name: str, path: Path, langs: object) -> type:
        about = TaskMetadata(
            name=name,
            description="a task of this test",
            reference=None,
            dataset={"path": str(path), "revision": "main"},
            type="Retrieval",
            category="t2t",
            eval_splits=["test"],
            eval_langs=langs,
            main_score="ndcg_at_10",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )
        return type(name, (AbsTaskRetrieval,), {"metadata": about})

    registry = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
    monkeypatch.setitem(registry, "FullrankTiny", task("FullrankTiny", repo, ["eng-Latn"]))
    two = task("FullrankTwo", both, {"en": ["eng-Latn"], "de": ["deu-Latn"]})
    monkeypatch.setitem(registry, "FullrankTwo", two)

    golden = load_golden("mteb:FullrankTiny")
    assert golden.queries == {"q1": "capital of France", "q2": "Italian city"}
    assert golden.doc_texts == ["Paris is the capital of France", "Rome is in Italy", "Bern"]
    assert golden.qrels == {"q1": {"d1": 2}, "q2": {"d2": 1, "d3": 0}}
    assert golden.name == "FullrankTiny"
    assert load_golden("mteb:FullrankTwo/de").name == "FullrankTwo-de"
    assert "has no split 'dev'; there are 'test'" in refusal("mteb:FullrankTiny", "dev")
    assert "name one of its subsets 'en', 'de': mteb:FullrankTwo/en" in refusal("mteb:FullrankTwo")
    assert "name one of its subsets 'default'" in refusal("mteb:FullrankTiny/fr")
    assert "mteb:FullrankTinny could not be loaded: KeyError" in refusal("mteb:FullrankTinny")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("datasets", "hf:mteb/scifact"),
        ("datasets", "hf:BeIR/scifact"),
        ("ir_datasets", "ir_datasets:beir/scifact/test"),
        ("mteb", "mteb:SciFact"),
    ],
)
@needs_hub
def test_scifact_from_a_hub(module, source):
    pytest.importorskip(module)
    golden = load_golden(source)
    assert (len(golden.corpus), len(golden.queries), len(golden.judgements.grade)) == (5183, 300, 339)


def test_hub_rows_are_streams(tmp_path, hf_cache):
    repo = hf_repo(hf_beir(tmp_path / "tiny"), {**TEXTS, "default": {"test": "qrels/test.jsonl"}})
    assert next(iter(hub_rows(f"hf:{repo}", "test").judgements)) == ("q1", "d1", 2)
