"""How long one query takes."""

import time

import pytest
import torch

from fullrank._errors import SettingError
from fullrank.encode import Backbone, as_encoder
from fullrank.latency import query_latency, sampled, with_latency

QUERIES = [f"bal can dis {'bal ' * (i % 5)}" for i in range(100)]


class Slow:
    """Encodes at 5 ms a text, and one text in ten at 30 ms."""

    similarity = "cosine"

    def __init__(self):
        self.seen = []

    def encode_queries(self, texts):
        self.seen.append(list(texts))
        time.sleep(0.03 if len(self.seen) % 10 == 0 else 0.005)
        return torch.ones(len(texts), 3)

    def encode_documents(self, texts):
        raise AssertionError("documents are not timed")


def test_one_text_at_a_time_after_a_warm_up():
    model = Slow()
    found = query_latency(as_encoder(model), QUERIES)
    assert all(len(texts) == 1 for texts in model.seen)
    assert len(model.seen) == 3 + 64
    assert model.seen[:3] == model.seen[3:6], "the first queries warm up, and are timed after that"
    assert 5 <= found["query_ms_p50"] < 15
    assert 30 <= found["query_ms_p95"] < 60


def test_the_sample_is_fixed_and_evenly_spaced():
    texts = [str(i) for i in range(1000)]
    assert sampled(texts, 64) == sampled(texts, 64)
    assert len(set(sampled(texts, 64))) == 64
    assert sampled(texts, 64)[0] == "0"
    assert sampled(texts, 64)[-1] == "999"
    assert sampled(["a", "b"], 64) == ["a", "b"]
    assert sampled(["a", "b"], 1) == ["a"]


def test_of_a_sentence_transformer_and_a_backbone(tiny_st, tiny_bert, tiny_tokenizer):
    for encoder in (
        as_encoder(tiny_st()),
        as_encoder(Backbone(tiny_bert, tiny_tokenizer)),
        as_encoder(tiny_st(), fast=False),
    ):
        found = query_latency(encoder, QUERIES, n=8)
        assert set(found) == {"query_ms_p50", "query_ms_p95"}
        assert 0 < found["query_ms_p50"] <= found["query_ms_p95"] < 10_000


def test_the_model_is_left_as_it_was(tiny_st):
    model = tiny_st().train()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    query_latency(as_encoder(model), QUERIES, n=4)
    assert torch.equal(torch.rand(3), expected)
    assert model.training


def test_the_fast_path_is_looked_for_once(tiny_st, monkeypatch):
    """Its probe costs more than a query; timed with every query it would be the latency."""
    encoder = as_encoder(tiny_st())
    calls = []
    published = type(encoder).tokenised
    monkeypatch.setattr(type(encoder), "tokenised", lambda self, side: calls.append(side) or published(self, side))
    query_latency(encoder, QUERIES, n=8)
    assert calls == ["query"]


def test_with_latency_adds_to_the_timing_of_a_result(tiny_st, tiny_golden):
    from fullrank import evaluate

    model = tiny_st()
    result = evaluate(model, tiny_golden)
    timed = with_latency(result, as_encoder(model))
    assert set(timed.timing) - set(result.timing) == {"query_ms_p50", "query_ms_p95"}
    assert timed.metrics == result.metrics
    assert "query_ms_p50" not in result.timing


def test_nothing_to_time():
    with pytest.raises(SettingError, match="latency needs at least one query, got 0 and n=64"):
        query_latency(as_encoder(Slow()), [])
