"""Selecting among real checkpoints: the winner of an exhaustive evaluation, rules, guards, soup, resuming."""

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import Trainer, TrainingArguments

from fullrank import Guard, Metric, evaluate, select_checkpoint
from fullrank._errors import DataError, SettingError
from fullrank.candidates import Loader
from fullrank.discover import discover, inspect_folder
from fullrank.handing import hand_over
from fullrank.leaderboard import choice_text, leaderboard_table

peft = pytest.importorskip("peft")
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["query", "value"]}
STEPS = (4, 8, 12, 16, 20)  # of tiny_runs


@pytest.fixture(scope="session")
def golden(make_golden):
    return make_golden(3, name="dev")


@pytest.fixture(scope="session")
def base_folder(tiny_base_path):
    return tiny_base_path


@pytest.fixture
def run(tiny_runs, tmp_path):
    """Factory: a fresh copy of a run."""

    def copy(how="full"):
        return Path(shutil.copytree(tiny_runs[how], tmp_path / how))

    return copy


def direct(folder, golden, metric="recall@1"):
    """Returns the score by the plain way: the folder loaded by sentence-transformers, evaluated in full."""
    return evaluate(SentenceTransformer(str(folder), device="cpu"), golden, metrics=[metric])[metric]


# ------------------------------------------------------------------------------------- the winner, on real weights


@pytest.mark.parametrize(
    ("how", "metric"), [("full", "recall@1"), ("full", "ndcg@10"), ("peft", "ndcg@10"), ("around", "recall@1")]
)
def test_the_winner_and_its_score_are_those_of_evaluating_every_checkpoint(run, golden, base_folder, how, metric):
    folder = run(how)
    found = select_checkpoint(folder, golden, metric=metric, base=str(base_folder))
    whole = select_checkpoint(
        folder, golden, metric=metric, base=str(base_folder), exhaustive=True, journal=folder / "all.json"
    )
    assert [row.status for row in whole.rows] == ["complete"] * 6
    assert found.winner.name == whole.winner.name
    assert found.winner.score == whole.winner.score
    if how != "around":  # which no other library can load
        plain = {step: direct(folder / f"checkpoint-{step}", golden, metric) for step in STEPS}
        plain[0] = direct(base_folder, golden, metric)
        top = max(plain.values())
        assert found.winner.step == min(step for step, score in plain.items() if score == top)
        assert {row.step: row.score for row in whole.rows} == plain
    assert whole.share == 1.0
    assert found.share < 1.0
    assert whole.documents_encoded == 6 * len(golden.corpus)
    bounds = {row.name: row.bound for row in found.rows}
    assert all(bounds[row.name] >= row.score for row in whole.rows)


def test_pruned_ones_are_called_proved_lower_and_carry_no_score(run, golden, base_folder):
    found = select_checkpoint(run(), golden, base=str(base_folder))
    pruned = [row for row in found.rows if row.status == "pruned"]
    assert pruned
    for row in pruned:
        assert row.score is None
        assert row.interval is None
        assert row.why in ("proved lower on these queries", "proved no higher on these queries, and later")
        assert row.coverage < 1
    assert found.base.step == 0
    text = leaderboard_table(found)
    assert all(row.why in text for row in pruned)
    assert "<= 0." in text
    assert "significant" not in text + choice_text(found)


def test_the_base_is_a_candidate_and_wins_where_training_spoils(run, golden, base_folder):
    folder = run()
    for step in STEPS:
        model = SentenceTransformer(str(folder / f"checkpoint-{step}"), device="cpu")
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(step)))
        model.save_pretrained(str(folder / f"checkpoint-{step}"))
    found = select_checkpoint(folder, golden, base=str(base_folder))
    assert found.winner.name == "base"
    assert found.improved is False
    assert choice_text(found).startswith("Nothing beat the base model by recall@1.")


def test_a_base_is_left_at_its_bound_where_that_proves_the_choice_better(run, golden, base_folder):
    folder = run()
    exact = select_checkpoint(folder, golden, exhaustive=True, base=str(base_folder), journal=folder / "all.json")
    whole = select_checkpoint(folder, golden, compare_base=True, base=str(base_folder), journal=folder / "base.json")
    found = select_checkpoint(folder, golden, base=str(base_folder))
    assert found.winner.name == whole.winner.name == exact.winner.name
    assert whole.comparison == exact.comparison
    assert whole.p_at_most is None
    assert whole.base.status == "complete"
    assert found.winner.score - found.base.bound == pytest.approx(found.winner.delta)
    assert found.winner.delta <= whole.winner.delta
    if found.base.status == "complete":  # on so few queries a bound seldom proves it
        assert found.comparison == exact.comparison
    again = select_checkpoint(folder, golden, base=str(base_folder))
    assert (again.documents_spent, again.p_at_most) == (found.documents_spent, found.p_at_most)


def test_what_a_bound_proves_is_said_and_remembered(run, golden, base_folder, tmp_path, monkeypatch):
    folder, poor = run(), tmp_path / "poor"
    model = SentenceTransformer(str(base_folder), device="cpu")
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(str(poor))
    exact = select_checkpoint(folder, golden, exhaustive=True, base=str(poor), journal=folder / "all.json")
    monkeypatch.setattr("fullrank.selecting.UNLIKELY", 0.0)
    monkeypatch.setattr("fullrank.selecting.LEVEL", 0.2)  # forty queries prove little
    found = select_checkpoint(folder, golden, base=str(poor))
    assert found.winner.name == exact.winner.name
    assert found.base.status == "pruned"
    assert found.comparison is None
    assert exact.comparison.p_value <= found.p_at_most + 0.01
    assert 0 < found.winner.delta <= exact.comparison.delta
    assert choice_text(found).startswith(
        f"Chosen: step {found.winner.step} ({found.winner.name}) by recall@1: at least {100 * found.winner.delta:+.2f} "
        f"points over the base model, p at most {found.p_at_most:.4f}: better than the base model ("
        f"{found.base.coverage:.0%} of the documents were ranked for it; --compare-base for the interval)."
    )
    again = select_checkpoint(folder, golden, base=str(poor))
    assert (again.documents_spent, again.p_at_most) == (found.documents_spent, found.p_at_most)


def test_the_base_of_adapters_is_the_one_that_they_name(run, golden, base_folder):
    found = select_checkpoint(run("peft"), golden, exhaustive=True)
    assert found.base.path == str(base_folder)
    assert found.base.score == direct(base_folder, golden)
    assert found.comparison.n == 40


def test_weights_that_were_stored_by_the_callback_are_taken_with_what_trained_beside_the_adapter(
    tmp_path, golden, base_folder
):
    from fullrank import RetrievalCallback

    model = SentenceTransformer(str(base_folder), device="cpu")
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    for name, value in model.named_parameters():
        if "LayerNorm" in name:
            value.requires_grad_(True)
    documents = golden.doc_texts[:120]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=4,
            learning_rate=2e-2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="steps",
            save_steps=2,
        ),
        train_dataset=Dataset.from_dict({"anchor": [d[: len(d) // 2] for d in documents], "positive": documents}),
        loss=MultipleNegativesRankingLoss(model),
    )
    callback = RetrievalCallback(golden, every=2, keep_best=3).attach(trainer)
    trainer.train()
    scores = {line.step: line.score for line in callback.history}
    found = select_checkpoint(tmp_path / "run", golden, exhaustive=True)
    assert {row.step: row.score for row in found.rows} == scores
    assert {row.name for row in found.rows} == {f"fullrank/best/step-{step}" for step in (0, 2, 4)}
    assert found.base.name == "fullrank/best/step-0"
    # The stored step 0 is the base, with what had been trained before the run began.
    assert found.base.path == str(tmp_path / "run" / "fullrank" / "best" / "step-0")
    # Handed over, it loads everywhere, with the norms that sentence-transformers would not have found.
    target = hand_over(found, tmp_path / "chosen")
    assert direct(target, golden) == found.winner.score


# ------------------------------------------------------------------------------------- loading


class Wrapped(torch.nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"loss": hidden[:, 0].pow(2).mean()}


@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpoints_of_a_plain_trainer_take_pooling_from_the_base(
    tmp_path, golden, base_folder, tiny_bert, tiny_tokenizer, wrapped
):
    model = Wrapped(tiny_bert)
    if not wrapped:
        model = tiny_bert
    folder = tmp_path / "checkpoint-3"
    with torch.no_grad():
        tiny_bert.encoder.layer[0].output.dense.weight.mul_(1.5)
    if wrapped:
        rows = [{"input_ids": [2, 7, 8, 3], "attention_mask": [1] * 4}] * 4
        options = {"max_steps": 1, "save_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True}
        Trainer(model=model, args=TrainingArguments(str(tmp_path), **options), train_dataset=rows).train()
        folder = tmp_path / "checkpoint-1"
    else:
        model.save_pretrained(folder)
    candidate = inspect_folder(folder, folder.name, origin="checkpoint")
    assert candidate.bare
    with pytest.raises(DataError, match=r"holds the weights of a backbone and no modules.json: pass --base MODEL"):
        Loader().load(candidate)
    _, encoder = Loader(str(base_folder)).load(candidate)
    plain = SentenceTransformer(str(base_folder), device="cpu")
    plain[0].model = tiny_bert.eval()
    texts = golden.query_texts[:5]
    assert torch.equal(encoder.encode_queries(texts), torch.from_numpy(plain.encode(texts)))


def test_swapping_weights_leaves_nothing_behind(run, golden, base_folder):
    texts = golden.query_texts[:6]
    for how in ("full", "peft"):
        candidates, loader = discover(run(how)), Loader()
        shared = {loader.load(c)[0] for c in candidates}
        assert len(shared) == 1  # one model in memory
        for candidate in [*candidates, *candidates[::-1]]:
            plain = SentenceTransformer(str(candidate.path), device="cpu").encode(texts)
            assert np.array_equal(loader.load(candidate)[1].encode_queries(texts).numpy(), plain)
            _, encoder = loader.load_base(str(base_folder), candidates[0])
            plain = SentenceTransformer(str(base_folder), device="cpu").encode(texts)
            assert np.array_equal(encoder.encode_queries(texts).numpy(), plain)


def test_an_adapter_whose_base_has_moved_is_loaded_on_the_one_given(run, golden, base_folder, tmp_path):
    folder = run("peft")
    for config in folder.glob("*/adapter_config.json"):
        body = json.loads(config.read_text())
        config.write_text(json.dumps({**body, "base_model_name_or_path": str(tmp_path / "gone")}))
    lost = select_checkpoint(folder, golden, journal=tmp_path / "lost.json")
    assert lost.winner is None
    assert all(row.status == "failed" for row in lost.rows)
    assert "is an adapter on the base" in lost.rows[1].why
    table = leaderboard_table(lost)
    assert table.count("is an adapter on the base") == 2  # once for the base, once for all that name it
    assert "pass --base MODEL" in lost.rows[1].why
    assert choice_text(lost) == "Nothing was chosen: no candidate could be evaluated."
    found = select_checkpoint(folder, golden, base=str(base_folder), exhaustive=True)
    assert all(row.status == "complete" for row in found.rows)
    target = hand_over(found, tmp_path / "chosen", base=str(base_folder))
    named = json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(base_folder)
    assert direct(target, golden) == found.winner.score


# ------------------------------------------------------------------------------------- rules, guards, confirming, soup


def test_one_se_gives_an_earlier_step_and_names_what_is_tied(run, golden, base_folder):
    folder = run()
    best = select_checkpoint(folder, golden, base=str(base_folder), exhaustive=True)
    near = select_checkpoint(folder, golden, base=str(base_folder), rule="one-se", journal=folder / "b.json")
    assert near.winner.step <= best.winner.step
    differences = {}
    for row in best.rows:
        model = SentenceTransformer(str(row.path), device="cpu")
        differences[row.step] = evaluate(model, golden, metrics=["recall@1"]).per_query["recall@1"]
    top = differences[best.winner.step]

    def within(values):
        lost = top - values
        return lost.mean() <= lost.std(ddof=1) / np.sqrt(len(lost))

    assert near.winner.step == min(step for step, values in differences.items() if within(values))
    tied = select_checkpoint(folder, golden, base=str(base_folder), tied=True, journal=folder / "c.json")
    assert tied.winner.step == best.winner.step
    assert tied.tied is not None
    assert "on these queries (Holm, 95 %)" in choice_text(tied)


def test_a_guard_refuses_what_loses_too_much_of_the_base(run, golden, base_folder, make_golden):
    folder = run()
    general = make_golden(11, name="general", n_documents=200)
    scores = {step: direct(folder / f"checkpoint-{step}", general, "ndcg@10") for step in STEPS}
    base = direct(base_folder, general, "ndcg@10")
    free = select_checkpoint(folder, golden, base=str(base_folder), exhaustive=True)
    drop = base - scores[free.winner.step]
    # A floor just above the winner's score on the general set refuses it; one just below does not.
    strict = Guard(general, "ndcg@10", min(0.99, max(0.0, drop - 1e-6)))
    if drop > 1e-6:
        held = select_checkpoint(folder, golden, base=str(base_folder), guards=[strict], journal=folder / "g.json")
        assert held.winner.step != free.winner.step
        row = next(row for row in held.rows if row.step == free.winner.step)
        assert row.eligible is False
        assert row.why.startswith("general: ndcg@10")
        assert "not eligible" in leaderboard_table(held)
        allowed = {s for s, v in scores.items() if v >= base - strict.max_drop} | {0}
        whole = {r.step: r.score for r in free.rows if r.step in allowed}
        assert held.winner.step == min(s for s, v in whole.items() if v == max(whole.values()))
    loose = Guard(general, "ndcg@10", min(0.99, max(0.0, drop + 1e-6)))
    kept = select_checkpoint(folder, golden, base=str(base_folder), guards=[loose], journal=folder / "h.json")
    assert kept.winner.step == free.winner.step


def test_what_no_guard_has_judged_is_neither_eligible_nor_refused(run, golden, base_folder, make_golden, monkeypatch):
    from fullrank import contest

    folder, general = run(), make_golden(9, name="general")
    options = {"metric": "ndcg@10", "base": str(base_folder)}
    free = select_checkpoint(folder, golden, **options, exhaustive=True, journal=folder / "a.json")
    last = [row for row in free.rows if row.origin == "checkpoint"][-1]
    real = contest.Contestant._extend
    assert all(row.eligible is True for row in free.rows)

    def killed(self, name, golden, *, whole):
        if name.startswith("guard") and self.candidate.name == last.name:
            raise Stop
        real(self, name, golden, whole=whole)

    monkeypatch.setattr(contest.Contestant, "_extend", killed)
    options["guards"] = [Guard(general, "ndcg@10", 0.9)]
    with pytest.raises(Stop):
        select_checkpoint(folder, golden, **options, exhaustive=True)
    monkeypatch.undo()
    found = select_checkpoint(folder, golden, **options)
    row = next(row for row in found.rows if row.name == last.name)
    assert (row.status, row.score, row.eligible) == ("complete", last.score, None)
    assert row.why == "not judged by the guards: it could not be chosen anyway"
    assert leaderboard_table(found).count("not judged") == 2
    assert next(r for r in found.as_dict()["rows"] if r["name"] == last.name)["eligible"] is None
    anew = select_checkpoint(folder, golden, **options, journal=folder / "b.json")
    assert {row.eligible for row in anew.rows if row.status == "pruned" and row.name != "base"} == {None}
    assert (anew.winner.name, anew.winner.eligible) == (free.winner.name, True)


def test_those_of_which_the_best_are_kept_are_those_that_keeping_decides_on(run, golden, tmp_path, monkeypatch):
    from fullrank import select
    from fullrank.keeping import decide, keepsakes
    from fullrank.store import BestStore

    folder, real, counted = run(), select.race, set()
    (folder / "checkpoint-8").rename(folder / "step-8")
    (folder / "checkpoint-12").rename(folder / "global_step_12")
    shutil.move(folder / "checkpoint-16", tmp_path / "elsewhere")
    (folder / "checkpoint-16").symlink_to(tmp_path / "elsewhere")
    twin = folder / "checkpoint-24"
    shutil.copytree(folder / "checkpoint-4", twin)
    model = SentenceTransformer(str(twin), device="cpu")
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    model.save_pretrained(str(twin))
    store = BestStore(folder / "fullrank" / "best", resume=True)
    store.offer(24, 0.5, lambda target: shutil.copytree(twin, target, dirs_exist_ok=True))

    def race(contestants, *args, **options):
        counted.update(c.candidate.name for c in contestants if c.counts)
        return real(contestants, *args, **options)

    monkeypatch.setattr(select, "race", race)
    found = select_checkpoint(folder, golden, keep_best=1)
    kept = keepsakes(folder, found)
    assert {item.name for item in kept} == {"checkpoint-4", "checkpoint-20", "checkpoint-24"}
    assert counted == {"checkpoint-4", "checkpoint-20"} == {item.name for item in kept if item.rank is not None}
    assert decide(kept, keep_best=1, keep_last=1)["checkpoint-24"] == "a copy of fullrank/best/step-24"


def test_guards_need_a_base(run, golden):
    with pytest.raises(SettingError, match=r"guards compare with the base model, and none is known; pass base="):
        select_checkpoint(run(), golden, guards=[Guard(golden)])
    with pytest.raises(SettingError, match=r"max_drop=2 must be at least 0 and below 1: 0.02 allows"):
        Guard(golden, "ndcg@10", 2)


def test_the_confirming_score_is_the_headline(run, golden, base_folder, make_golden):
    confirm = make_golden(5, name="test")
    found = select_checkpoint(run(), golden, base=str(base_folder), confirm=confirm)
    assert found.headline == direct(found.winner.path, confirm) == found.confirmed["recall@1"]
    assert found.comparison.n == 40
    assert found.comparison.delta == pytest.approx(found.headline - direct(base_folder, confirm))
    chosen, confirmed, _ = choice_text(found).splitlines()
    low, high = found.headline_interval
    assert chosen == f"Chosen: step {found.winner.step} ({found.winner.name}) by recall@1."
    assert confirmed.startswith(
        "Confirmed on 40 queries that took no part in the choice: "
        f"recall@1 {found.headline:.4f} [{low:.4f}, {high:.4f}]; recall@1 {100 * found.comparison.delta:+.2f} points ["
    )
    assert confirmed.endswith((" the base model.", " from the base model on these queries."))
    with pytest.raises(DataError, match="40 queries of the confirming set are among those of 'dev' that choose"):
        select_checkpoint(run("peft"), golden, confirm=golden)


def test_a_composite_over_two_sets(run, golden, base_folder, make_golden):
    folder, other = run(), make_golden(9, name="faq", n_documents=150)
    weights = {"dev/recall@1": 0.7, "faq/ndcg@10": 0.3}
    found = select_checkpoint(folder, [golden, other], metric=weights, base=str(base_folder))
    plain = {row.step: 0.7 * direct(row.path, golden) + 0.3 * direct(row.path, other, "ndcg@10") for row in found.rows}
    assert found.winner.score == pytest.approx(max(plain.values()))
    assert found.winner.step == max(plain, key=plain.get)
    assert found.objective == "objective"


@pytest.mark.parametrize("options", [{"tied": True}, {"rule": "one-se"}, {"soup": True}])
def test_a_set_that_was_finished_before_stays_so(run, golden, base_folder, make_golden, options):
    """A candidate that was left with one set ranked whole and the other not, and is then asked for by another rule."""
    folder, small = run(), make_golden(9, name="faq", n_documents=60, n_queries=20)
    both = {"golden": [small, golden], "metric": {"faq/ndcg@10": 0.5, "dev/ndcg@10": 0.5}, "base": str(base_folder)}
    select_checkpoint(folder, **both)
    left = json.loads((folder / "selection.json").read_text())["candidates"].values()
    assert any(list(entry["results"]) == ["faq"] for entry in left)
    found = select_checkpoint(folder, **both, **options, exhaustive=True)
    exact = select_checkpoint(folder, **both, **options, exhaustive=True, journal=folder / "anew.json")
    assert [(row.name, row.score) for row in found.rows] == [(row.name, row.score) for row in exact.rows]


def test_by_one_se_with_confirming_queries_a_bound_of_the_base_is_not_taken_for_its_score(
    run, golden, base_folder, make_golden, monkeypatch
):
    def lowest(rule, best, contestants):
        return min((c for c in contestants if not c.is_base), key=lambda c: c.bound)

    asked, folder, confirm = [], run(), make_golden(5, name="test")
    monkeypatch.setattr("fullrank.select._beaten", lambda base, winner: asked.append((winner.bound, base.bound)))
    select_checkpoint(folder, golden, base=str(base_folder), confirm=confirm)
    monkeypatch.setattr("fullrank.select.ruled", lowest)
    select_checkpoint(folder, golden, base=str(base_folder), confirm=confirm)
    assert all(winner <= base for winner, base in asked)
    monkeypatch.setattr("fullrank.select.TOLERANCE", math.inf)
    select_checkpoint(folder, golden, base=str(base_folder), confirm=confirm)
    assert asked


def test_a_choice_by_one_se_that_scored_lower_than_the_base_says_so(run, golden, base_folder):
    found = select_checkpoint(run(), golden, base=str(base_folder), exhaustive=True)
    lower = replace(found, improved=False, rule="one-se", base=replace(found.base, score=0.9))
    assert choice_text(lower).startswith(
        f"Chosen: {found.winner.name} by recall@1, the earliest within one standard error of the best. But the base "
        f"model scored 0.9000 against its {found.winner.score:.4f}: --rule max names the best."
    )


def test_a_base_that_guards_need_and_that_has_no_weights_is_wrong_input(run, golden, base_folder, tmp_path):
    base = shutil.copytree(base_folder, tmp_path / "bare")
    (base / "model.safetensors").unlink()
    (base / "modules.json").unlink()
    with pytest.raises(DataError, match="holds no weights"):
        select_checkpoint(run(), golden, base=str(base), guards=[Guard(golden, "ndcg@10", 0.02)])


def test_soup_is_the_mean_of_the_tied_and_one_more_candidate(run, golden, base_folder):
    folder = run()
    found = select_checkpoint(folder, golden, base=str(base_folder), soup=True)
    members = [row for row in found.rows if row.name in (*found.tied, found.winner.name)]
    members = [row for row in members if row.name.startswith("checkpoint")]
    assert len(members) >= 2
    soup = next(row for row in found.rows if row.name == "soup")
    assert soup.step is None
    states = [SentenceTransformer(row.path, device="cpu").state_dict() for row in members]
    mean = {name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]}
    got = SentenceTransformer(soup.path, device="cpu").state_dict()
    assert all(torch.allclose(got[name], value, atol=1e-6) for name, value in mean.items())
    if soup.status == "complete":
        assert soup.score == direct(soup.path, golden)
        assert (found.winner.name == "soup") == (
            soup.score > max(r.score for r in found.rows if r.step is not None and r.score)
        )


# ------------------------------------------------------------------------------------- resuming


class Stop(KeyboardInterrupt):
    pass


def test_a_killed_selection_goes_on_where_it_was(run, golden, base_folder):
    folder = run()
    n_calls = 0

    def progress(phase, done, total):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 9:
            raise Stop

    with pytest.raises(Stop):
        select_checkpoint(folder, golden, base=str(base_folder), progress=progress, exhaustive=True)
    before = json.loads((folder / "selection.json").read_text())["candidates"]
    done = [name for name, entry in before.items() if entry["status"] == "complete"]
    assert done
    assert len(done) < 6
    spent = sum(entry["n_encoded"] for entry in before.values())
    seen = []
    found = select_checkpoint(
        folder, golden, base=str(base_folder), exhaustive=True, progress=lambda _, n, total: seen.append(n)
    )
    assert seen[0] > spent  # goes on counting
    assert len(seen) == 2 * (6 - len(done))  # what was finished is not encoded again: relevant ones, then the rest
    assert (
        found.winner.name
        == select_checkpoint(
            folder, golden, base=str(base_folder), exhaustive=True, journal=folder / "new.json"
        ).winner.name
    )
    again = select_checkpoint(folder, golden, base=str(base_folder), exhaustive=True)
    assert again.documents_encoded == found.documents_encoded  # nothing more was encoded


def test_a_finished_selection_is_read_back(run, golden, base_folder):
    folder, calls = run(), []
    first = select_checkpoint(folder, golden, base=str(base_folder))
    again = select_checkpoint(folder, golden, base=str(base_folder), progress=lambda *args: calls.append(args))
    assert not calls
    assert again.winner == first.winner
    assert again.rows == first.rows
    body = json.loads((folder / "selection.json").read_text())
    assert body["selection"]["winner"]["name"] == first.winner.name


def test_other_weights_data_or_settings_are_not_taken_from_the_journal(run, golden, base_folder, caplog):
    folder = run()
    first = select_checkpoint(folder, golden, base=str(base_folder))
    loser = next(row for row in first.rows if row.name.startswith("checkpoint") and row.name != first.winner.name)
    shutil.rmtree(folder / loser.name)
    shutil.copytree(folder / first.winner.name, folder / loser.name)
    again = select_checkpoint(folder, golden, base=str(base_folder), exhaustive=True)
    assert next(row for row in again.rows if row.name == loser.name).score == first.winner.score
    with caplog.at_level(logging.WARNING):
        select_checkpoint(folder, golden, metric="ndcg@10", base=str(base_folder))
    assert "is of another selection (other data or settings); it is begun anew" in caplog.text
    (folder / "selection.json").write_text("[")
    with pytest.raises(DataError, match="is not the journal of a selection"):
        select_checkpoint(folder, golden)


def test_a_guard_that_refused_just_before_a_kill_refuses_on_resuming(run, golden, tiny_runs, make_golden, monkeypatch):
    from fullrank import contest

    folder, general = run(), make_golden(9, name="general")
    base = tiny_runs["full"] / "checkpoint-4"
    options = {"metric": "ndcg@10", "base": str(base), "exhaustive": True}
    whole = select_checkpoint(folder, golden, **options, journal=folder / "a.json")
    assert direct(whole.winner.path, general, "ndcg@10") < direct(base, general, "ndcg@10")
    options["guards"] = [Guard(general, "ndcg@10", 0.0)]
    real = contest.Contestant._judge

    def killed(self, i):
        real(self, i)
        if self.entry.refused:
            self.entry.refused = ""  # as the journal has it that was flushed before
            raise Stop

    monkeypatch.setattr(contest.Contestant, "_judge", killed)
    with pytest.raises(Stop):
        select_checkpoint(folder, golden, **options)
    monkeypatch.setattr(contest.Contestant, "_judge", real)
    again = select_checkpoint(folder, golden, **options)
    fresh = select_checkpoint(folder, golden, **options, journal=folder / "b.json")
    assert [(r.name, r.eligible) for r in again.rows] == [(r.name, r.eligible) for r in fresh.rows]
    assert again.winner.name == fresh.winner.name != whole.winner.name
    assert again.passed_over.startswith(f"Step {whole.winner.step} scored higher, ndcg@10")
    assert "Try a lower learning rate, fewer epochs" in choice_text(again)


@pytest.mark.parametrize("what", ["pooling", "lora_alpha", "base"])
def test_the_journal_is_not_used_for_a_model_of_another_shape(run, golden, base_folder, tmp_path, what):
    how = "full" if what == "pooling" else "peft"
    folder, base = run(how), Path(shutil.copytree(base_folder, tmp_path / "base"))
    options = {"metric": "ndcg@10", "base": str(base), "exhaustive": True}
    before = select_checkpoint(folder, golden, **options)
    if what == "base":
        model = SentenceTransformer(str(base), device="cpu")
        with torch.no_grad():
            model[0].model.encoder.layer[0].output.dense.weight.mul_(-3)
        model.save_pretrained(str(base))
    changed = "1_Pooling/config.json" if what == "pooling" else "adapter_config.json"
    for file in folder.glob(f"checkpoint-*/{changed}"):
        body = json.loads(file.read_text())
        if what == "lora_alpha":
            body["lora_alpha"] = 1
        elif "pooling_mode" in body:
            body["pooling_mode"] = "cls"
        elif what == "pooling":
            body |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
        file.write_text(json.dumps(body))
    again = select_checkpoint(folder, golden, **options)
    fresh = select_checkpoint(folder, golden, **options, journal=folder / "fresh.json")
    assert {r.name: r.score for r in again.rows} == {r.name: r.score for r in fresh.rows}
    assert {r.name: r.score for r in again.rows} != {r.name: r.score for r in before.rows}


def test_a_second_selection_at_once_is_refused_and_results_of_others_are_not_read(run, golden, base_folder, caplog):
    folder = run()

    def second(phase, done, total):
        with pytest.raises(SettingError, match=r"selection.json is being written already by process .*; stop that"):
            select_checkpoint(folder, golden, base=str(base_folder))

    found = select_checkpoint(folder, golden, base=str(base_folder), exhaustive=True, progress=second)
    ours, theirs = (folder / "selection.results" / f"checkpoint-{step}.dev.json" for step in (4, 8))
    shutil.copy(theirs, ours)  # another selection wrote a file of that name
    again = select_checkpoint(folder, golden, base=str(base_folder), exhaustive=True)
    assert "checkpoint-4.dev.json is of other weights or settings; it is evaluated again" in caplog.text
    assert {r.name: r.score for r in again.rows} == {r.name: r.score for r in found.rows}
    assert again.share == 1.0  # what was encoded in vain is told apart
    assert again.documents_spent > again.documents_encoded
    assert f"({again.documents_spent:,} in all passes), 100% of 6 full evaluations" in choice_text(again)


def test_the_base_stays_by_one_se_where_others_scored_higher(run, golden, base_folder):
    found = select_checkpoint(run(), golden, base=str(base_folder), exhaustive=True)
    assert found.improved
    kept = replace(found, winner=found.base, improved=False, rule="one-se")
    expected = f"The base model stays: {found.winner.name} scored higher, recall@1 {found.winner.score:.4f} against"
    assert choice_text(kept).startswith(expected)
    assert "Nothing beat" not in choice_text(kept)
    failed = tuple(r if r.name == "base" else replace(r, status="failed") for r in found.rows)
    text = choice_text(replace(kept, rows=failed))
    assert text.startswith("Nothing to compare with the base model: all other candidates failed.")
    refused = replace(kept, rule="max", rows=(found.base, *failed[1:]), passed_over="Step 4 scored higher, but.")
    rows = tuple(r if r.name == "base" else replace(r, eligible=False) for r in found.rows)
    text = choice_text(replace(refused, rows=rows))
    assert text.startswith("Nothing eligible beat the base model by recall@1.\nStep 4 scored higher, but.")


def test_a_base_that_wins_is_handed_over_in_the_shape_in_which_it_was_scored(run, golden, base_folder, tmp_path):
    folder = run("peft")
    for file in folder.glob("checkpoint-*/1_Pooling/config.json"):
        body = json.loads(file.read_text())
        cls = {"pooling_mode": "cls"}
        body |= cls if "pooling_mode" in body else {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
        file.write_text(json.dumps(body))
    found = select_checkpoint(folder, golden, metric="ndcg@10", base=str(base_folder), exhaustive=True)
    result = replace(found, winner=found.base, result=found.base_result, improved=False)
    target = hand_over(result, tmp_path / "base", base=str(base_folder))
    assert direct(target, golden, "ndcg@10") == pytest.approx(found.base.score, abs=1e-9)
    assert found.base.score != direct(base_folder, golden, "ndcg@10")


# ------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_used_is_named_and_the_others_are_ranked(run, golden, base_folder, tiny_st):
    folder = run()
    file = folder / "checkpoint-4" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: 1 << 14])
    (folder / "checkpoint-22").mkdir()
    shutil.copytree(folder / "checkpoint-8", folder / "checkpoint-24")
    config = folder / "checkpoint-24" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))
    found = select_checkpoint(folder, golden, base=str(base_folder))
    why = {row.step: row.why for row in found.rows if row.status == "failed"}
    assert set(why) == {4, 22, 24}
    assert why[4].endswith("half-written")
    assert why[22] == "it is empty"
    assert why[24].startswith("mixed architectures: it is bert, 64 wide")
    assert found.winner.step in (0, 8, 12, 16, 20)
    failed = [row for row in found.rows if row.status == "failed"]
    assert all(row.score is None and row.bound is None and not row.eligible for row in failed)
    assert "failed" in leaderboard_table(found)


def test_a_folder_that_vanishes_has_failed_and_the_others_are_ranked(run, golden, base_folder):
    folder, gone = run(), []

    def progress(phase, done, total):
        if not gone:
            gone.append(shutil.rmtree(folder / "checkpoint-20"))

    found = select_checkpoint(folder, golden, base=str(base_folder), progress=progress, exhaustive=True)
    row = next(row for row in found.rows if row.step == 20)
    assert row.status == "failed"
    assert row.why.endswith("checkpoint-20 has vanished")
    assert sum(row.status == "complete" for row in found.rows) == 5


def test_embeddings_that_are_not_finite_are_a_failure_and_no_score(run, golden, base_folder):
    folder = run()
    model = SentenceTransformer(str(folder / "checkpoint-4"), device="cpu")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    model.save_pretrained(str(folder / "checkpoint-4"))
    found = select_checkpoint(folder, golden, base=str(base_folder))
    row = next(row for row in found.rows if row.step == 4)
    assert row.status == "failed"
    assert "NaN or infinite" in row.why


def test_no_space_for_the_journal_is_an_error_line_and_the_selection_goes_on(run, golden, base_folder, caplog):
    folder = run()
    blocked = folder / "file"
    blocked.write_text("")
    with caplog.at_level(logging.ERROR):
        found = select_checkpoint(folder, golden, base=str(base_folder), journal=blocked / "selection.json")
    assert found.winner is not None
    assert caplog.text.count("cannot be written") == 1
    assert found.journal is None
    assert found.as_dict()["journal"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "best"}, "rule='best' is unknown; choose one of max, one-se"),
        ({"metric": "recal@1"}, "recall"),
        ({"metric": {"other/recall@1": 1}}, "select names the golden set 'other'; there are dev"),
        ({"precision": "int8"}, "precision='int8' is unknown"),
        ({"keep_best": 0}, "keep_best=0 must be a whole number from 1"),
    ],
)
def test_options_that_cannot_work(run, golden, options, message):
    with pytest.raises(SettingError, match=message):
        select_checkpoint(run(), golden, **options)


# ------------------------------------------------------------------------------------- handing over


@pytest.mark.parametrize("how", ["full", "peft", "around"])
def test_the_choice_is_handed_over_as_a_model_that_loads_by_itself(run, golden, base_folder, tmp_path, how):
    found = select_checkpoint(run(how), golden, base=str(base_folder))
    folder = hand_over(found, tmp_path / "chosen", base=str(base_folder))
    assert direct(folder, golden) == found.winner.score
    names = {path.name for path in folder.iterdir()}
    assert not names & {"optimizer.pt", "trainer_state.json", "training_args.bin", "rng_state.pth", "scheduler.pt"}
    card = (folder / "README.md").read_text()
    assert f"Step {found.winner.step} had the highest `recall@1`" in card
    assert f"{found.winner.score:.4f}" in card


def test_the_card_says_by_which_rule_and_what_was_chosen(run, golden, base_folder, tmp_path):
    found = select_checkpoint(run(), golden, base=str(base_folder), rule="one-se")
    card = (hand_over(found, tmp_path / "a") / "README.md").read_text()
    assert f"Step {found.winner.step} is the earliest within one standard error of the highest `recall@1`" in card
    soup = replace(found, winner=replace(found.winner, name="soup", step=None, origin="soup"), rule="max")
    card = (hand_over(soup, tmp_path / "b") / "README.md").read_text()
    assert "The mean of the steps that could not be told apart had the highest `recall@1`" in card


def test_metrics_beside_the_one_that_chooses_are_reported(run, golden, base_folder):
    found = select_checkpoint(run(), golden, base=str(base_folder), metrics=[Metric.parse("mrr@10")])
    assert set(found.winner.metrics) == {"mrr@10", "recall@1"}
    body = found.as_dict()
    assert json.loads(json.dumps(body))["winner"]["score"] == found.winner.score
