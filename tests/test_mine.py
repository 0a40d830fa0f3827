"""Mined negatives: never an answer, never twice, below the bar, and everything else is counted."""

import json
import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank import GoldenSet, TrainingExample, evaluate, mine_negatives, read_training_data
from fullrank._errors import DataError, SettingError
from fullrank.checks import normalise
from fullrank.mine import REASONS, MiningRules, golden_from_examples, mine_from_hits, pick_negatives

FULLRANK = Path(sys.executable).with_name("fullrank")
TEXTS = {"a": "Answer", "b": "other", "c": "answer ", "d": "third", "e": "OTHER", "f": " ", "g": "the query", "h": "h"}
HITS = [(doc_id, 1 - i / 10) for i, doc_id in enumerate(TEXTS)]


def pick(hits=HITS, positive=math.inf, *, rules, seed=0):
    return pick_negatives(
        hits,
        positive,
        text_of=TEXTS.__getitem__,
        query="The Query",
        answers={"answer"},
        rules=rules,
        rng=random.Random(seed),
    )


# ------------------------------------------------------------------------------------------------ picking


def test_each_candidate_is_taken_or_dropped_for_a_reason():
    picked = pick(rules=MiningRules(from_rank=1, negatives=2, max_ratio=None))
    assert picked.doc_ids == ("b", "d")
    assert picked.dropped == Counter(answer=2, repeated=1, empty=1, query=1, **{"not-needed": 1})
    assert set(picked.dropped) <= set(REASONS)


def test_the_window_of_ranks_is_inclusive():
    assert pick(rules=MiningRules(2, 4, max_ratio=None)).doc_ids == ("b", "d")
    assert pick(rules=MiningRules(5, 8, max_ratio=None)).doc_ids == ("e", "h")
    assert pick(rules=MiningRules(9, 20, max_ratio=None)).doc_ids == ()


@pytest.mark.parametrize(
    ("rules", "positive", "expected"),
    [
        ({"max_ratio": 0.75}, 1.0, ("d", "e", "h")),  # scores .7, .6, .3; 'b' has .9
        ({"max_ratio": None, "margin": 0.35}, 1.0, ("e", "h")),
        ({"max_ratio": 0.75, "margin": 0.5}, 1.0, ("h",)),
        ({"max_ratio": 1.0}, 0.65, ("e", "h")),
        ({"max_ratio": 0.95}, -math.inf, ()),
        ({"max_ratio": 1.0}, -math.inf, ()),
        ({"max_ratio": None}, -math.inf, ("b", "d", "h")),
    ],
)
def test_a_candidate_too_close_to_the_positive_may_be_an_answer(rules, positive, expected):
    assert pick(positive=positive, rules=MiningRules(from_rank=1, **rules)).doc_ids == expected


def test_a_share_of_a_negative_score_is_a_distance():
    rules = MiningRules(max_ratio=0.9)
    assert rules.highest(2.0) == pytest.approx(1.8)
    assert rules.highest(-2.0) == pytest.approx(-2.2)  # not -1.8, which would lie above the positive
    assert MiningRules(max_ratio=0.9, margin=0.5).highest(2.0) == pytest.approx(1.5)


def test_random_ones_are_drawn_by_the_seed_and_stay_in_order():
    rules = MiningRules(from_rank=1, negatives=2, max_ratio=None, sampling="random")
    seen = {pick(rules=rules, seed=seed).doc_ids for seed in range(30)}
    assert seen == {("b", "d"), ("b", "h"), ("d", "h")}
    assert pick(rules=rules, seed=5) == pick(rules=rules, seed=5)


WORD = st.sampled_from(["x", "y", "X ", "z", "", "q", "w"])


@given(
    st.lists(st.tuples(WORD, st.floats(-1, 1)), max_size=12),
    st.sets(WORD.map(normalise)),
    st.floats(-1, 1),
    st.builds(
        MiningRules,
        from_rank=st.integers(1, 3),
        to_rank=st.integers(3, 12),
        max_ratio=st.none() | st.floats(0.1, 1),
        margin=st.none() | st.floats(0, 1),
        negatives=st.integers(1, 5),
        sampling=st.sampled_from(["top", "random"]),
    ),
)
def test_no_answer_no_copy_nothing_above_the_bar_and_nothing_uncounted(rows, answers, positive, rules):
    rows = sorted(rows, key=lambda row: -row[1])
    text = {f"d{i}": word for i, (word, _) in enumerate(rows)}
    hits = [(f"d{i}", score) for i, (_, score) in enumerate(rows)]
    picked = pick_negatives(
        hits, positive, text_of=text.__getitem__, query="Q", answers=answers, rules=rules, rng=random.Random(0)
    )
    window = hits[rules.from_rank - 1 : rules.to_rank]
    texts = [normalise(text[d]) for d in picked.doc_ids]
    assert not set(texts) & answers
    assert len(set(texts)) == len(texts) <= rules.negatives
    assert "" not in texts
    assert "q" not in texts
    places = [[d for d, _ in window].index(d) for d in picked.doc_ids]
    assert places == sorted(places)
    assert all(dict(hits)[d] <= rules.highest(positive) for d in picked.doc_ids)
    assert rules.max_ratio is None or rules.highest(positive) <= positive
    assert len(window) == len(picked.doc_ids) + picked.dropped.total()
    assert len(picked.doc_ids) == rules.negatives or not picked.dropped["not-needed"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"from_rank": 0}, "from_rank=0 must be a whole number from 1"),
        ({"from_rank": 20, "to_rank": 10}, "from_rank=20 lies behind to_rank=10"),
        ({"max_ratio": 0}, "max_ratio=0 must be above 0 and at most 1"),
        ({"max_ratio": 1.5}, "max_ratio=1.5 must be above 0"),
        ({"margin": -1}, "margin=-1 must be a number from 0"),
        ({"margin": math.nan}, "margin=nan must be a number from 0"),
        ({"negatives": None}, "negatives=0 must be a whole number from 1"),
        ({"sampling": "best"}, "sampling='best' is unknown; choose one of top, random"),
    ],
)
def test_rules_that_cannot_work_are_refused(options, text):
    with pytest.raises(SettingError, match=text):
        MiningRules(**options)


# ------------------------------------------------------------------------------------------------ golden sets


def test_queries_of_one_text_share_their_answers_and_low_grades_are_no_negatives():
    golden = GoldenSet(
        {"q": "what", "r": "What "},
        {"a": "one", "b": "two", "c": "three", "d": "four"},
        {"q": {"a": 2, "c": 1}, "r": {"b": 2}},
        relevant_from=2,
    )
    hits = {key: [("a", 0.9), ("b", 0.8), ("c", 0.7), ("d", 0.6)] for key in "qr"}
    mined = mine_from_hits(hits, golden, rules=MiningRules(from_rank=1, max_ratio=None))
    assert mined.examples == [TrainingExample("what", "one", ("four",)), TrainingExample("What ", "two", ("four",))]
    assert mined.n_candidates == 8
    assert mined.dropped["answer"] == 6


def test_an_answer_out_of_the_list_is_counted_and_bars_everything():
    golden = GoldenSet.from_pairs(["what"], ["one", "two", "three"], [2])
    hits = {"q0": [("d0", 0.9), ("d1", 0.8)]}
    mined = mine_from_hits(hits, golden, rules=MiningRules(1, 2))
    assert mined.examples == [TrainingExample("what", "three")]
    assert mined.summary() == {
        "examples": 1,
        "negatives": 0,
        "full": 0,
        "too_few": 0,
        "none": 1,
        "positive_out_of_list": 1,
        "candidates": 2,
        "dropped": {"answer": 0, "query": 0, "empty": 0, "repeated": 0, "too-close": 2, "not-needed": 0},
    }


def test_pairs_become_a_golden_set():
    examples = [TrainingExample("q", "p", ("n",)), TrainingExample("r", "s"), TrainingExample("q", "t")]
    golden = golden_from_examples(examples, ["x", "p"])
    assert golden.doc_texts == ["x", "p", "s", "t"]
    assert golden.queries == {"q0": "q", "q1": "r"}
    assert golden.qrels == {"q0": {"d1": 1, "d3": 1}, "q1": {"d2": 1}}
    with pytest.raises(DataError, match="no training examples"):
        golden_from_examples([])


def test_mining_is_what_a_full_evaluation_ranks(tiny_st, tiny_golden):
    model, rules = tiny_st(), MiningRules(from_rank=3, to_rank=8, max_ratio=None, negatives=4)
    mined = mine_negatives(model, tiny_golden, rules=rules)
    hits = evaluate(model, tiny_golden, list_length=40).hits
    for query_id, example in zip(tiny_golden.query_ids, mined.examples, strict=True):
        ranked = [d for d, _ in hits[query_id][2:8] if d not in tiny_golden.qrels[query_id]]
        assert example.negatives == tuple(tiny_golden.corpus[d] for d in ranked[:4])
    assert mine_negatives(model, tiny_golden, rules=rules) == mined


# ------------------------------------------------------------------------------------------------ the door


@pytest.fixture
def pairs(tmp_path, tiny_golden):
    """Training pairs and a corpus as files."""
    rows = [
        {"query": tiny_golden.queries[q], "positive": tiny_golden.corpus[d]}
        for q, grades in tiny_golden.qrels.items()
        for d in grades
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": d, "text": t}) + "\n" for d, t in tiny_golden.corpus.items())
    )
    return tmp_path


def test_the_command_mines_and_writes_what_the_readers_read(pairs, model_folder):
    arguments = ["--train", "pairs.jsonl", "--corpus", "corpus.jsonl", "--out", "hard.jsonl", "--from-rank", "2"]
    found = subprocess.run(
        [FULLRANK, "mine", model_folder, *arguments, "--any-score", "--negatives", "3", "--json"],
        cwd=pairs,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    counts = json.loads(found.stdout)
    examples = read_training_data(pairs / "hard.jsonl")
    assert counts["out"] == "hard.jsonl"
    assert counts["examples"] == len(examples) == 15
    assert counts["negatives"] == sum(len(e.negatives) for e in examples) == 45
    assert counts["candidates"] == counts["negatives"] + sum(counts["dropped"].values())
    assert all(e.positive not in e.negatives for e in examples)


@pytest.fixture
def run_main(run_main, pairs, monkeypatch):
    """Runs ``fullrank mine`` in the folder of the pairs."""
    monkeypatch.chdir(pairs)
    return lambda *arguments: run_main("mine", *arguments)


def test_the_table_says_how_many_were_dropped_and_why(run_main, model_folder):
    code, out, err = run_main(model_folder, "--train", "pairs.jsonl", "--out", "hard.jsonl", "--from-rank", "1")
    assert code in (0, 1), err
    for text in ("training: 15 queries, 15 documents", "dropped: too-close", "dropped: answer", "ranks 1 to 100"):
        assert text in out
    code, out, err = run_main(model_folder, "--train", "pairs.jsonl", "--out", "none.jsonl", "--from-rank", "90")
    assert code == 1, err
    assert {e.negatives for e in read_training_data("none.jsonl")} == {()}


def test_the_training_split_of_a_golden_set_is_mined(run_main, model_folder, tiny_golden):
    Path("qrels").mkdir()
    rows = [f"{q}\t{d}\t1\n" for q, grades in tiny_golden.qrels.items() for d in grades]
    Path("qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    Path("queries.jsonl").write_text(
        "".join(json.dumps({"_id": q, "text": text}) + "\n" for q, text in tiny_golden.queries.items())
    )
    code, out, err = run_main(model_folder, "--data", ".", "--out", "hard.csv.jsonl", "--any-score", "--json")
    assert code == 0, err
    assert json.loads(out)["negatives"] == 15 * 5
    assert {e.query for e in read_training_data("hard.csv.jsonl")} == set(tiny_golden.query_texts)


def test_wrong_input_is_one_clear_error(run_main, model_folder):
    for arguments, text in (
        (["--out", "x.jsonl"], "give either --data"),
        (["--data", ".", "--train", "pairs.jsonl", "--out", "x.jsonl"], "give either --data"),
        (["--data", ".", "--corpus", "corpus.jsonl", "--out", "x.jsonl"], "--corpus goes with --train"),
        (["--train", "pairs.jsonl", "--out", "x.jsonl", "--any-score", "--margin", "0.1"], "--any-score says that"),
        (["--train", "pairs.jsonl", "--out", "x.jsonl", "--from-rank", "200"], "from_rank=200 lies behind"),
        (["--train", "none.jsonl", "--out", "x.jsonl"], "none.jsonl: there is no such file"),
        (["--train", "pairs.jsonl", "--corpus", "..", "--out", "x.jsonl"], "holds no corpus.jsonl"),
    ):
        code, out, err = run_main(model_folder, *arguments)
        assert (code, out) == (2, ""), err
        assert text in err
    assert not Path("x.jsonl").exists()
