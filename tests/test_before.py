"""What a run says before step 0: texts of the golden set in the training data, prompts that do not fit."""

import logging
import time

import pytest
from datasets import Dataset, DatasetDict

from fullrank import Backbone, GoldenSet, RetrievalCallback
from fullrank._errors import DataError
from fullrank.encode import as_encoder
from fullrank.leaks import dataset_texts, flat_texts, leaks
from fullrank.prompting import prompt_findings, prompts_text, trained_prompts
from training import arguments, make_trainer, plain_trainer


@pytest.fixture(scope="module")
def golden():
    corpus = {"a": "Paris is  in France", "b": "Rome", "c": "Bern"}
    queries = {"q1": "capital of France?", "q2": "capital of Italy?", "q3": "no answer"}
    return GoldenSet(queries, corpus, {"q1": {"a": 2, "c": 0}, "q2": {"b": 1}, "q3": {}}, name="cities")


def kinds(findings):
    return [(finding.kind, finding.examples) for finding in findings]


# ------------------------------------------------------------------ leaks


def test_queries_and_relevant_texts_are_found_whatever_case_and_white_space(golden):
    found = leaks([golden], ["CAPITAL of\nfrance?", "paris is in france", "Bern", "something else"])
    assert kinds(found) == [("train-queries", ("q1",)), ("train-documents", ("a",))]  # c is judged, and not relevant
    assert [finding.severity for finding in found] == ["error", "warning"]
    assert str(found[0]) == (
        "error: 1 query of 'cities' with a text that is in the training data ('q1'). Remove them from the training "
        "data: this set is not held out"
    )
    assert leaks([golden], ["something else", ""]) == []
    long = "x" * 100
    odd = GoldenSet({"q": f"{long} Ü two"}, {"d": f"one  {long}", "e": "e"}, {"q": {"d": 1}}, name="odd")
    assert kinds(leaks([odd], [f" {long}\tu\u0308 TWO", f"ONE {long}  "])) == [
        ("train-queries", ("q",)),
        ("train-documents", ("d",)),
    ]


def test_texts_pairs_and_triplets_are_read_alike(golden):
    pairs = [("x", "Rome"), ["capital of Italy?", "y", "z"], "no answer"]
    assert kinds(leaks([golden], flat_texts(iter(pairs)))) == [
        ("train-queries", ("q2", "q3")),
        ("train-documents", ("b",)),
    ]
    for wrong in ("a text", {"anchor": "x"}, 3):
        with pytest.raises(DataError, match="train_texts must be texts or"):
            list(flat_texts(wrong))
    with pytest.raises(DataError, match=r"train_texts must hold texts or \(query, positive\) pairs; got .\('x', 1\)"):
        RetrievalCallback(golden, train_texts=[("x", 1)])


def test_a_dataset_gives_its_text_columns_as_they_are_selected():
    rows = Dataset.from_dict({"a": ["x", "y", None], "n": [1, 2, 3], "b": ["u", "v", "w"]})
    assert sorted(dataset_texts(rows)) == ["u", "v", "w", "x", "y"]
    assert sorted(dataset_texts(rows.select([1]))) == ["v", "y"]
    assert sorted(dataset_texts(DatasetDict({"one": rows.select([0]), "two": rows.select([1])}))) == list("uvxy")
    assert list(dataset_texts(Dataset.from_dict({"n": [1]}))) == []


def test_what_can_be_read_once_only_is_left_alone(caplog):
    stream = Dataset.from_dict({"a": ["x"]}).to_iterable_dataset()
    with caplog.at_level(logging.INFO, logger="fullrank"):
        assert list(dataset_texts(stream)) == []
    assert "a IterableDataset is not searched for texts of the golden set" in caplog.text
    assert list(dataset_texts(None)) == []


def test_a_run_says_what_leaks_before_step_0(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=1)
    RetrievalCallback(tiny_golden, every=1, verbose=True).attach(trainer)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    relevant = {d for grades in tiny_golden.qrels.values() for d in grades} & set(tiny_golden.doc_ids[:24])
    said = [line for line in lines if "in the training data" in line]
    assert len(said) == 1
    assert said[0].startswith(f"warning: {len(relevant)} relevant documents of 'tiny' with a text that is")
    assert lines.index(said[0]) < next(i for i, line in enumerate(lines) if line.startswith("step 0/1"))


def test_strict_raises_before_training(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "a", max_steps=1)
    RetrievalCallback(tiny_golden, strict=True).attach(trainer)
    with pytest.raises(DataError, match=r"strict=True, and warning: \d+ relevant documents of 'tiny'"):
        trainer.train()
    assert trainer.state.global_step == 0
    queries = [(text, "x") for text in tiny_golden.query_texts]
    with pytest.raises(DataError, match="strict=True, and error: 15 queries of 'tiny'"):
        RetrievalCallback(tiny_golden, strict=True, train_texts=iter(queries))
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "b", max_steps=1)
    RetrievalCallback(tiny_golden, strict=True, train_texts=()).attach(trainer)  # the user knows
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_second_set_is_looked_at_too(golden):
    other = GoldenSet({"z": "quite another question"}, {"a": "answer"}, {"z": {"a": 1}}, name="second")
    callback = RetrievalCallback(golden, confirm=other, train_texts=["quite another question"])
    assert [f.message for f in callback.options.findings] == [
        "1 query of 'second' with a text that is in the training data"
    ]


def test_a_hundred_thousand_pairs_take_moments(golden):
    text = "word " * 150
    start = time.perf_counter()
    assert leaks([golden], (f"{i} {text}" for i in range(100_000))) == []
    assert time.perf_counter() - start < 10  # about a second; 1 million pairs of query and passage take some seconds


# ------------------------------------------------------------------ prompts

PROMPTS = {"query": "query : ", "document": "document : "}


def test_prompts_in_use_and_what_speaks_against_them(tiny_st, tiny_bert, tiny_tokenizer):
    own = as_encoder(tiny_st(prompts=PROMPTS))
    assert prompts_text(own) == "Prompts: queries 'query : ', documents 'document : '"
    assert prompt_findings(own) == []
    assert prompts_text(as_encoder(tiny_st())) is None
    unused = as_encoder(tiny_st(prompts=PROMPTS), query_prompt="")
    assert kinds(prompt_findings(unused)) == [("prompt-unused", ("query",))]
    same = Backbone(tiny_bert, tiny_tokenizer, query_prompt="query : ", document_prompt="query : ")
    assert [str(f) for f in prompt_findings(same)] == [
        "warning: queries and documents have the same prompt, 'query : '. Right for a model that was made so; "
        "elsewhere give documents a prompt of their own, or none"
    ]
    assert prompt_findings(own, [("query : ", "document : ")]) == []
    (other,) = prompt_findings(own, [("", ""), ("query : ", "document : ")])
    assert (other.kind, other.count) == ("prompt-trained", 1)
    assert other.message.startswith("evaluations put 'query : ' before queries and 'document : ' before documents")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (None, [("", "")]),
        ("query : ", [("query : ", "query : ")]),
        ({"anchor": "query : "}, [("query : ", "")]),
        ({"anchor": "query : ", "positive": "document : "}, [("query : ", "document : ")]),
    ],
)
def test_prompts_of_training(tiny_st, pairs, tmp_path, prompts, expected):
    assert trained_prompts(make_trainer(tiny_st(), pairs, tmp_path, prompts=prompts)) == expected


def test_prompts_of_several_datasets(tmp_path):
    class Trainer:
        args = arguments(tmp_path, prompts={"one": {"a": "query : "}, "two": "all : "})
        train_dataset = DatasetDict(
            {n: Dataset.from_dict({"a": ["x"], "b": ["y"], "label": [1]}) for n in ("one", "two")}
        )

    assert trained_prompts(Trainer()) == [("query : ", ""), ("all : ", "all : ")]


def test_a_plain_trainer_knows_no_prompts(tiny_bert, tiny_tokenizer, pairs, tmp_path):
    assert trained_prompts(plain_trainer(tiny_bert, tiny_tokenizer, pairs, tmp_path)) == []
    assert trained_prompts(None) == []


def test_a_run_says_its_prompts_once_and_that_training_has_others(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    trainer = make_trainer(tiny_st(prompts=PROMPTS), pairs, tmp_path, max_steps=2)
    RetrievalCallback(tiny_golden, every=1, verbose=True).attach(trainer)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    step_0 = next(i for i, line in enumerate(lines) if line.startswith("step 0/2"))
    for start in ("Prompts: queries 'query : '", "warning: evaluations put 'query : ' before queries"):
        assert [i < step_0 for i, line in enumerate(lines) if line.startswith(start)] == [True], start


def test_an_unused_prompt_is_said_once(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    model = tiny_st(prompts=PROMPTS)
    trainer = make_trainer(model, pairs, tmp_path, max_steps=2)
    encoder = as_encoder(model, query_prompt="", document_prompt="")
    RetrievalCallback(tiny_golden, every=1, encoder=encoder, verbose=True).attach(trainer)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    said = [i for i, line in enumerate(lines) if "the model declares a prompt that was not used" in line]
    assert len(said) == 1
    assert said[0] < next(i for i, line in enumerate(lines) if line.startswith("step 0/2"))
