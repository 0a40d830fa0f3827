"""Runs that rank a pool of the corpus: the same one at every evaluation, and the whole corpus decides at the end."""

import json
import re

import pytest

from fullrank import GoldenSet, Result, RetrievalCallback, evaluate
from fullrank._errors import DataError, EvaluationError, SettingError
from fullrank.page import read_source
from fullrank.pagedata import page_data
from fullrank.pooling import FILE, draw_pools, n_judged, pooled_sets, read_pools, write_pools
from fullrank.schedule import Cost, Schedule, cost_line, cost_remedy
from fullrank.store import BestStore
from training import Crash, Weights, crash, equal_weights, make_trainer

POOL = 22


def pooled_run(
    tiny_st, golden, pairs, out, *, on_pool=None, full=None, own=None, trained=True, resume=False, **options
):
    """Returns trainer and callback of a run with a pool; values on it, and scores, are those given by step."""
    trainer = make_trainer(tiny_st(), pairs, out, **options)
    callback = RetrievalCallback(golden, **{"every": 2, "pool": POOL, **(own or {})}).attach(trainer)
    weights = Weights()

    class Script(Weights):
        def on_train_begin(self, args, state, control, **kwargs):
            for plan in callback._session.plans.values():
                plan.run = scripted(plan.run)

    def scripted(real):
        def run(**given):
            result = real(**given)
            table = full if given.get("within") is None else on_pool
            if table is not None:
                # At the end a kept step is known by the weights that are in the model.
                live = [at for at, state in weights.at.items() if equal_weights(trainer.model, state)]
                score = table[live[-1] if live else 0]
                if isinstance(score, Exception):
                    raise score
                result.metrics["recall@1"] = score
            return result

        return run

    trainer.callback_handler.callbacks[:0] = [weights]
    trainer.callback_handler.callbacks.insert(2, Script())
    if trained:
        trainer.train(resume_from_checkpoint=resume)
    return trainer, callback, weights


@pytest.fixture(scope="module")
def plain(request, tmp_path_factory, tiny_golden, tiny_bert_path):
    """A real run with a pool: trainer, callback, folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    out = tmp_path_factory.mktemp("pool")
    documents = tiny_golden.doc_texts[:24]
    pairs = {"anchor": [" ".join(d.split()[:4]) for d in documents], "positive": documents}

    def make():
        return SentenceTransformer(modules=[Transformer(str(tiny_bert_path)), Pooling(32)], device="cpu")

    trainer, callback, _ = pooled_run(make, tiny_golden, pairs, out, own={"keep_best": 2})
    return trainer, callback, out


def test_every_evaluation_ranks_the_same_pool(plain, tiny_golden):
    _, callback, out = plain
    documents = json.loads((out / "fullrank" / FILE).read_text())["sets"]["tiny"]["documents"]
    assert len(documents) == POOL
    assert {d for grades in tiny_golden.qrels.values() for d in grades} <= set(documents)
    hard = [d for hits in callback.base_result.hits.values() for d, _ in hits]
    assert set(documents) & set(hard) - {d for grades in tiny_golden.qrels.values() for d in grades}
    for step in (0, 2, 4, 6, 8):
        result = Result.load(out / "fullrank" / f"step-{step}.json")
        assert (result.bound, result.counts["n_ranked"]) == (True, POOL)
        assert {d for hits in result.hits.values() for d, _ in hits} <= set(documents)


def test_values_on_the_pool_never_bear_the_name_of_a_score(plain):
    trainer, callback, _ = plain
    rows = trainer.state.log_history
    assert [row["step"] for row in rows if "eval_recall@1_pool" in row] == [0, 2, 4, 6, 8]
    assert [row["step"] for row in rows if "eval_full_recall@1" in row] == [0, 8]
    assert not [row for row in rows if "eval_recall@1" in row]
    first, second = callback.history[:2]
    assert first.metrics["recall@1_pool"] == first.score >= first.metrics["recall@1"]
    assert second.score == second.metrics["recall@1_pool"]


def test_the_end_is_decided_on_the_whole_corpus(plain, tiny_golden):
    trainer, callback, _out = plain
    now = evaluate(trainer.model, tiny_golden)
    assert callback.best.score == trainer.state.best_metric == now["recall@1"] == callback.best_result["recall@1"]
    assert not callback.best_result.bound
    assert not callback.base_result.bound
    assert callback.comparison is not None
    completed = callback.ending.completed
    assert {entry.step for entry, _ in completed} >= {0, callback.best.step}
    assert len(completed) == len({entry.step for entry, _ in completed} | {0})
    for entry, on_pool in completed:
        assert entry.score <= on_pool
        stored = Result.load(entry.path / "result.tiny.json")
        assert (stored.bound, stored["recall@1"]) == (False, entry.score) or entry.step == 0
        line = next(line for line in callback.history if line.step == entry.step)
        assert (line.metrics["recall@1"], line.score) == (entry.score, on_pool)
    card = (callback.best.path / "README.md").read_text()
    assert "each ranked against all 40 documents, exactly" in card
    assert "the base model and the steps that were kept" in card or callback.best.step == 0


def test_the_report_shows_the_pool_as_a_pool(plain):
    _, callback, out = plain
    run = read_source(out)
    assert (run.pooled, run.label, run.metric) == (True, "recall@1", "recall@1")
    assert (run.best_step, run.improved) == (callback.best.step, callback.improved)
    assert run.best["recall@1"] == callback.best.score
    assert run.intervals == {}  # a bound has none
    page = page_data(run)
    assert "During the run a pool of the corpus was ranked" in page.verdict
    assert "on a pool at 5 evaluations" in page.charts["curve"]["alt"]


# ------------------------------------------------------------------ what decides


VALUES = {0: 0.5, 2: 0.7, 4: 0.9, 6: 0.8, 8: 0.1}


@pytest.mark.parametrize(
    ("full", "best", "improved"),
    [
        ({0: 0.1, 4: 0.2, 6: 0.3}, 6, True),  # the pool says 4
        ({0: 0.4, 4: 0.2, 6: 0.3}, 0, False),  # nothing beat the base, whatever the pool says
        ({0: 0.1, 4: 0.3, 6: 0.3}, 4, True),  # of equal scores the earlier step
        ({0: 0.1, 4: ValueError("broken"), 6: 0.3}, 6, True),
    ],
)
def test_the_score_on_the_whole_corpus_chooses(tiny_st, tiny_golden, pairs, tmp_path, full, best, improved, capsys):
    own = {"keep_best": 2, "verbose": True}
    trainer, callback, weights = pooled_run(tiny_st, tiny_golden, pairs, tmp_path, on_pool=VALUES, full=full, own=own)
    assert (callback.best.step, callback.best.score, callback.improved) == (best, full[best], improved)
    assert trainer.state.best_metric == full[best]
    assert trainer.state.best_global_step == best
    if best:
        assert equal_weights(trainer.model, weights.at[best])
    stored = {e.step: e.score for e in BestStore(tmp_path / "fullrank" / "best").stored}
    assert stored == {step: score for step, score in full.items() if not isinstance(score, Exception)}
    out = capsys.readouterr().out
    assert f"recall@1 step {best} {full[best]:.4f} ({VALUES[best]:.4f} on the pool)" in out
    assert "During the run a pool was ranked, 22 of 40 documents: those values are upper bounds." in out
    assert re.search(r"step 4/8 .* recall@1_pool 0\.9000 of 22 of 40  ndcg@10_pool ", out)
    assert ("Nothing beat the base model" in out) is not improved


def test_where_nothing_can_be_completed_the_error_says_where_the_weights_are(tiny_st, tiny_golden, pairs, tmp_path):
    full = {0: float("nan"), 4: ValueError("broken")}
    with pytest.raises(
        EvaluationError, match=r"none of the kept steps could be evaluated on the whole corpus; they are"
    ):
        pooled_run(tiny_st, tiny_golden, pairs, tmp_path, on_pool=VALUES, full=full)


def test_patience_counts_values_on_the_pool(tiny_st, tiny_golden, pairs, tmp_path):
    values = {0: 0.5, 2: 0.7, 4: 0.6, 6: 0.8}
    trainer, callback, _ = pooled_run(
        tiny_st, tiny_golden, pairs, tmp_path, on_pool=values, full={0: 0.1, 2: 0.2}, own={"patience": 1}
    )
    assert trainer.state.global_step == 4
    assert (callback.best.step, callback.best.score) == (2, 0.2)


def test_several_sets_of_which_one_is_large(tiny_st, tiny_golden, pairs, tmp_path):
    few = dict(list(tiny_golden.corpus.items())[:10])
    small = GoldenSet({"s": "bal"}, few, {"s": {next(iter(few)): 1}}, name="small")
    select = {"tiny/recall@1": 0.5, "small/recall@1": 0.5}
    trainer, callback, _ = pooled_run(
        tiny_st, [tiny_golden, small], pairs, tmp_path, own={"select": select}, max_steps=2
    )
    row = next(row for row in trainer.state.log_history if row["step"] == 0)
    assert row["eval_objective_pool"] == pytest.approx(
        0.5 * row["eval_tiny_recall@1_pool"] + 0.5 * row["eval_small_recall@1"]
    )
    base = next(entry for entry, _ in callback.ending.completed if entry.step == 0)
    assert row["eval_full_objective"] == base.score
    assert "tiny/recall@1_pool" in callback.history[1].metrics
    assert "small/recall@1" in callback.history[1].metrics


def test_a_pool_as_large_as_the_corpus_is_the_same_as_none(tiny_st, tiny_golden, pairs, tmp_path):
    trainer, callback, _ = pooled_run(tiny_st, tiny_golden, pairs, tmp_path, own={"pool": 40}, max_steps=2)
    assert [row["step"] for row in trainer.state.log_history if "eval_recall@1" in row] == [0, 2]
    assert not (tmp_path / "fullrank" / FILE).exists()
    assert callback.ending.completed == ()


# ------------------------------------------------------------------ resuming


def test_a_resumed_run_ranks_the_same_pool_and_ends_the_same(tiny_st, tiny_golden, pairs, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 4}
    whole, expected, _ = pooled_run(tiny_st, tiny_golden, pairs, tmp_path / "whole", **saved)
    broken, _, _ = pooled_run(tiny_st, tiny_golden, pairs, tmp_path / "broken", trained=False, **saved)
    broken.add_callback(Crash(5))
    crash(broken)
    before = (tmp_path / "broken" / "fullrank" / FILE).read_bytes()
    unfinished = page_data(read_source(tmp_path / "broken"))
    assert "During the run a pool of the corpus was ranked" in unfinished.verdict
    assert unfinished.metrics
    trainer, callback, _ = pooled_run(tiny_st, tiny_golden, pairs, tmp_path / "broken", resume=True, **saved)
    assert (tmp_path / "broken" / "fullrank" / FILE).read_bytes() == before
    assert [(h.step, h.score) for h in callback.history] == [(h.step, h.score) for h in expected.history]
    assert (callback.best.step, callback.best.score) == (expected.best.step, expected.best.score)
    assert trainer.state.best_metric == whole.state.best_metric
    again = make_trainer(tiny_st(), pairs, tmp_path / "broken", **saved)
    RetrievalCallback(tiny_golden, every=2, pool=30).attach(again)
    with pytest.raises(DataError, match="began with pool=22, and is resumed with pool=30"):
        again.train(resume_from_checkpoint=True)


def test_a_pool_file_reads_back_and_other_data_are_refused(tiny_golden, tmp_path):
    sets = {"tiny": tiny_golden}
    pools = draw_pools(sets, POOL, {})
    write_pools(tmp_path, sets, POOL, pools)
    assert read_pools(tmp_path, sets, POOL)["tiny"].tolist() == pools["tiny"].tolist()
    other = {
        "tiny": GoldenSet(tiny_golden.queries, {**tiny_golden.corpus, "new": "bal"}, tiny_golden.qrels, name="tiny")
    }
    for golden, pool in ((sets, None), (sets, 21), (other, POOL)):
        with pytest.raises(DataError, match="values on two pools cannot be ranked"):
            read_pools(tmp_path, golden, pool)
    (tmp_path / FILE).write_text('{"pool": 22, "sets": {"tiny": 3}}')
    with pytest.raises(DataError, match="does not list the documents of a pool"):
        read_pools(tmp_path, sets, POOL)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(DataError, match="does not list the documents of a pool"):
        read_pools(tmp_path, sets, POOL)


def test_a_pool_holds_at_least_what_is_judged(tiny_golden):
    assert n_judged(tiny_golden) == 15
    assert len(draw_pools({"tiny": tiny_golden}, 3, {})["tiny"]) == 15
    assert pooled_sets({"tiny": tiny_golden}, 40) == pooled_sets({"tiny": tiny_golden}, None) == frozenset()


# ------------------------------------------------------------------ the trainer's own metric, bad input, cost


def test_the_trainer_may_choose_by_the_value_on_the_pool(tiny_st, tiny_golden, pairs, tmp_path):
    options = {"evaluated": True, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    with pytest.raises(
        SettingError, match=r"metric_for_best_model='recall@1' is not known during a run with pool=\.\.\."
    ):
        pooled_run(tiny_st, tiny_golden, pairs, tmp_path, metric_for_best_model="recall@1", **options)
    options |= {"save_strategy": "best"}
    _, callback, _ = pooled_run(
        tiny_st,
        tiny_golden,
        pairs,
        tmp_path / "b",
        metric_for_best_model="recall@1_pool",
        on_pool={0: 0.1, 2: 0.9, 4: 0.5},
        full={0: 0.1, 2: 0.2},
        **options,
    )
    assert [p.name for p in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-2"]
    assert callback.best.score == 0.2


@pytest.mark.parametrize("pool", [0, -1, 1.5, "all", True])
def test_pools_that_cannot_work(tiny_golden, pool):
    with pytest.raises(SettingError, match=f"pool={pool!r} must be a whole number of documents from 1 or None"):
        RetrievalCallback(tiny_golden, pool=pool)


def test_the_remedy_names_a_pool_where_one_helps():
    dear = Cost(5183, 5180, 300, 1_204_512, 41.0, 51, whole_corpora=(5183,), smallest_pool=300)
    schedule = Schedule(100, 5000)
    assert cost_remedy(dear, schedule, 0.5).endswith("; every=328 or pool=1300 would take 20 %")
    pool = dear.affordable_pool(0.5, 5000, share=0.2)
    on = Cost(pool, pool, 300, 1, 41.0 * pool / 5183, 51, pooled=True, n_whole=2, whole_seconds=41.0)
    assert 0.18 < on.share(0.5, 5000) <= 0.2
    judged = Cost(5183, 5180, 300, 1_204_512, 41.0, 51, whole_corpora=(5183,), smallest_pool=2000)
    assert cost_remedy(judged, schedule, 0.5).endswith("; every=328 would take 20 %")
    short = Cost(5183, 5180, 300, 1_204_512, 41.0, 11, whole_corpora=(5183,), smallest_pool=10)
    assert "this run is too short" in cost_remedy(short, Schedule(10, 100), 0.5)
    assert cost_line(on).endswith("; besides 2 on all 0, about 41 s each")


def test_the_cost_of_a_pool_is_said_before_step_0(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    pooled_run(tiny_st, tiny_golden, pairs, tmp_path, own={"verbose": True}, max_steps=2)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("Evaluations: "))
    assert line.startswith("Evaluations: 22 documents (22 distinct), 15 queries, ")
    assert re.search(r"for 2; besides 2 on all 40, about [\d.]+ m?s each$", line)
