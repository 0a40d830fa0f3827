"""Advice from the in-batch numbers of a run: gathered from loss lines and results, said once."""

from dataclasses import replace

import pytest

from fullrank import RetrievalCallback, evaluate
from fullrank.adviser import Adviser
from fullrank.metrics import Metric
from training import make_trainer


@pytest.fixture(scope="module")
def result(tiny_bert_path, tiny_golden):
    from sentence_transformers import SentenceTransformer

    return evaluate(SentenceTransformer(str(tiny_bert_path), device="cpu"), tiny_golden)


def scored(result, value):
    return replace(result, metrics={**result.metrics, "recall@1": value})


def lines(adviser, steps, acc, mrr, **more):
    for step in steps:
        adviser.loss_line(step, {"loss": 1.0, "in_batch_acc": acc, "in_batch_mrr": mrr, **more})


def kinds(findings):
    return [finding.kind for finding in findings]


def test_low_mrr_after_warm_up(result):
    adviser = Adviser(Metric.parse("recall@1"), warmup_steps=4)
    lines(adviser, range(1, 5), 0.1, 0.2)
    assert adviser.evaluation(4, result) == []
    lines(adviser, range(5, 9), 0.1, 0.3)
    assert kinds(adviser.evaluation(8, result)) == ["low-in-batch-mrr"]


def test_accuracy_that_rises_while_recall_falls(result):
    adviser = Adviser(Metric.parse("recall@1"), warmup_steps=0)
    found = []
    for i, (acc, score) in enumerate([(0.5, 0.6), (0.6, 0.5), (0.7, 0.4), (0.8, 0.3)]):
        lines(adviser, range(10 * i + 1, 10 * i + 11), acc, 0.9)
        found = adviser.evaluation(10 * i + 10, scored(result, score))
    assert kinds(found) == ["in-batch-diverges"]
    assert "recall@1 fell from 0.6000 to 0.3000" in found[0].message


def test_drawn_dimensions_are_looked_at_apart(result):
    """The smallest dimension ranks worse: that is no reason for advice where the largest ranks well."""
    adviser = Adviser(Metric.parse("recall@1"), warmup_steps=0)
    lines(adviser, range(1, 9), 0.9, 0.9, in_batch_dim=32.0)
    lines(adviser, range(1, 9), 0.1, 0.2, in_batch_dim=8.0)
    assert adviser.evaluation(8, result) == []


def test_without_in_batch_numbers_nothing_is_said(result):
    adviser = Adviser(Metric.parse("recall@1"), warmup_steps=0)
    adviser.loss_line(1, {"loss": 0.3})
    assert adviser.evaluation(1, result) == []


def test_a_run_with_a_poor_batch_is_told_so_once(tiny_st, tiny_golden, pairs, tmp_path, capsys):
    shuffled = {"anchor": pairs["anchor"], "positive": pairs["positive"][7:] + pairs["positive"][:7]}
    options = {"learning_rate": 1e-6, "warmup_steps": 1, "per_device_train_batch_size": 24}
    trainer = make_trainer(tiny_st(), shuffled, tmp_path, **options)
    RetrievalCallback(tiny_golden, every=2, verbose=True).attach(trainer)
    trainer.train()
    out = capsys.readouterr().out
    assert out.count("in-batch MRR stays below 0.5 after warm-up") == 1
