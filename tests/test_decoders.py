"""A decoder's texts end with its end-of-text token; the tiny decoder is one; records say what was measured."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from fullrank import Backbone, GoldenSet, evaluate_embeddings
from fullrank._errors import SettingError
from fullrank.decoders import end_every_text, tiny_decoder
from fullrank.records import run_record, write_record

TEXTS = ["a small text", "another one that is somewhat longer than the first", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder(tmp_path_factory.mktemp("decoder"), TEXTS)


def test_every_text_ends_with_the_token_also_where_it_is_cut(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer(TEXTS).input_ids
    end = tokenizer.eos_token_id
    assert all(ids[-1] != end for ids in before)
    assert end_every_text(tokenizer, padding="right") is tokenizer
    assert tokenizer(TEXTS).input_ids == [[*ids, end] for ids in before]
    cut = tokenizer(TEXTS[1], truncation=True, max_length=4).input_ids
    assert cut == [*before[1][:3], end]
    end_every_text(tokenizer)  # a second time changes nothing but the side
    assert tokenizer(TEXTS).input_ids == [[*ids, end] for ids in before]
    assert tokenizer.padding_side == "left"


def test_it_is_saved_with_the_tokenizer(folder, tmp_path):
    tokenizer = end_every_text(AutoTokenizer.from_pretrained(folder))
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXTS).input_ids == tokenizer(TEXTS).input_ids


def test_embeddings_do_not_depend_on_the_side_that_is_padded(folder):
    rows = []
    for side in ("left", "right"):
        model = AutoModel.from_pretrained(folder).eval()
        tokenizer = end_every_text(AutoTokenizer.from_pretrained(folder), padding=side)
        rows.append(Backbone(model, tokenizer, pooling="last").encode_documents(TEXTS))
    assert torch.allclose(*rows, atol=1e-5)


def test_tokenizers_that_cannot_be_changed_are_refused(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(SettingError, match="padding='both' is unknown; choose one of left, right"):
        end_every_text(tokenizer, padding="both")
    tokenizer.eos_token = None
    with pytest.raises(SettingError, match="has no end-of-text token or is no fast tokenizer"):
        end_every_text(tokenizer)


def test_a_tiny_decoder_is_the_same_for_the_same_seed(folder, tmp_path):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    again = AutoModel.from_pretrained(tiny_decoder(tmp_path, TEXTS)).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(again[name], value) for name, value in AutoModel.from_pretrained(folder).state_dict().items()
    )


def test_a_record_is_what_two_results_say(tmp_path):
    golden = GoldenSet.from_pairs(["a", "b"], ["x", "y"], [0, 1])
    corpus = np.eye(2, dtype=np.float32)
    base = evaluate_embeddings(corpus[[1, 1]], corpus, golden, metrics=["recall@1"])
    best = evaluate_embeddings(corpus, corpus, golden, metrics=["recall@1"])
    record = run_record(base, best, metric="recall@1", seconds=1.25, settings={"rate": 0.1})
    assert (record["base"], record["best"], record["delta"]) == ({"recall@1": 0.5}, {"recall@1": 1.0}, 0.5)
    assert (record["documents"], record["queries"], record["seconds"]) == (2, 2, 1.2)
    assert record["settings"] == {"rate": 0.1}
    assert record["peak_memory_mib"]["host"] > 50
    assert json.loads(write_record(tmp_path / "r.json", record).read_text()) == record
