"""Encoding: the embeddings of the model's own `encode`, for every shape of model, wrapper, padding and batch."""

import logging
import random
import types
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fullrank import evaluate
from fullrank._errors import EvaluationError, SettingError
from fullrank.encode import Backbone, Encoder, as_encoder, at_precision, pool
from fullrank.tokens import encode_tokens

WORDS = ["bal", "ban", "bar", "bas", "bat", "bil", "bin", "bir", "bis", "cal", "can", "car", "cas", "cat", "cil", "cin"]
RNG = random.Random(3)
TEXTS = [
    *(" ".join(RNG.choices(WORDS, k=n)) for n in (1, 2, 2, 3, 5, 8, 8, 13, 21, 34, 55, 61, 62, 63, 100, 200)),
    "",
    "  bal   ban\tbar\n",
    "BAL Ban, bar. bäl",
    "unknown words only",
    "bal",
    "bal",
]
"""Longer than the model takes (64 tokens, two of them special), empty, equal, untidy."""


def close(found, expected):
    assert found.shape == expected.shape
    largest = (found.detach().float() - expected.detach().float()).abs().max().item()
    assert largest < 1e-5


def assert_like_its_own_encode(model, *, fast, how=None):
    """Compares with the model itself, and holds which path was taken; returns the embeddings of both sides."""
    encoder = as_encoder(model, **(how or {}))
    model.eval()
    queries, documents = encoder.encode_queries(TEXTS), encoder.encode_documents(TEXTS)
    close(queries, model.encode_query(TEXTS, convert_to_tensor=True))
    close(documents, model.encode_document(TEXTS, convert_to_tensor=True))
    for side in ("query", "document"):
        assert (encoder.tokenised(side) is not None) is fast
    assert queries.isfinite().all()
    assert len(torch.unique(queries.round(decimals=3), dim=0)) > 12  # texts are told apart
    return queries, documents


# ---------------------------------------------------------------- SentenceTransformer


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens", ("mean", "cls")])
def test_poolings(pooling, normalize, tiny_st):
    assert_like_its_own_encode(tiny_st(pooling, normalize), fast=True)


def test_a_dense_head(tiny_st):
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(1)
    queries, _ = assert_like_its_own_encode(tiny_st(extra=[Dense(32, 7)], normalize=True), fast=True)
    assert queries.shape[1] == 7


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(include_prompt, tiny_st):
    model = tiny_st(prompts={"query": "query : bal ", "document": "document : "})
    model[1].include_prompt = include_prompt
    queries, documents = assert_like_its_own_encode(model, fast=True)
    assert (queries - documents).abs().max() > 1e-2
    assert as_encoder(model).prompt("query") == "query : bal "


def test_a_prompt_in_front_and_a_prompt_left_out_of_the_mean_differ(tiny_st):
    model = tiny_st(prompts={"query": "query : bal "})
    included = as_encoder(model).encode_queries(TEXTS)
    model[1].include_prompt = False
    assert (as_encoder(model).encode_queries(TEXTS) - included).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["passage", "corpus", "document"])
def test_the_usual_names_of_a_document_prompt(name, tiny_st):
    model = tiny_st(prompts={name: "document : "})
    if name != "document":
        model.prompts.pop("document", None)  # sentence-transformers adds an empty one, which comes first
    _, documents = assert_like_its_own_encode(model, fast=True)
    assert (documents - as_encoder(model, document_prompt="").encode_documents(TEXTS)).abs().max() > 1e-2


def test_a_default_prompt(tiny_st):
    model = tiny_st(prompts={"general": "query : "}, default_prompt_name="general")
    assert_like_its_own_encode(model, fast=True)


def test_a_default_prompt_where_neither_side_has_its_own(tiny_st):
    model = tiny_st(prompts={"general": "query : "}, default_prompt_name="general")
    model.prompts = {"general": "query : "}  # without the empty ones that the constructor adds
    assert_like_its_own_encode(model, fast=True)


def test_prompts_given_take_the_place_of_the_declared_ones(tiny_st):
    model = tiny_st(prompts={"query": "query : "}).eval()
    encoder = as_encoder(model, query_prompt="bal ", document_prompt="document : ")
    close(encoder.encode_queries(TEXTS), model.encode(TEXTS, prompt="bal ", convert_to_tensor=True))
    close(encoder.encode_documents(TEXTS), model.encode(TEXTS, prompt="document : ", convert_to_tensor=True))
    bare = as_encoder(model, query_prompt="")
    close(bare.encode_queries(TEXTS), model.encode(TEXTS, prompt="", convert_to_tensor=True))


def test_truncated_dimensions(tiny_st):
    for normalize in (False, True):
        queries, _ = assert_like_its_own_encode(tiny_st(normalize=normalize, truncate_dim=8), fast=True)
        assert queries.shape[1] == 8


@pytest.mark.parametrize("length", [3, 10, 40, 64])
def test_a_shorter_maximal_length(length, tiny_st):
    model = tiny_st()
    model.max_seq_length = length
    queries, _ = assert_like_its_own_encode(model, fast=True)
    # From that length on, the rest of a text makes no difference.
    cut = " ".join(TEXTS[15].split()[: length - 2])
    close(queries[15:16], as_encoder(model).encode_queries([cut]))


def test_the_maximal_length_set_on_the_module(tiny_st):
    model = tiny_st()
    model[0].max_seq_length = 6
    assert_like_its_own_encode(model, fast=True)


def tiny_llama():
    """A random decoder with rotary positions: where padding stands makes no difference to it."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaModel(config).eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
def test_a_decoder_that_pads_on_either_side(side, pooling, tmp_path, tiny_tokenizer):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tiny_llama().save_pretrained(tmp_path)
    tiny_tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tiny_tokenizer.save_pretrained(tmp_path)
    model = SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(32, pooling_mode=pooling)], device="cpu")
    model.tokenizer.padding_side = side
    encoder = as_encoder(model.eval())
    assert encoder.tokenised("query") is not None
    texts = [text for text in TEXTS if text]
    if pooling == "cls" and side == "left":  # its own encode takes the padding for the first token
        close(encoder.encode_queries(texts[3:4] * 3), model.encode(texts[3:4] * 3, convert_to_tensor=True))
    else:
        close(encoder.encode_queries(texts), model.encode(texts, convert_to_tensor=True))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft 0.21 on transformers 5
@pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")  # a SentenceTransformer has no name for it
def test_lora_inside_and_around(tiny_st):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["query", "value"], r=4, init_lora_weights=False)
    model = tiny_st(prompts={"query": "query : "})
    base = as_encoder(model).encode_queries(TEXTS)
    torch.manual_seed(2)
    model[0].model = get_peft_model(model[0].model, config)
    queries, _ = assert_like_its_own_encode(model, fast=True)
    assert (queries - base).abs().max() > 1e-2
    with model[0].model.disable_adapter():
        close(as_encoder(model).encode_queries(TEXTS), base)

    model = tiny_st(prompts={"query": "query : "})
    torch.manual_seed(2)
    around = get_peft_model(model, config)
    found = as_encoder(around.eval())
    assert found.prompt("query") == "query : "
    close(found.encode_queries(TEXTS), model.encode_query(TEXTS, convert_to_tensor=True))
    assert (found.encode_queries(TEXTS) - base).abs().max() > 1e-2


def test_half_weights(tiny_st):
    model = tiny_st().bfloat16().eval()
    found = as_encoder(model).encode_queries(TEXTS).float()
    assert found.isfinite().all()
    assert (
        torch.nn.functional.cosine_similarity(found, model.encode(TEXTS, convert_to_tensor=True).float()).min() > 0.99
    )


def test_a_model_that_was_saved_and_loaded(tiny_st, tmp_path):
    from sentence_transformers import SentenceTransformer

    model = tiny_st(normalize=True, prompts={"query": "query : "}, similarity_fn_name="dot")
    model.max_seq_length = 20
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    queries, _ = assert_like_its_own_encode(loaded, fast=True)
    close(queries, model.eval().encode_query(TEXTS, convert_to_tensor=True))
    assert as_encoder(loaded).similarity == "dot"


def test_fast_off_goes_through_the_model(tiny_st):
    model = tiny_st(prompts={"query": "query : "})
    assert_like_its_own_encode(model, fast=False, how={"fast": False})


def test_minilm(minilm):
    texts = ["A short text", "Größe, 東京 and 😀 — emoji", "", "word " * 600, *TEXTS]
    encoder = as_encoder(minilm)
    assert encoder.tokenised("document") is not None
    close(encoder.encode_documents(texts), minilm.encode(texts, convert_to_tensor=True))
    assert encoder.similarity == "cosine"


# ---------------------------------------------------------------- what the fast path does not understand


def test_static_embeddings_fall_back(tiny_tokenizer):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    model = SentenceTransformer(
        modules=[StaticEmbedding(tiny_tokenizer, embedding_dim=16)], device="cpu", prompts={"query": "query : "}
    )
    assert_like_its_own_encode(model, fast=False)


def test_a_router_falls_back_and_keeps_its_sides_apart(tiny_st, tiny_tokenizer):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Router, StaticEmbedding

    torch.manual_seed(0)
    static, bert = StaticEmbedding(tiny_tokenizer, embedding_dim=32), tiny_st()
    router = Router.for_query_document(query_modules=[static], document_modules=[bert[0], bert[1]])
    queries, documents = assert_like_its_own_encode(SentenceTransformer(modules=[router], device="cpu"), fast=False)
    assert (queries - documents).abs().max() > 1e-2


def test_a_custom_module_falls_back(tiny_st):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    class Reversed(Transformer):
        """Reads its texts from the end."""

        def preprocess(self, inputs, *args, **options):
            return super().preprocess([" ".join(reversed(text.split())) for text in inputs], *args, **options)

    plain = tiny_st()
    first = Reversed(plain[0].model.config._name_or_path)
    model = SentenceTransformer(modules=[first, plain[1]], device="cpu")
    queries, _ = assert_like_its_own_encode(model, fast=False)
    assert (queries - plain.eval().encode(TEXTS, convert_to_tensor=True)).abs().max() > 1e-2


def test_a_model_with_an_encode_of_its_own_is_taken_at_its_word(tiny_st):
    from sentence_transformers import SentenceTransformer

    class Signed(SentenceTransformer):
        def encode(self, *args, **options):
            return super().encode(*args, **options) * -2

    plain = tiny_st().eval()
    model = Signed(modules=list(plain), device="cpu").eval()
    close(as_encoder(model).encode_queries(TEXTS), -2 * plain.encode(TEXTS, convert_to_tensor=True))


# ---------------------------------------------------------------- Backbone


def one_at_a_time(model, tokenizer, pooling, prompt, max_length):
    """The embeddings by the book: no padding, no batch."""
    out = []
    for text in TEXTS:
        features = tokenizer(prompt + text, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**features)[0][0]
        out.append({"mean": hidden.mean(dim=0), "cls": hidden[0], "last": hidden[-1]}[pooling])
    return torch.stack(out)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize(("kind", "side"), [("bert", "right"), ("llama", "right"), ("llama", "left")])
def test_a_backbone_equals_a_loop_over_single_texts(kind, side, pooling, tiny_bert, tiny_tokenizer):
    model = tiny_bert if kind == "bert" else tiny_llama()
    if kind == "llama":
        tiny_tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tiny_tokenizer.padding_side = side
    encoder = Backbone(model, tiny_tokenizer, pooling, query_prompt="query : ", max_length=30)
    close(encoder.encode_queries(TEXTS), one_at_a_time(model, tiny_tokenizer, pooling, "query : ", 30))
    close(encoder.encode_documents(TEXTS), one_at_a_time(model, tiny_tokenizer, pooling, "", 30))
    assert tiny_tokenizer.padding_side == side


def test_a_backbone_without_a_maximal_length_takes_that_of_the_tokenizer(tiny_bert, tiny_tokenizer):
    encoder = Backbone(tiny_bert, tiny_tokenizer)
    close(encoder.encode_queries(TEXTS), one_at_a_time(tiny_bert, tiny_tokenizer, "mean", "", 64))


def test_a_backbone_that_returns_a_tuple(tiny_bert, tiny_tokenizer):
    class Tuple(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_bert

        def forward(self, **features):
            return self.inner(**features, return_dict=False)

    close(
        Backbone(Tuple(), tiny_tokenizer).encode_queries(TEXTS),
        Backbone(tiny_bert, tiny_tokenizer).encode_queries(TEXTS),
    )


def test_a_backbone_is_an_encoder_and_keeps_its_prompts(tiny_bert, tiny_tokenizer):
    backbone = Backbone(tiny_bert, tiny_tokenizer, query_prompt="query : ", document_prompt="document : ")
    assert isinstance(backbone, Encoder)
    found = as_encoder(backbone)
    assert [found.prompt(side) for side in ("query", "document")] == ["query : ", "document : "]
    other = as_encoder(backbone, query_prompt="", similarity="dot")
    assert [other.prompt(side) for side in ("query", "document")] == ["", "document : "]
    assert other.similarity == "dot"
    assert backbone.similarity == "cosine"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_backbone_with_lora(tiny_bert, tiny_tokenizer):
    from peft import LoraConfig, get_peft_model

    base = Backbone(tiny_bert, tiny_tokenizer).encode_queries(TEXTS)
    torch.manual_seed(2)
    model = get_peft_model(
        tiny_bert, LoraConfig(target_modules=["query", "value"], r=4, init_lora_weights=False)
    ).eval()
    found = Backbone(model, tiny_tokenizer).encode_queries(TEXTS)
    close(found, one_at_a_time(model, tiny_tokenizer, "mean", "", 64))
    assert (found - base).abs().max() > 1e-2


@pytest.mark.parametrize("batch_tokens", [1, 64, 65, 200, 10_000])
def test_the_order_of_texts_is_kept_for_any_batch(batch_tokens, tiny_bert, tiny_tokenizer):
    encoder = Backbone(tiny_bert, tiny_tokenizer)
    how = encoder.tokenised("query")
    store = how.store(TEXTS)
    expected = one_at_a_time(tiny_bert, tiny_tokenizer, "mean", "", 64)
    index = np.random.default_rng(0).permutation(len(TEXTS))[:15]
    done = []
    with torch.no_grad():
        found = encode_tokens(how, store, index, batch_tokens=batch_tokens, on_batch=lambda n, *_: done.append(n))
    close(found, expected[torch.from_numpy(index)])
    assert sum(done) == 15


def test_tokenising_in_parts_changes_nothing(tiny_bert, tiny_tokenizer, monkeypatch):
    expected = Backbone(tiny_bert, tiny_tokenizer).encode_queries(TEXTS)
    monkeypatch.setattr("fullrank.tokens.TOKENISE_AT_ONCE", 3)
    found = Backbone(tiny_bert, tiny_tokenizer)
    assert torch.equal(found.encode_queries(TEXTS), expected)
    store = found.tokenised("query").store(TEXTS)
    assert store.lengths.tolist() == [len(tiny_tokenizer(text, truncation=True)["input_ids"]) for text in TEXTS]
    assert store.truncated.tolist() == [len(tiny_tokenizer(text)["input_ids"]) > 64 for text in TEXTS]


def test_batches_hold_no_more_padded_tokens_than_allowed(tiny_bert, tiny_tokenizer):
    shapes = []
    tiny_bert.register_forward_pre_hook(
        lambda module, args, features: shapes.append(tuple(features["input_ids"].shape)), with_kwargs=True
    )
    how = Backbone(tiny_bert, tiny_tokenizer).tokenised("query")
    with torch.no_grad():
        encode_tokens(how, how.store(TEXTS), np.arange(len(TEXTS)), batch_tokens=200)
    assert sum(n for n, _ in shapes) == len(TEXTS)
    assert max(n * length for n, length in shapes) <= 200
    assert len(shapes) < len(TEXTS)


def test_unknown_poolings_and_similarities_are_refused(tiny_bert, tiny_tokenizer):
    with pytest.raises(SettingError, match="pooling='median' is unknown; choose one of mean, cls, last"):
        Backbone(tiny_bert, tiny_tokenizer, "median")
    with pytest.raises(SettingError, match="'manhattan'"):
        Backbone(tiny_bert, tiny_tokenizer, similarity="manhattan")


def test_pool_by_hand():
    hidden = torch.arange(24.0).reshape(2, 4, 3)
    left, right = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert pool(hidden, left, "cls").tolist() == [[6.0, 7.0, 8.0], [15.0, 16.0, 17.0]]
    assert pool(hidden, left, "last").tolist() == [[9.0, 10.0, 11.0], [21.0, 22.0, 23.0]]
    assert pool(hidden, left, "mean").tolist() == [[7.5, 8.5, 9.5], [18.0, 19.0, 20.0]]
    assert pool(hidden, right, "cls").tolist() == [[0.0, 1.0, 2.0], [12.0, 13.0, 14.0]]
    assert pool(hidden, right, "last").tolist() == [[3.0, 4.0, 5.0], [18.0, 19.0, 20.0]]
    assert pool(hidden, right, "mean").tolist() == [[1.5, 2.5, 3.5], [15.0, 16.0, 17.0]]


# ---------------------------------------------------------------- out of memory


class Small(nn.Module):
    """A backbone on a device that holds ``rows`` texts at a time."""

    def __init__(self, inner, rows, error):
        super().__init__()
        self.inner, self.rows, self.error, self.seen = inner, rows, error, []

    def forward(self, **features):
        self.seen.append(len(features["input_ids"]))
        if self.seen[-1] > self.rows:
            raise self.error
        return self.inner(**features)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
CPU_OUT_OF_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 5 bytes"
)


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, CPU_OUT_OF_MEMORY])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_out_of_memory_halves_the_batch_and_goes_on(rows, error, tiny_bert, tiny_tokenizer, caplog):
    model = Small(tiny_bert, rows, error)
    with caplog.at_level(logging.WARNING, logger="fullrank"):
        found = Backbone(model, tiny_tokenizer).encode_queries(TEXTS)
    close(found, Backbone(tiny_bert, tiny_tokenizer).encode_queries(TEXTS))
    assert max(model.seen) > rows
    assert sum(n for n in model.seen if n <= rows) == len(TEXTS)
    assert "out of memory" in caplog.text


def test_out_of_memory_of_one_text_comes_through(tiny_bert, tiny_tokenizer):
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        Backbone(Small(tiny_bert, 0, OUT_OF_MEMORY), tiny_tokenizer).encode_queries(TEXTS)


def test_other_errors_of_a_model_come_through_at_once(tiny_bert, tiny_tokenizer):
    model = Small(tiny_bert, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Backbone(model, tiny_tokenizer).encode_queries(TEXTS)
    assert len(model.seen) == 1


def test_out_of_memory_in_a_sentence_transformer(tiny_st, tiny_golden):
    model = tiny_st()
    expected = evaluate(model, tiny_golden)
    inner = model[0].model
    model[0].model = Small(inner, 2, OUT_OF_MEMORY)
    model[0].model.config = inner.config
    found = evaluate(model, tiny_golden)
    assert max(model[0].model.seen) > 2
    assert found.metrics == expected.metrics


# ---------------------------------------------------------------- wrappers of a training run


def patched_by_accelerate(model):
    """Puts an autocast around `forward` on the instance, as `Accelerator.prepare_model` does, and leaves it there."""
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = types.MethodType(autocast(model.forward.__func__), model)
    return model


def test_accelerate_around_a_sentence_transformer_does_not_reach_fp32(tiny_st, tiny_golden):
    for fast in (True, False):
        clean = as_encoder(tiny_st().eval(), fast=fast)
        model = patched_by_accelerate(tiny_st().eval())
        assert (model.encode(TEXTS, convert_to_tensor=True) - clean.encode_queries(TEXTS)).abs().max() > 1e-3
        wrapped = model.forward
        found = as_encoder(model, fast=fast)
        close(found.encode_queries(TEXTS), clean.encode_queries(TEXTS))
        for precision in ("fp32", None):
            assert evaluate(found, tiny_golden, precision=precision).hits == evaluate(clean, tiny_golden).hits
        assert evaluate(found, tiny_golden, precision="bf16").hits != evaluate(clean, tiny_golden).hits
        assert model.forward is wrapped


def test_accelerate_around_a_backbone_does_not_reach_fp32(tiny_bert, tiny_tokenizer):
    clean = Backbone(tiny_bert, tiny_tokenizer).encode_queries(TEXTS)
    ids = tiny_tokenizer(TEXTS[:2], return_tensors="pt", padding=True)
    hidden = tiny_bert(**ids)[0]
    encoder = Backbone(patched_by_accelerate(tiny_bert), tiny_tokenizer)
    close(encoder.encode_queries(TEXTS), clean)
    assert (tiny_bert(**ids)[0] - hidden).abs().max() > 1e-3  # the patch is still there


def test_accelerate_around_any_module_with_encode():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(1, 5)

        def forward(self, x):
            return self.layer(x)

        def encode(self, texts):
            return self(torch.tensor([[float(len(text))] for text in texts]))

    clean = as_encoder(Model()).encode_queries(TEXTS)
    model = patched_by_accelerate(Model())
    assert model.encode(TEXTS).dtype == torch.bfloat16
    assert torch.equal(as_encoder(model).encode_queries(TEXTS), clean)
    assert model.encode(TEXTS).dtype == torch.bfloat16


def test_parallel_and_compiled_wrappers_are_looked_through(tiny_st, tmp_path):
    model = tiny_st(prompts={"query": "query : "}).eval()
    expected = as_encoder(model).encode_queries(TEXTS)
    compiled = torch.compile(model, backend="eager")
    assert hasattr(compiled, "_orig_mod")
    wrappers = [nn.DataParallel(model), compiled, nn.DataParallel(compiled)]
    for wrapper in wrappers:
        encoder = as_encoder(wrapper)
        assert encoder.prompt("query") == "query : "
        close(encoder.encode_queries(TEXTS), expected)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        close(as_encoder(nn.parallel.DistributedDataParallel(model)).encode_queries(TEXTS), expected)
    finally:
        torch.distributed.destroy_process_group()


def test_an_encoder_stays_what_it_is(tiny_st):
    first = as_encoder(tiny_st(prompts={"query": "query : "}), similarity="dot")
    again = as_encoder(first)
    assert again.prompt("query") == "query : "
    assert again.similarity == "dot"
    assert as_encoder(first, query_prompt="").prompt("query") == ""


def test_the_similarity_of_an_encoder_can_be_changed(tiny_st):
    assert as_encoder(as_encoder(tiny_st()), similarity="euclidean").similarity == "euclidean"
    assert as_encoder(as_encoder(Table()), similarity="dot").similarity == "dot"


# ---------------------------------------------------------------- what can be encoded with, and how


def test_an_object_that_cannot_encode_is_refused_with_the_way_out(tiny_bert):
    for model in (tiny_bert, object(), None):
        with pytest.raises(
            SettingError, match=rf"cannot encode with a {type(model).__name__}: expected .*encode\(list\)"
        ):
            as_encoder(model)
    with pytest.raises(SettingError, match=r"Backbone\(model, tokenizer, pooling='mean'\)"):
        as_encoder(tiny_bert)


def test_the_name_of_a_model_is_refused():
    with pytest.raises(SettingError, match="cannot encode with a str"):
        as_encoder("all-MiniLM-L6-v2")


class Table:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def encode(self, texts):
        return np.array([[float(len(text)), 1.0] for text in texts])


def test_a_similarity_that_cannot_be_ranked_is_refused(tiny_st):
    for model, options in (
        (tiny_st(similarity_fn_name="manhattan"), {}),
        (Table(similarity="manhattan"), {}),
        (tiny_st(), {"similarity": "manhattan"}),
    ):
        with pytest.raises(SettingError, match="similarity 'manhattan' cannot be ranked; choose one of cosine, dot"):
            as_encoder(model, **options)
    assert as_encoder(tiny_st(similarity_fn_name="manhattan"), similarity="dot").similarity == "dot"


def test_the_similarity_is_the_models_own():
    assert as_encoder(Table()).similarity == "cosine"
    assert as_encoder(Table(similarity="dot")).similarity == "dot"
    assert as_encoder(Table(similarity=lambda a, b: a @ b.T)).similarity == "cosine"
    assert as_encoder(Table(similarity_fn_name="euclidean")).similarity == "euclidean"
    assert as_encoder(Table(similarity="dot"), similarity="cosine").similarity == "cosine"


def test_prompts_stand_in_front_of_the_texts_of_any_model():
    encoder = as_encoder(Table(prompts={"query": "12345", "passage": "123"}))
    assert encoder.encode_queries(["", "a"]).tolist() == [[5.0, 1.0], [6.0, 1.0]]
    assert encoder.encode_documents(["", "a"]).tolist() == [[3.0, 1.0], [4.0, 1.0]]


def test_shapes_of_any_model_are_checked():
    class Wrong:
        def encode(self, texts):
            return np.ones((len(texts) + 1, 2))

    with pytest.raises(EvaluationError, match=r"encode returned the shape \(3, 2\) for 2 texts; expected \[2, d\]"):
        as_encoder(Wrong()).encode_queries(["a", "b"])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None), (None, None)]
)
def test_precision_is_an_autocast_of_the_body(precision, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with at_precision(precision, torch.device("cpu")):
            assert torch.is_autocast_enabled("cpu") is (dtype is not None)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)
        assert torch.is_autocast_enabled("cpu")
    with pytest.raises(SettingError, match="precision='int8' is unknown"), at_precision("int8", torch.device("cpu")):
        pass


def test_a_length_limit_of_the_processor_is_kept(tiny_bert_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    limited = Transformer(str(tiny_bert_path), processing_kwargs={"text": {"max_length": 12}})
    model = SentenceTransformer(modules=[limited, Pooling(32)], device="cpu")
    rng = random.Random(0)
    texts = [" ".join(rng.choices(["bal", "din", "gos", "fat", "hir"], k=40)) for _ in range(3)]
    wanted = model.encode(texts, convert_to_tensor=True)
    assert (as_encoder(model).encode_documents(texts) - wanted).abs().max() < 1e-5


def test_an_encoder_puts_its_own_prompts_in_front():
    class Own:
        similarity = "cosine"
        prompts: ClassVar = {"query": "query: "}

        def __init__(self):
            self.seen = []

        def encode_queries(self, texts):
            self.seen += texts
            return torch.ones(len(texts), 2)

        encode_documents = encode_queries

    own = Own()
    as_encoder(own).encode_queries(["cat"])
    as_encoder(own, query_prompt="q: ").encode_queries(["cat"])
    assert own.seen == ["cat", "q: cat"]


def test_what_cannot_be_a_backbone_is_refused_when_it_is_made(tiny_bert, tiny_tokenizer):
    with pytest.raises(SettingError, match="Backbone needs a torch module, got str"):
        Backbone("bert", tiny_tokenizer)
    with pytest.raises(SettingError, match="Backbone needs the tokenizer of the model, got NoneType"):
        Backbone(tiny_bert, None)
    for length in (0, -5, 1.5):
        with pytest.raises(SettingError, match=f"max_length={length} must be a whole number of tokens from 1"):
            Backbone(tiny_bert, tiny_tokenizer, max_length=length)
    with pytest.raises(SettingError, match=r"max_length is 65, but BertModel has 64 positions.*max_length=64 or less"):
        Backbone(tiny_bert, tiny_tokenizer, max_length=65)
    tiny_tokenizer.model_max_length = 10**30
    with pytest.raises(SettingError, match="the tokenizer's model_max_length is 1e"):
        Backbone(tiny_bert, tiny_tokenizer)
    assert Backbone(tiny_bert, tiny_tokenizer, max_length=64).encode_queries(["ban " * 100]).shape == (1, 32)


def test_positions_are_counted_behind_the_padding(tiny_tokenizer):
    from transformers import RobertaConfig, RobertaModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = RobertaModel(RobertaConfig(vocab_size=200, max_position_embeddings=34, pad_token_id=1, **sizes)).eval()
    tiny_tokenizer.model_input_names = ["input_ids", "attention_mask"]
    with pytest.raises(SettingError, match="RobertaModel has 32 positions"):
        Backbone(model, tiny_tokenizer, max_length=33)
    assert Backbone(model, tiny_tokenizer, max_length=32).encode_queries(["ban " * 100]).shape == (1, 32)


def test_a_model_with_a_head_says_what_to_pass(tiny_bert, tiny_tokenizer):
    from transformers import BertForMaskedLM

    model = BertForMaskedLM(tiny_bert.config).eval()
    with pytest.raises(SettingError, match=r"BertForMaskedLM gives no last_hidden_state.*Backbone\(model.bert, "):
        Backbone(model, tiny_tokenizer).encode_queries(["ban"])
    assert Backbone(model.bert, tiny_tokenizer).encode_queries(["ban"]).shape == (1, 32)
