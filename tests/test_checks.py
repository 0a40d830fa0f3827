"""What is wrong with a golden set is found, counted and explained; what is sound is left alone."""

import random
import time
from pathlib import Path

import pytest

from fullrank.checks import NEAR, check_golden, normalise
from fullrank.data import GoldenSet
from fullrank.loaders import load_golden
from fullrank.metrics import Metric
from fullrank.result import Finding

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def sound(
    n_queries: int = 400, n_documents: int = 1000
) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, int]]]:
    """A set without any fault: unlike texts, many queries, many more documents."""
    queries = {f"q{i}": f"query about topic{i} alone" for i in range(n_queries)}
    corpus = {f"d{i}": f"document on subject{i} with words{i} of its own{i}" for i in range(n_documents)}
    return queries, corpus, {f"q{i}": {f"d{i}": 1} for i in range(n_queries)}


def found(*parts, train_pairs=None, metrics=None, **options) -> dict[str, Finding]:
    settings = {} if metrics is None else {"metrics": [Metric.parse(m) for m in metrics]}
    findings = check_golden(GoldenSet(*parts, **options), train_pairs=train_pairs, **settings)
    assert all(finding.remedy and finding.count >= 1 and len(finding.examples) <= 5 for finding in findings)
    by_kind = {finding.kind: finding for finding in findings}
    assert len(by_kind) == len(findings)
    return by_kind


def test_a_sound_set_has_no_findings():
    assert found(*sound(), train_pairs=[("something else", "and another thing entirely, in other words")]) == {}


def test_normalise():
    assert normalise(" Straße\u00a0 \tIN\nRom ") == "strasse in rom"
    assert normalise("Cafe\u0301") == normalise("CAF\u00c9")
    assert normalise("cafe") != normalise("café")


def test_dangling_ids():
    queries, corpus, qrels = sound()
    qrels["q0"]["gone"] = qrels["q1"]["gone"] = qrels["q1"]["lost"] = 1
    finding = found(queries, corpus, qrels, missing="keep")["dangling-ids"]
    assert (finding.count, finding.examples, finding.severity) == (2, ("gone", "lost"), "warning")
    assert "2 judged documents the corpus does not hold: never retrieved, yet in the denominators" in finding.message
    assert "missing='drop'" in finding.remedy
    assert "dangling-ids" not in found(queries, corpus, qrels, missing="drop")


def test_equal_documents_that_touch_no_answer_are_information():
    queries, corpus, qrels = sound()
    corpus |= {"x1": "SAME  text", "x2": "same text", "x3": " same\ntext ", "x4": "same texts"}
    findings = found(queries, corpus, qrels)
    assert list(findings) == ["equal-documents"]
    assert findings["equal-documents"].severity == "info"
    assert (findings["equal-documents"].count, findings["equal-documents"].examples) == (2, ("x2", "x3"))


def test_a_copy_of_an_answer_that_is_not_judged_is_a_warning():
    queries, corpus, qrels = sound()
    corpus["copy"] = corpus["d3"].upper()
    findings = found(queries, corpus, qrels)
    finding = findings["unjudged-duplicates"]
    assert (finding.severity, finding.count, finding.examples) == ("warning", 1, ("q3: copy = d3",))
    assert "1 copy of an answer not judged as one: a right hit counts as a miss" in finding.message
    qrels["q3"]["copy"] = 0
    assert "unjudged-duplicates" in found(queries, corpus, qrels)
    qrels["q3"]["copy"] = 1
    assert set(found(queries, corpus, qrels)) == {"equal-documents"}


def test_titles_count_in_equal_texts():
    queries, corpus, qrels = sound()
    corpus |= {
        "t1": {"title": "A", "text": "b c"},
        "t2": {"title": "", "text": "a b c"},
        "t3": {"title": "B", "text": "b c"},
    }
    assert found(queries, corpus, qrels)["equal-documents"].examples == ("t2",)


def test_equal_queries():
    queries, corpus, qrels = sound()
    queries["again"], qrels["again"] = queries["q5"].title(), {"d5": 2}
    finding = found(queries, corpus, qrels)["equal-queries"]
    assert (finding.severity, finding.count, finding.examples) == ("info", 1, ("again",))
    qrels["again"] = {"d6": 1}
    finding = found(queries, corpus, qrels)["equal-queries"]
    assert finding.severity == "warning"
    assert "1 query with the text of another and other answers: not all can be met" in finding.message


def test_self_matches():
    queries, corpus, qrels = sound()
    corpus |= {"q1": "a text of its own", "q2": queries["q2"].upper()}
    finding = found(queries, corpus, qrels)["self-matches"]
    assert (finding.severity, finding.count, finding.examples) == ("warning", 1, ("q2",))
    assert "exclude_self=True" in finding.remedy
    del corpus["q2"]
    finding = found(queries, corpus, qrels)["self-matches"]
    assert (finding.severity, finding.examples) == ("info", ("q1",))


def test_empty_texts_are_reported_and_are_no_copies():
    queries, corpus, qrels = sound()
    corpus |= {"e1": "", "e2": " \n", "e3": {"title": "", "text": ""}}
    queries["q0"] = "\t"
    findings = found(queries, corpus, qrels)
    assert set(findings) == {"empty-documents", "empty-queries"}
    assert findings["empty-documents"].examples == ("e1", "e2", "e3")
    assert findings["empty-queries"].message == "1 query without text"


@pytest.mark.parametrize(
    ("n", "severity", "points"),
    [(385, None, ""), (384, "info", "5.0"), (97, "info", "10.0"), (96, "warning", "10.0"), (25, "warning", "19.6")],
)
def test_few_queries_and_the_width_of_their_interval(n, severity, points):
    findings = found(*sound(n))
    if severity is None:
        assert findings == {}
    else:
        assert findings["few-queries"].severity == severity
        assert f"{n} answerable queries: the 95 % interval of a rate near one half is ± {points} points" in str(
            findings["few-queries"]
        )


def test_only_answerable_queries_count():
    queries, corpus, qrels = sound()
    findings = found(queries, corpus, qrels | {f"q{i}": {} for i in range(300)})
    assert findings["few-queries"].count == 100


def test_no_answerable_query_is_an_error_and_comes_first():
    queries, corpus, qrels = sound()
    findings = check_golden(GoldenSet(queries, corpus | {"a": "x", "b": "x"}, qrels, relevant_from=2))
    assert [(finding.kind, finding.severity) for finding in findings] == [
        ("no-answerable", "error"),
        ("equal-documents", "info"),
    ]
    assert "no query has a relevant document (grade 2 or more)" in findings[0].message


def test_vacuous_cutoffs_follow_the_metrics():
    parts = sound(400, 500)
    assert "vacuous-k" not in found(*parts)
    assert found(*parts, metrics=["recall@1", "recall@25", "ndcg"])["vacuous-k"].examples == ("@25",)


def test_types_without_an_unanswerable_query():
    queries, corpus, qrels = sound()
    groups = dict.fromkeys(queries, "fact")
    assert found(queries, corpus, qrels, groups=groups)["no-unanswerable"].severity == "info"
    assert found(queries | {"u": "nobody knows"}, corpus, qrels | {"u": {}}, groups=groups) == {}


def test_a_corpus_of_answers_only_has_no_distractors():
    finding = found(*sound(450, 500))["no-distractors"]
    assert "450 of the 500 documents answer some query" in finding.message
    assert "no-distractors" not in found(*sound(450, 501))


def test_a_corpus_that_is_tiny_beside_the_answers():
    queries, corpus, qrels = sound(400, 1000)
    many = {query: {f"d{i}": 1 for i in range(50)} for query in qrels}
    assert "with probability 5.0 %" in found(queries, corpus, many)["high-chance"].message
    assert "high-chance" not in found(queries, corpus, {query: {f"d{i}": 1 for i in range(49)} for query in qrels})


# ------------------------------------------------------------------------------------------------ leakage


QUERY = "how do I bake sourdough bread at home"
DOCUMENT = (
    "mix flour and water let it stand overnight fold the dough shape it and bake it in a very hot pot until brown"
)


def leaks(pairs: list[tuple[str, str]]) -> dict[str, Finding]:
    queries, corpus, qrels = sound()
    queries["q7"], corpus["d7"] = QUERY, DOCUMENT
    corpus["d999"] = "this document answers nothing but stands in the training pairs all the same, and that is fine"
    return found(queries, corpus, qrels, train_pairs=iter([("unrelated words", "some other words"), *pairs]))


def test_a_golden_query_in_the_training_pairs_is_an_error():
    for pair in ((f"  {QUERY.upper()}\n", "x"), ("x", QUERY)):
        findings = leaks([pair, pair])
        assert set(findings) == {"train-queries"}
        finding = findings["train-queries"]
        assert (finding.severity, finding.count, finding.examples) == ("error", 1, ("q7",))
        assert "this set is not held out" in finding.remedy


def test_an_answer_in_the_training_pairs_is_a_warning():
    findings = leaks([("x", DOCUMENT.title())])
    assert {kind: (f.severity, f.examples) for kind, f in findings.items()} == {"train-documents": ("warning", ("d7",))}


def test_a_document_that_answers_nothing_may_be_trained_on():
    corpus = "this document answers nothing but stands in the training pairs all the same, and that is fine"
    assert leaks([("x", corpus)]) == {}


@pytest.mark.parametrize(
    ("pair", "kinds"),
    [
        ((QUERY + "?", "x"), {"train-queries-near"}),
        ((QUERY + " please", "x"), {"train-queries-near"}),
        ((QUERY.replace("home", "work") + " tomorrow", "x"), set()),
        (("x", DOCUMENT + " on top"), {"train-documents-near"}),
        (("x", "First, " + DOCUMENT.replace(" let", ", let") + "!"), {"train-documents-near"}),
        (("x", DOCUMENT.replace("overnight", "for hours")), set()),
        (("x", " ".join(reversed(DOCUMENT.split()))), set()),
    ],
)
def test_near_duplicates_are_found_by_their_shingles(pair, kinds):
    findings = leaks([pair])
    assert set(findings) == kinds
    assert all(finding.severity == "warning" and finding.count == 1 for finding in findings.values())


def test_an_exact_match_is_not_counted_as_near_too():
    assert set(leaks([(QUERY, "x"), (QUERY + "!", "x")])) == {"train-queries"}


def test_copies_of_a_text_are_all_found():
    queries, corpus, qrels = sound()
    queries["q8"] = queries["q7"].upper()
    assert found(queries, corpus, qrels, train_pairs=[(queries["q7"], "x")])["train-queries"].examples == ("q7", "q8")
    near = found(queries, corpus, qrels, train_pairs=[(queries["q7"] + "...", "x")])["train-queries-near"]
    assert near.examples == ("q7", "q8")


def test_four_shingles_of_five_are_near_enough():
    queries, corpus, qrels = sound()
    queries["q7"] = "one two three four five six"
    assert "train-queries-near" in found(
        queries, corpus, qrels, train_pairs=[("one two three four five six seven", "x")]
    )
    assert found(queries, corpus, qrels, train_pairs=[("one two three four five six seven eight", "x")]) == {}


def test_short_texts_and_texts_without_blanks():
    queries, corpus, qrels = sound()
    queries |= {"short": "Rome?", "japanese": "フランスの首都はどこですか", "signs": "?!"}
    qrels |= {"short": {"d1": 1}, "japanese": {"d2": 1}, "signs": {"d3": 1}}
    pairs = [("rome", "..."), ("フランスの首都はどこですかね", "x")]
    assert set(found(queries, corpus, qrels, train_pairs=pairs)["train-queries-near"].examples) == {"short", "japanese"}
    assert found(queries, corpus, qrels, train_pairs=[("イタリアの首都はいつからローマですか", "!?")]) == {}


def test_the_index_gives_what_comparing_all_gives():
    rng = random.Random(0)

    def sets(text: str, size: int) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}

    def edited(text: str) -> str:
        words = text.split()
        for _ in range(rng.randrange(4)):
            words[rng.randrange(len(words)) if rng.random() < 0.3 else -1] = rng.choice("abcdef")
        return " ".join(words + rng.choices("xyz", k=rng.randrange(3)))

    corpus = {f"d{i}": " ".join(rng.choices("abcdef", k=rng.randrange(4, 50))) for i in range(150)}
    train = [edited(rng.choice(list(corpus.values()))) for _ in range(600)]
    queries = {f"q{i}": f"nothing like it {i} at all" for i in range(150)}
    golden = GoldenSet(queries, corpus, {f"q{i}": {f"d{i}": 1} for i in range(150)})
    exact = {doc for doc, text in corpus.items() if text in train}
    near = {
        doc
        for doc, text in corpus.items()
        for other in train
        if len(sets(text, 5) & sets(other, 5)) >= NEAR * len(sets(text, 5) | sets(other, 5))
    }
    findings = {finding.kind: finding for finding in check_golden(golden, train_pairs=[(text, "") for text in train])}
    assert findings["train-documents"].count == len(exact) > 10
    assert findings["train-documents-near"].count == len(near - exact) > 10


def test_leakage_scales_with_the_texts_and_not_with_their_product():
    rng = random.Random(0)
    words = [f"w{i}" for i in range(3000)]
    footer = " ".join(words[:12])

    def texts(n: int) -> list[str]:
        return [" ".join(rng.choices(words, k=40)) + " " + footer for _ in range(n)]

    corpus = {f"d{i}": text for i, text in enumerate(texts(3000))}
    golden = GoldenSet(
        {f"q{i}": f"query number {i}" for i in range(3000)}, corpus, {f"q{i}": {f"d{i}": 1} for i in range(3000)}
    )
    train = [("anchor", text) for text in [*texts(10_000), corpus["d5"] + " end"]]
    start = time.perf_counter()
    findings = {finding.kind: finding for finding in check_golden(golden, train_pairs=train)}
    assert findings["train-documents-near"].examples == ("d5",)
    assert time.perf_counter() - start < 20  # 30 million comparisons would take many minutes


# ------------------------------------------------------------------------------------------------ real collections


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("scifact", {"few-queries"}),
        ("cranfield", {"few-queries", "self-matches", "empty-documents"}),
        ("nq-test-small", {"no-distractors"}),
        ("cosqa", set()),
        ("covidfaq", {"vacuous-k", "no-distractors"}),
        ("medquad-liveqa", {"few-queries", "equal-documents"}),
    ],
)
def test_real_collections(name, kinds):
    if not (DATA / name).is_dir():
        pytest.skip("the shared collections are not here")
    assert {finding.kind for finding in check_golden(load_golden(DATA / name))} == kinds


@pytest.mark.parametrize("wrap", [tuple, list, lambda pair: {"anchor": pair[0], "positive": pair[1], "label": 1}])
def test_pairs_and_rows_of_a_data_set_are_read_alike(wrap):
    golden = GoldenSet({"q": "capital of France"}, {"d": "Paris", "e": "Rome"}, {"q": {"d": 1}})
    found = golden.check(train_pairs=[wrap(("Capital of  France", "Lyon"))])
    assert "train-queries" in [finding.kind for finding in found]


@pytest.mark.parametrize("pairs", ["pairs.jsonl", [(1, 2)], [(None, "a")], [1], [("a", "b", "c")], [{"text_a": "x"}]])
def test_what_is_no_pair_of_texts_is_refused(pairs):
    golden = GoldenSet({"q": "capital of France"}, {"d": "Paris", "e": "Rome"}, {"q": {"d": 1}})
    with pytest.raises(ValueError, match="train_pairs must hold"):
        golden.check(train_pairs=pairs)
