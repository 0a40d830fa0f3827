"""The model card: what chose the model, how sure that is, how to measure it again."""

import doctest
import re
from dataclasses import replace

import peft
import pytest
from typer.testing import CliRunner

from fullrank import Backbone, GoldenSet, Result, RetrievalCallback, card, evaluate, load_golden
from fullrank.card import card_section, with_section
from fullrank.cli import app
from training import LORA, make_trainer, plain_trainer, scripted, scripted_run, write_beir

SCORES = {0: 0.1, 2: 0.3, 4: 0.9, 6: 0.4, 8: 0.5}


@pytest.fixture(scope="module")
def result(tiny_bert_path, tiny_golden):
    from sentence_transformers import SentenceTransformer

    return evaluate(SentenceTransformer(str(tiny_bert_path), device="cpu"), tiny_golden, metrics=["recall@1", "mrr@10"])


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(card).failed == 0


def test_the_section_says_what_chose_on_what_and_how_sure_that_is(result):
    low, high = result.ci("recall@1")
    text = card_section("recall@1", result, golden="dev", step=40, base=result)
    assert text.startswith("## Chosen by full-corpus retrieval\n")
    assert (
        "Step 40 had the highest `recall@1` of the run's evaluations on the golden set `dev`: 15 held-out queries, "
        "each ranked against all 40 documents, exactly (ties: expected)." in text
    )
    assert f"| this model | `dev` | {result['recall@1']:.4f} | {low:.4f} to {high:.4f} |" in text
    assert "| base model (step 0) | `dev` |" in text
    assert "The highest of several scores flatters: it was chosen on the same queries." in text
    assert "fullrank eval . --data GOLDEN_SET_FOLDER --metrics recall@1,mrr@10\n" in text


def test_guards_and_the_split_stand_there(result):
    of_dev = replace(result, provenance={**result.provenance, "split": "dev"})
    text = card_section("recall@1", of_dev, golden="dev", step=4, guards=[("faq", "ndcg@10", 0.02)])
    assert "did not fall further below the base model than: `ndcg@10` on `faq` at most 2 points." in text
    assert "--data GOLDEN_SET_FOLDER --split dev --metrics" in text


def test_a_confirmed_number_stands_beside_it(result):
    text = card_section("recall@1", result, golden="dev", step=4, confirmed=("test", result, None))
    assert "| this model, confirmed | `test` |" in text
    assert "The confirmed score is the honest one: its queries took no part in the choice." in text
    assert "base model" not in text


def test_a_composite_names_itself_and_shows_its_leading_metric(result):
    text = card_section("recall@1", result, golden="dev", step=4, chosen_by="objective")
    assert "the highest `objective` of" in text
    assert "| | golden set | recall@1 |" in text


def test_names_cannot_break_out_of_the_table(result):
    text = card_section("recall@1", result, golden="a|b`<script>`\n| x |", step=4)
    (row,) = [line for line in text.splitlines() if line.startswith("| this model")]
    assert "`a/b'<script>' / x /`" in row
    assert row.count("|") == 5


@pytest.mark.parametrize("old", ["", "# Model\n\nText.\n", "---\nlicense: mit\n---\n# Model"])
def test_a_section_replaces_its_own_and_nothing_else(old):
    first = with_section(old, "one")
    second = with_section(first, "two")
    assert "one" in first
    assert "one" not in second
    assert second.startswith(old.rstrip())
    assert with_section(second + "\nmore\n", "three").endswith("<!-- fullrank: end -->\nmore\n")


@pytest.mark.parametrize("keep_best", [1, 3])
def test_the_stored_folder_has_a_card_with_results_of_its_own_step(tiny_st, tiny_golden, pairs, tmp_path, keep_best):
    trainer, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, SCORES, keep_best=keep_best)
    text = (callback.best.path / "README.md").read_text()
    stored = Result.load(callback.best.path / "result.tiny.json")
    assert text.count("## Chosen by full-corpus retrieval") == 1
    assert "Step 4 had the highest `recall@1`" in text
    assert f"| this model | `tiny` | {stored['recall@1']:.4f} |" in text
    # What sentence-transformers makes of it: a table and the metadata of the hub, of this step alone.
    assert "Full-Corpus Retrieval" in text
    assert f"- type: ndcg@10\n      value: {stored['ndcg@10']}" in text
    trainer.model.save_pretrained(str(tmp_path / "own"))
    assert f"- type: ndcg@10\n      value: {stored['ndcg@10']}" in (tmp_path / "own" / "README.md").read_text()


def test_the_command_of_the_card_gives_the_number_of_the_card(tiny_st, tiny_golden, pairs, tmp_path):
    folder = tmp_path / "data"
    write_beir(tiny_golden, folder)
    (folder / "qrels" / "test.tsv").rename(folder / "qrels" / "dev.tsv")
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "run", max_steps=2)
    callback = RetrievalCallback(load_golden(folder, "dev"), every=1).attach(trainer)
    trainer.train()
    text = (callback.best.path / "README.md").read_text()
    command = re.search(r"^fullrank eval \. --data GOLDEN_SET_FOLDER (.*)$", text, re.M)[1].split()
    out = tmp_path / "again.json"
    run = CliRunner().invoke(app, ["eval", str(callback.best.path), "--data", str(folder), "--out", str(out), *command])
    assert run.exit_code == 0, run.output
    shown = re.search(r"\| this model \| `data-dev` \| ([\d.]+) \|", text)[1]
    assert f"{Result.load(out)['recall@1']:.4f}" == shown


@pytest.mark.parametrize("route", ["full", "lora"])
def test_a_plain_trainer_gets_a_card_too(tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path, route):
    backbone = tiny_bert if route == "full" else peft.get_peft_model(tiny_bert, peft.LoraConfig(**LORA))
    trainer = plain_trainer(backbone, tiny_tokenizer, pairs, tmp_path)
    callback = scripted(trainer, tiny_golden, SCORES, encoder=Backbone(backbone, tiny_tokenizer))
    trainer.train()
    assert (callback.best.path / "README.md").read_text().count("## Chosen by full-corpus retrieval") == 1


def test_the_card_is_completed_by_the_confirmed_score(tiny_st, tiny_golden, pairs, tmp_path):
    texts = dict(zip(tiny_golden.doc_ids, tiny_golden.doc_texts, strict=True))
    confirm = GoldenSet({"c": "bal can"}, texts, {"c": {"d1": 1}}, name="test")
    _, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, SCORES, confirm=confirm)
    text = (callback.best.path / "README.md").read_text()
    assert text.count("## Chosen by full-corpus retrieval") == 1
    assert f"| this model, confirmed | `test` | {callback.ending.confirmed['recall@1']:.4f} |" in text
    assert text.count("| base model (step 0) |") == 2
