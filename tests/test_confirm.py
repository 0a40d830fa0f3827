"""A second golden set: the winner and the base model are scored on it once, and that is the headline."""

import pytest

from fullrank import GoldenSet, Result, RetrievalCallback, compare, evaluate
from fullrank._errors import DataError, SettingError
from fullrank.guards import checked_confirm
from training import Crash, crash, make_trainer, scripted, scripted_run

SCORES = {0: 0.1, 2: 0.3, 4: 0.9, 6: 0.4, 8: 0.5}


@pytest.fixture
def confirm(tiny_golden):
    """Other queries on the same corpus: the first words of other documents."""
    answers = {doc for grades in tiny_golden.qrels.values() for doc in grades}
    others = [doc for doc in tiny_golden.doc_ids if doc not in answers][:12]
    texts = dict(zip(tiny_golden.doc_ids, tiny_golden.doc_texts, strict=True))
    queries = {f"c{doc}": " ".join(texts[doc].split()[:4]) for doc in others}
    return GoldenSet(queries, texts, {f"c{doc}": {doc: 1} for doc in others}, name="test")


def test_winner_and_base_are_scored_once_after_restoring(tiny_st, tiny_golden, pairs, confirm, tmp_path, capsys):
    base = evaluate(tiny_st(), confirm)
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    callback = scripted(trainer, tiny_golden, SCORES, confirm=confirm, verbose=True)
    trainer.train()
    ending, folder = callback.ending, tmp_path / "fullrank"
    again = evaluate(trainer.model, confirm)  # the restored weights of step 4
    assert callback.best.step == 4
    assert Result.load(folder / "confirm.json").metrics == again.metrics == ending.confirmed.metrics
    assert Result.load(folder / "confirm-base.json").metrics == base.metrics == ending.confirm_base.metrics
    assert ending.confirmation == compare(base, again, "recall@1")
    rows = [row for row in trainer.state.log_history if "eval_confirm_recall@1" in row]
    assert [row["eval_confirm_recall@1"] for row in rows] == [again["recall@1"]]
    last = capsys.readouterr().out.splitlines()[-1]
    low, high = again.ci("recall@1")
    assert last.startswith(
        f"Confirmed on 'test', which did not choose: recall@1 {again['recall@1']:.4f} [{low:.3f}, {high:.3f}], "
        f"{100 * ending.confirmation.delta:+.2f} points ["
    )
    assert last.endswith(f"over 12 queries: {_sure(ending.confirmation.verdict)}.")


def _sure(verdict):
    return verdict if verdict == "not separable" else f"{verdict} than the base model"


def test_it_never_chooses(tiny_st, tiny_golden, pairs, confirm, tmp_path):
    _, plain = scripted_run(tiny_st, tiny_golden, pairs, tmp_path / "a", SCORES)
    _, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path / "b", SCORES, confirm=confirm)
    assert [(h.step, h.score, h.metrics) for h in callback.history] == [
        (h.step, h.score, h.metrics) for h in plain.history
    ]
    assert callback.best.step == plain.best.step


def test_a_resumed_run_confirms_as_an_uninterrupted_one(tiny_st, tiny_golden, pairs, confirm, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4}
    _, whole = scripted_run(tiny_st, tiny_golden, pairs, tmp_path / "whole", SCORES, confirm=confirm, **options)
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "parts", callbacks=[Crash(5)], **options)
    scripted(trainer, tiny_golden, SCORES, confirm=confirm)
    crash(trainer)
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "parts", **options)
    callback = scripted(trainer, tiny_golden, SCORES, confirm=confirm)
    trainer.train(resume_from_checkpoint=True)
    assert callback.ending.confirmed.metrics == whole.ending.confirmed.metrics
    assert callback.ending.confirmation == whole.ending.confirmation


def test_another_confirm_set_on_resume_is_refused(tiny_st, tiny_golden, pairs, confirm, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=[Crash(5)], **options)
    scripted(trainer, tiny_golden, SCORES, confirm=confirm)
    crash(trainer)
    other = GoldenSet(confirm.queries, {**confirm.corpus, "new": "bal"}, confirm.qrels, name="test")
    trainer = make_trainer(tiny_st(), pairs, tmp_path, **options)
    scripted(trainer, tiny_golden, SCORES, confirm=other)
    with pytest.raises(DataError, match="golden set 'test' is not the one that this run began with"):
        trainer.train(resume_from_checkpoint=True)


def test_where_the_base_wins_it_is_confirmed_too(tiny_st, tiny_golden, pairs, confirm, tmp_path):
    scores = {0: 0.99, 2: 0.3, 4: 0.2, 6: 0.4, 8: 0.5}
    _, callback = scripted_run(tiny_st, tiny_golden, pairs, tmp_path, scores, confirm=confirm)
    assert callback.ending.confirmed.metrics == callback.ending.confirm_base.metrics
    assert callback.ending.confirmation.delta == 0.0


def test_a_confirm_set_that_is_the_same_set_is_refused(tiny_golden):
    same = GoldenSet(tiny_golden.queries, tiny_golden.corpus, tiny_golden.qrels, name="test")
    with pytest.raises(DataError, match=r"15 of the 15 queries of confirm='test' also choose, in 'tiny' \('q0', "):
        RetrievalCallback(tiny_golden, confirm=same)


def test_a_confirm_set_with_some_of_the_queries_is_a_finding(tiny_golden, confirm):
    shared = GoldenSet(
        {**confirm.queries, "again": tiny_golden.queries["q3"].upper()},
        confirm.corpus,
        {**confirm.qrels, "again": {"d1": 1}},
        name="test",
    )
    finding = checked_confirm(shared, tiny_golden)
    assert (finding.kind, finding.severity, finding.count, finding.examples) == (
        "confirm-shared",
        "warning",
        1,
        ("again",),
    )
    assert checked_confirm(confirm, tiny_golden) is None


def test_the_finding_is_told_in_the_run(tiny_st, tiny_golden, pairs, confirm, tmp_path, caplog):
    shared = GoldenSet(
        {**confirm.queries, "again": tiny_golden.queries["q3"]},
        confirm.corpus,
        {**confirm.qrels, "again": {"d1": 1}},
        name="test",
    )
    scripted_run(tiny_st, tiny_golden, pairs, tmp_path, SCORES, confirm=shared)
    assert caplog.text.count("1 of the 13 queries of confirm='test' also choose, in 'tiny'") == 1


@pytest.mark.parametrize("confirm", ["folder", 3, []])
def test_what_is_no_golden_set_cannot_confirm(tiny_golden, confirm):
    with pytest.raises(DataError, match="golden must be a GoldenSet"):
        RetrievalCallback(tiny_golden, confirm=confirm)


def test_a_name_that_is_taken(tiny_golden, confirm):
    again = GoldenSet(confirm.queries, confirm.corpus, confirm.qrels, name="tiny")
    with pytest.raises(SettingError, match="confirm needs a name of its own, got 'tiny'"):
        RetrievalCallback(tiny_golden, confirm=again)


def test_a_confirmation_that_fails_is_said_and_the_choice_stands(
    tiny_st, tiny_golden, pairs, confirm, tmp_path, caplog
):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    callback = scripted(trainer, tiny_golden, SCORES, confirm=confirm)

    class Break(type(callback).__mro__[1]):
        def on_step_end(self, args, state, control, **kwargs):
            def run(**options):
                raise ValueError("the disk with the second set is gone")

            callback._session.confirm.run = run

    trainer.add_callback(Break())
    trainer.train()
    assert (callback.best.step, callback.ending.confirmed) == (4, None)
    assert "'test' could not be scored to confirm the choice: the disk with the second set is gone" in caplog.text
    assert trainer.state.best_global_step == 4
