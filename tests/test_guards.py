"""Collapse: what the thresholds let pass and what not, and how a run tells."""

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch

from fullrank import GoldenSet, RetrievalCallback, evaluate_embeddings
from fullrank._errors import SettingError
from fullrank.guards import CollapseThresholds, collapse_findings
from fullrank.objective import collapse_names
from training import make_trainer


@pytest.fixture
def sound(tiny_golden):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(55, 8)).astype(np.float32)
    return replace(evaluate_embeddings(rows[:15], rows[15:], tiny_golden), mean_cosine=0.2)


def kinds(result, **options):
    return [finding.kind for finding in collapse_findings(result, **options)]


@pytest.mark.parametrize(
    ("now", "base", "expected"),
    [
        (0.2, 0.2, []),
        (0.949, None, []),
        (0.95, None, ["collapse-cosine"]),
        (0.951, 0.9, ["collapse-cosine"]),
        (0.97, 0.96, []),  # the base model was so already: nothing has happened
        (0.5, 0.1, ["collapse-cosine"]),  # below the limit, and far above the base model
        (0.4, 0.1, []),  # exactly the rise that is allowed
        (None, 0.1, []),
        (float("nan"), 0.1, []),
    ],
)
def test_the_mean_cosine_and_its_rise(sound, now, base, expected):
    base = None if base is None else replace(sound, mean_cosine=base)
    assert kinds(replace(sound, mean_cosine=now), base=base) == expected


@pytest.mark.parametrize(
    ("tie_rate", "collapsed", "expected"),
    [(0.0, False, []), (0.049, False, []), (0.05, False, ["collapse-ties"]), (0.0, True, ["collapse-ties"])],
)
def test_ties(sound, tie_rate, collapsed, expected):
    assert kinds(replace(sound, tie_rate=tie_rate, collapsed=collapsed)) == expected


def test_thresholds_are_a_frozen_value_and_checked(sound):
    strict = CollapseThresholds(mean_cosine=0.1, rise=0.0, tie_rate=0.0)
    assert kinds(sound, thresholds=strict) == ["collapse-cosine", "collapse-ties"]
    with pytest.raises(FrozenInstanceError):
        strict.rise = 0.5
    for value in (-0.1, 1.5, float("nan"), "0.5", True, None):
        with pytest.raises(SettingError, match="must be a number from 0 to 1"):
            CollapseThresholds(tie_rate=value)


def test_the_finding_says_what_was_measured_and_what_to_try(sound):
    (finding,) = collapse_findings(replace(sound, mean_cosine=0.97), base=sound, name="dev")
    assert str(finding) == (
        "warning: documents of 'dev' have a mean pairwise cosine of 0.970, 0.200 at step 0. Embeddings are growing "
        "alike: try a lower learning rate, a larger batch or another temperature"
    )


def test_names_in_the_log(sound):
    assert collapse_names({"dev": sound}) == {"eval_mean_cosine": 0.2, "eval_tie_rate": sound.tie_rate}
    two = collapse_names({"dev": sound, "faq": replace(sound, mean_cosine=None)})
    assert set(two) == {"eval_dev_mean_cosine", "eval_dev_tie_rate", "eval_faq_tie_rate"}


def collapse_in_training(tiny_st, golden, pairs, out, **options):
    """A run whose weights become zero after its first step: all embeddings equal."""
    from transformers import TrainerCallback

    model = tiny_st()

    class Collapse(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if "word_embeddings" in name or "position_embeddings" in name:
                            parameter.copy_(parameter.mean(dim=0, keepdim=True).expand_as(parameter))

    trainer = make_trainer(model, pairs, out, max_steps=4)
    callback = RetrievalCallback(golden, every=2, **options).attach(trainer)
    trainer.callback_handler.callbacks.insert(0, Collapse())
    trainer.train()
    return trainer, callback


def test_a_collapse_is_logged_journalled_and_told_once(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    trainer, callback = collapse_in_training(tiny_st, tiny_golden, pairs, tmp_path, verbose=True)
    rows = {row["step"]: row for row in trainer.state.log_history if "eval_tie_rate" in row}
    assert set(rows) == {0, 2, 4}
    assert rows[0]["eval_tie_rate"] < 0.05 < 0.9 < rows[2]["eval_tie_rate"]
    assert rows[0]["eval_mean_cosine"] < 0.95 < rows[2]["eval_mean_cosine"] <= 1 + 1e-6
    json.dumps(rows)
    lines = [json.loads(text) for text in (tmp_path / "fullrank" / "history.jsonl").read_text().splitlines()]
    assert "findings" not in lines[0]
    assert all(any("score the same as an answer" in text for text in line["findings"]) for line in lines[1:2])
    assert capsys.readouterr().out.count("score the same as an answer") == 1
    assert callback.best.step == 0


def test_thresholds_reach_the_run(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    collapse_in_training(
        tiny_st, tiny_golden, pairs, tmp_path, collapse=CollapseThresholds(mean_cosine=1, rise=1, tie_rate=1)
    )
    assert "mean pairwise cosine" not in caplog.text
    with pytest.raises(SettingError, match=r"collapse=0\.5 must be CollapseThresholds"):
        RetrievalCallback(tiny_golden, collapse=0.5)


def test_several_sets_carry_their_names(tiny_st, tiny_golden, pairs, tmp_path):
    faq = GoldenSet(tiny_golden.queries, tiny_golden.corpus, tiny_golden.qrels, name="faq")
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=1)
    RetrievalCallback([tiny_golden, faq]).attach(trainer)
    trainer.train()
    row = next(row for row in trainer.state.log_history if row["step"] == 0)
    assert {"eval_tiny_tie_rate", "eval_faq_tie_rate"} <= set(row)


def test_what_is_no_guard_is_named_by_its_kind(tiny_golden):
    for guards in (tiny_golden, [tiny_golden, tiny_golden]):
        with pytest.raises(SettingError) as caught:
            RetrievalCallback(tiny_golden, guards=guards)
        assert str(caught.value) == "guards must be Guard(golden, ...) or a list of them, got GoldenSet"
