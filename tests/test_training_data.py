"""Training data: one plain form whatever the file, and every fault of a file in one error."""

import csv
import gzip
import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullrank import TrainingExample, read_training_data
from fullrank._errors import DataError, SettingError
from fullrank.training_data import MAX_TEXT, training_columns, write_training_data

MIXED = [
    TrainingExample("a", "b", ("c",)),
    TrainingExample("d", "e"),
    TrainingExample("f", "g", ("n 1", "n 2")),
]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ------------------------------------------------------------------------------------------------ rows


def test_fields_are_read_under_their_usual_names(tmp_path):
    rows = [
        {"anchor": "a", "positive": "b", "negative": "c"},
        {"query": "d", "document": "e"},
        {"question": "f", "answer": "g", "negative_2": "n 2", "negative_1": "n 1", "negative_3": None},
        {"query": "h", "text": "i", "label": 3},
        {"passage": "k", "anchor": "j", "text": "not this"},
        {"query": "l", "pos": ["m", "n"], "neg": ["o", "p", "o"]},
        {"query": "q", "positive": "r", "negatives": []},
        {"query": "s", "positive": '["t"]'},
    ]
    path = tmp_path / "train.jsonl"
    path.write_bytes("\ufeff".encode() + "\r\n\r\n".join(map(json.dumps, rows)).encode())
    assert read_training_data(path) == [
        *MIXED,
        TrainingExample("h", "i"),
        TrainingExample("j", "k"),
        TrainingExample("l", "m", ("o", "p")),
        TrainingExample("l", "n", ("o", "p")),
        TrainingExample("q", "r"),
        TrainingExample("s", '["t"]'),
    ]


def test_all_problems_of_a_file_are_in_one_error(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        '{"anchor": "a", "positive": "b"}\n{"anchor": "a"}\n{"positive": "b"}\nx\n{"query": 1, "text": "a"}\n\n'
        '{"query": " ", "text": "a"}\n{"query": "a", "pos": []}\n{"query": "a", "pos": "b", "neg": ["c", "b "]}\n'
    )
    with pytest.raises(DataError) as caught:
        read_training_data(path)
    assert str(caught.value).splitlines() == [
        f"{path}: 7 problems",
        "  line 2: the field 'positive' or 'positives' or 'pos' or 'document' or 'passage' or 'answer' or 'text' is "
        "missing",
        "  line 3: the field 'anchor' or 'query' or 'question' is missing",
        "  line 4: broken JSON at column 1: Expecting value",
        "  line 5: the query must be a string, got 1",
        "  line 7: the query is empty",
        "  and 2 more",
        'Expected in each row a query ("anchor", "query", "question") and a positive ("positive", "pos", "document", '
        '"passage", "answer", "text"), and where there are hard negatives a list "negatives" or columns "negative_1", '
        '"negative_2" and so on.',
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"query": "a", "pos": []}, "there is no positive: the list is empty"),
        ({"query": "a", "pos": "b", "neg": ["c", "b "]}, "a negative is the positive itself: 'b '"),
        ({"query": "a", "pos": "b", "neg": ["c", ""]}, "'neg' is empty"),
        ({"query": "a", "pos": "b", "negatives": ["c", 1]}, "'negatives' must be a string, got 1"),
        ({"query": "a", "pos": {"b": 1}}, "the positive must be a string, got {'b': 1}"),
        ({"query": "a", "pos": "x" * (MAX_TEXT + 1)}, "the positive has 1,048,577 characters; at most 1,048,576"),
        ({"query": "a", "pos": "b", "neg": list("xyz") * 400}, "'neg' is a list of 1,200 texts; at most 1,000"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named(tmp_path, row, text):
    path = write(tmp_path / "train.jsonl", {"query": "q", "positive": "p"}, row)
    with pytest.raises(DataError) as caught:
        read_training_data(path)
    assert f"line 2: {text}" in str(caught.value)


def test_what_is_not_there_or_unknown_is_one_clear_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty\. Expected in each row a query"):
        read_training_data(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"there is no such file\. Expected \.jsonl, \.csv or \.tsv"):
        read_training_data(tmp_path / "none.jsonl")
    (tmp_path / "pairs.xlsx").write_text("x")
    with pytest.raises(DataError, match="is not a kind of file that is known here"):
        read_training_data(tmp_path / "pairs.xlsx")
    (tmp_path / "broken.parquet").write_text("x")
    with pytest.raises(DataError, match=r"broken\.parquet could not be loaded"):
        read_training_data(tmp_path / "broken.parquet")
    with pytest.raises(DataError, match="could not be loaded"):
        read_training_data(tmp_path)  # a folder that is no data set
    with pytest.raises(DataError, match="names no data set; write it as hf:REPO or hf:REPO:CONFIG"):
        read_training_data("hf:")
    with pytest.raises(SettingError, match="limit=0 must be a whole number of rows"):
        read_training_data(tmp_path / "none.jsonl", limit=0)


def test_a_limit_stops_the_reading(tmp_path):
    path = write(tmp_path / "train.jsonl", *({"query": f"q{i}", "positive": "p"} for i in range(5)))
    assert [e.query for e in read_training_data(path, limit=2)] == ["q0", "q1"]


# ------------------------------------------------------------------------------------------------ tables and data sets


def test_a_table_is_read_by_its_header(tmp_path):
    path = tmp_path / "train.csv"
    path.write_bytes(
        "\ufeffQuestion,Positive,Negative 1,negative_2,id\r\n".encode()
        + b'"what, and\n\nhow",p,"n ""1""",,1\r\n\r\nq,p 2,,n 2,2\r\n'
    )
    expected = [
        TrainingExample("what, and\n\nhow", "p", ('n "1"',)),
        TrainingExample("q", "p 2", ("n 2",)),
    ]
    assert read_training_data(path) == expected
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_training_data(tmp_path / "train.csv.gz") == expected
    (tmp_path / "train.tsv").write_text('query\tpos\tnegatives\nq\tp\t["n, 1", "n 2"]\n')
    assert read_training_data(tmp_path / "train.tsv") == [TrainingExample("q", "p", ("n, 1", "n 2"))]


def test_faults_of_a_table_carry_the_line_they_begin_in(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('query,positive\na,"b\nc"\na,b,c\n,b\n"open,b\n')
    with pytest.raises(DataError) as caught:
        read_training_data(path)
    assert str(caught.value).splitlines()[:4] == [
        f"{path}: 3 problems",
        "  line 4: expected 2 cells, as in the header, found 3",
        "  line 5: the query is empty",
        "  line 6: broken CSV: unexpected end of data; the lines after it were not read",
    ]
    path.write_text("query;positive\na;b\n")
    with pytest.raises(DataError, match=r"must name the columns, found 'query;positive'\. Is the separator another"):
        read_training_data(path)
    path.write_text("query,positive,query\na,b,c\n")
    with pytest.raises(DataError, match="the columns 'query' stand twice"):
        read_training_data(path)


def test_the_limit_of_the_csv_module_is_put_back(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "train.csv").write_text(f"query,positive\nq,{'x' * 200_000}\n")
    assert len(read_training_data(tmp_path / "train.csv")[0].positive) == 200_000
    assert csv.field_size_limit() == before


def test_parquet_and_data_sets_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {
            "anchor": ["a", "d", "f"],
            "label": [1, 2, 3],
            "positive": list("beg"),
            "negatives": [["c"], [], ["n 1", "n 2"]],
        }
    )
    table.to_parquet(tmp_path / "train.parquet")
    assert read_training_data(tmp_path / "train.parquet") == MIXED
    table.save_to_disk(tmp_path / "plain")
    assert read_training_data(tmp_path / "plain") == MIXED
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    assert read_training_data(tmp_path / "splits") == MIXED
    with pytest.raises(DataError, match="has no split 'dev'; there are 'train'"):
        read_training_data(tmp_path / "splits", "dev")
    datasets.Dataset.from_dict({"query": ["a", None], "positive": ["b", "c"]}).to_parquet(tmp_path / "bad.parquet")
    with pytest.raises(DataError, match="row 2: the query must be a string, got None"):
        read_training_data(tmp_path / "bad.parquet")


def test_a_hub_data_set_is_asked_for_by_name_and_config(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict({"query": ["a"], "answer": ["b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)  # no network in tests
    assert read_training_data("hf:some/pairs:triplet", "dev") == [TrainingExample("a", "b")]
    assert read_training_data("hf:some/pairs") == [TrainingExample("a", "b")]
    assert asked == [(("some/pairs", "triplet"), {"split": "dev"}), (("some/pairs", None), {"split": "train"})]


# ------------------------------------------------------------------------------------------------ writing, columns

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)


@given(
    st.lists(
        st.builds(
            TrainingExample, TEXT, TEXT.map("p".__add__), st.lists(TEXT.map("n".__add__), unique=True).map(tuple)
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_what_is_written_is_read_back(tmp_path, examples):
    assert read_training_data(write_training_data(tmp_path / "train.jsonl", examples)) == examples


def test_columns_are_those_of_a_loss():
    examples = [*MIXED, TrainingExample("q", "p", tuple(string.ascii_lowercase[:4]))]
    assert training_columns(examples) == {"anchor": ["a", "d", "f", "q"], "positive": ["b", "e", "g", "p"]}
    assert training_columns(examples, negatives=3) == {
        "anchor": ["a", "f", "q"],  # what has no hard negative is left out
        "positive": ["b", "g", "p"],
        "negative_1": ["c", "n 1", "a"],
        "negative_2": ["c", "n 2", "b"],
        "negative_3": ["c", "n 1", "c"],
    }
    with pytest.raises(DataError, match="none of the 1 examples has hard negatives, and 2 a row are asked for"):
        training_columns([TrainingExample("d", "e")], negatives=2)
    with pytest.raises(SettingError, match="negatives=-1 must be a whole number from 0"):
        training_columns(MIXED, negatives=-1)
