"""Encoders of the user's own that hold a model: found wherever it lies, left as it was, evaluated in eval mode."""

from types import SimpleNamespace

import pytest
from torch import nn

from fullrank import evaluate
from fullrank.isolate import modules_within


class Own:
    """An encoder that holds its model one attribute deeper and never thinks of the mode."""

    similarity = "cosine"

    def __init__(self, model, how):
        self.embed = lambda texts: model(model.preprocess(texts))["sentence_embedding"]
        self.parts = {
            "attribute": model,
            "list": [model],
            "dict": {"tower": model},
            "deeper": SimpleNamespace(towers=(model,)),
            "method": model.encode,
        }[how]

    def encode_queries(self, texts):
        return self.embed(texts)

    encode_documents = encode_queries


class Encodes:
    """Anything with ``encode``, which sentence-transformers leaves in eval mode."""

    def __init__(self, model):
        self.inner = model

    def encode(self, texts):
        return self.inner.encode(texts)


HOLDERS = ["attribute", "list", "dict", "deeper", "method"]


@pytest.mark.parametrize("how", HOLDERS)
def test_a_model_inside_an_encoder_is_evaluated_in_eval_mode_and_left_in_its_own(tiny_st, tiny_golden, how):
    model = tiny_st()
    encoder = Own(model, how)
    model.eval()
    expected = evaluate(encoder, tiny_golden).hits
    model.train()
    model[1].eval()
    assert evaluate(encoder, tiny_golden).hits == expected  # without dropout
    assert model.training
    assert model[0].training
    assert not model[1].training


def test_a_model_that_its_encode_leaves_in_eval_mode_goes_on_in_train_mode(tiny_st, tiny_golden):
    model = tiny_st()
    model.train()
    evaluate(Encodes(model), tiny_golden)
    assert all(part.training for part in model.modules())


def test_an_interrupted_evaluation_leaves_the_mode_too(tiny_st, tiny_golden):
    model = tiny_st().train()

    class Interrupted(Own):
        def encode_documents(self, texts):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(Interrupted(model, "attribute"), tiny_golden)
    assert all(part.training for part in model.modules())


def test_the_search_for_modules_ends():
    inner = nn.Linear(2, 2)
    loop = SimpleNamespace(layer=nn.Sequential(inner), again=None, numbers=list(range(10_000)))
    loop.again = [loop, inner]
    assert modules_within(loop) == [loop.layer, inner]
    assert modules_within(None) == modules_within("text") == modules_within([inner] * 65) == []

    class Slotted:
        __slots__ = ("model", "unset")

    slotted = Slotted()
    slotted.model = inner
    assert modules_within(slotted) == [inner]
