"""Candidates in memory: what is encoded with is what the folder holds; what lacks weights is an error of its own."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import AutoModel, AutoModelForSequenceClassification, MarianConfig, MarianModel, PreTrainedModel

from fullrank import candidates, evaluate, select_checkpoint
from fullrank._errors import DataError, EvaluationError
from fullrank.candidates import Loader, save_loaded
from fullrank.discover import discover
from fullrank.modelfiles import EXTRA
from fullrank.models import load_sentence_transformer, refusing_made_up
from fullrank.weights import load_weights
from training import LORA, make_trainer, write_beir

peft = pytest.importorskip("peft")

TEXTS = ["bal bin bor", "dos kit", "mal"]


@pytest.fixture(scope="session")
def golden(make_golden):
    return make_golden(3, name="dev")


@pytest.fixture
def run(tiny_runs, tmp_path):
    """Factory: a fresh copy of a run."""
    return lambda how: Path(shutil.copytree(tiny_runs[how], tmp_path / how))


@pytest.fixture
def train(tiny_base_path, pairs, tmp_path):
    """Factory: a LoRA run of 8 steps with checkpoints at 4 and 8; ``at`` is the attribute that takes the PEFT model."""

    def make(at="model", **options):
        model = SentenceTransformer(str(tiny_base_path), device="cpu")
        backbone = model[0].model
        setattr(model[0], at, peft.get_peft_model(backbone, peft.LoraConfig(**LORA, **options)))
        folder = tmp_path / "lora"
        make_trainer(model, pairs, folder, learning_rate=2e-2, save_strategy="steps", save_steps=4).train()
        return folder

    return make


def embedded(encoder):
    return encoder.encode_queries(TEXTS).numpy()


def plain(folder):
    """Returns how the folder embeds where sentence-transformers loads it."""
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


def rewrite(file, change):
    """Writes a safetensors file anew with what ``change`` makes of its tensors."""
    save_file({name: value.contiguous() for name, value in change(load_file(file)).items()}, file, {"format": "pt"})


def keep_words(state):
    return {name: value for name, value in state.items() if "word_embeddings" in name}


# ------------------------------------------------------------------------------- weights that are not there


def test_an_adapter_inside_the_weights_is_a_failure_with_its_cause(train, golden, tiny_base_path):
    folder = train(at="auto_model")
    with pytest.raises(DataError, match=r"the base model '.*' cannot be evaluated: .*checkpoint-4 lacks 8 weights"):
        select_checkpoint(folder, golden, base=str(tiny_base_path), journal=folder / "based.json")
    found = select_checkpoint(folder, golden, exhaustive=True)
    assert found.winner is None
    failed = {row.name: row.why for row in found.rows if row.status == "failed"}
    assert failed.keys() == {"checkpoint-4", "checkpoint-8"}
    for why in failed.values():
        assert "lacks 8 weights of a BertModel, which would be made up at random: 'encoder.layer.0.att" in why
        assert "holds the tensors of a PEFT adapter instead, as a run writes it that assigned get_peft_model" in why


@pytest.mark.parametrize("first", [4, 8])
def test_weights_that_are_missing_are_named_and_never_made_up(run, first):
    folder = run("full")
    rewrite(folder / "checkpoint-4" / "model.safetensors", keep_words)
    found, loader = {c.step: c for c in discover(folder)}, Loader()
    if first != 4:
        loader.load(found[first])
    with pytest.raises((DataError, EvaluationError), match=r"checkpoint-4 lacks 36 weights of a BertModel, which"):
        loader.load(found[4])
    assert np.array_equal(embedded(loader.load(found[8])[1]), plain(found[8].path))


def test_a_pooler_may_be_missing(run):
    folder, loader = run("full"), Loader()
    file = folder / "checkpoint-4" / "model.safetensors"
    rewrite(file, lambda state: {name: value for name, value in state.items() if "pooler" not in name})
    for candidate in discover(folder)[1::-1]:
        assert np.array_equal(embedded(loader.load(candidate)[1]), plain(candidate.path))


def test_any_model_that_lacks_weights_is_refused_and_transformers_is_left_as_it_was(run, tiny_st):
    before = PreTrainedModel.__dict__["from_pretrained"]
    folder = run("full") / "checkpoint-4"
    rewrite(folder / "model.safetensors", keep_words)
    with pytest.raises(DataError, match=r"checkpoint-4 lacks 36 weights of a BertModel"):
        load_sentence_transformer(str(folder))
    with pytest.raises(EvaluationError, match=r"checkpoint-4 lacks 36 weights of a BertModel"):
        load_weights(tiny_st(), folder)
    with pytest.raises(EvaluationError, match=r"checkpoint-4 lacks 36 weights of a BertModel"):
        load_weights(tiny_st()[0].model, folder)
    assert PreTrainedModel.__dict__["from_pretrained"] is before


def test_a_load_in_another_thread_is_not_taken_for_ours(tiny_bert_path, tiny_base_path):
    def with_a_new_head():
        AutoModelForSequenceClassification.from_pretrained(tiny_bert_path)

    with refusing_made_up("ours"):
        other = threading.Thread(target=with_a_new_head)
        other.start()
        other.join()
        load_sentence_transformer(str(tiny_base_path))
    with (
        pytest.raises(DataError, match="ours lacks 2 weights of a BertForSequenceClassification"),
        refusing_made_up("ours"),
    ):
        with_a_new_head()


def test_positions_that_are_computed_may_be_missing(tmp_path):
    config = MarianConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    MarianModel(config).save_pretrained(tmp_path)
    with refusing_made_up("ours"):
        model = AutoModel.from_pretrained(tmp_path)
    assert isinstance(model, MarianModel)


def test_what_adalora_counts_may_be_missing(tiny_st, tiny_base_path, tmp_path):
    model = tiny_st()
    config = peft.AdaLoraConfig(init_r=2, target_modules=["query"], total_step=10, tinit=1, tfinal=1)
    model[0].model = peft.get_peft_model(model[0].model, config)
    model.save_pretrained(str(tmp_path / "adapter"))
    body = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    if not Path(str(body["base_model_name_or_path"])).is_dir():
        body["base_model_name_or_path"] = str(tiny_base_path)
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(body))
    load_sentence_transformer(str(tmp_path / "adapter"))


def test_evaluating_a_model_that_lacks_weights_is_wrong_input(run, run_main, golden, tmp_path):
    write_beir(golden, tmp_path / "data")
    folder = run("full") / "checkpoint-4"
    rewrite(folder / "model.safetensors", keep_words)
    code, out, err = run_main("eval", folder, "--data", tmp_path / "data")
    assert (code, out) == (2, "")
    assert "lacks 36 weights of a BertModel" in err


@pytest.mark.parametrize("given", [False, True])
def test_adapters_on_a_base_that_lacks_weights_are_refused(run, tiny_base_path, tmp_path, given):
    base = Path(shutil.copytree(tiny_base_path, tmp_path / "base"))
    rewrite(base / "model.safetensors", keep_words)
    folder = run("peft")
    config = folder / "checkpoint-4" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(base)}))
    with pytest.raises(DataError, match=rf"on the base '{base}' .*{base} lacks 36 weights of a BertModel"):
        Loader(str(base) if given else None).load(discover(folder)[0])


def test_an_adapter_file_that_lacks_tensors_is_refused_and_names_them(run):
    folder, loader = run("peft"), Loader()
    file = folder / "checkpoint-8" / "adapter_model.safetensors"
    rewrite(file, lambda state: {name: value for name, value in state.items() if "layer.0" in name})
    first, second, *_ = discover(folder)
    loader.load(first)
    with pytest.raises(EvaluationError, match=r"does not hold all of the adapter 'default': missing \['encoder.lay"):
        loader.load(second)


def test_two_adapters_of_which_the_model_has_one_are_not_put_over_each_other(run):
    folder = run("peft")
    other = folder / "checkpoint-4" / "other"
    other.mkdir()
    shutil.copy(folder / "checkpoint-8" / "adapter_model.safetensors", other)
    with pytest.raises(EvaluationError, match=r"checkpoint-4 holds 2 adapters, and the model has 'default'"):
        Loader().load(discover(folder)[0])


# ------------------------------------------------------------------------------- one after another


@pytest.mark.parametrize(
    "options", [{"bias": "lora_only"}, {"bias": "all"}, {"init_lora_weights": "pissa"}, {"use_dora": True}, {}]
)
def test_neither_base_nor_adapters_leave_anything_behind(train, tiny_base_path, tmp_path, options):
    folder = train(**options)
    base, dora = plain(tiny_base_path), "use_dora" in options
    found, loader = discover(folder), Loader()
    alone = {c.name: embedded(Loader().load(c)[1]) for c in found}
    for candidate in [*found, *found[::-1]]:
        seen = embedded(loader.load(candidate)[1])
        assert np.array_equal(seen, alone[candidate.name])
        assert dora or np.allclose(seen, plain(candidate.path), atol=1e-6)  # sentence-transformers loses DoRA's
        _, encoder = loader.load_base(candidate.base, candidate)
        assert np.array_equal(embedded(encoder), base)
    save_loaded(encoder, tmp_path / "base", adapters=False)
    assert np.array_equal(plain(tmp_path / "base"), base)


@pytest.mark.parametrize("options", [{"modules_to_save": ["pooler"]}, {"trainable_token_indices": [6, 7, 8]}])
def test_adapters_with_whole_modules_or_tokens_beside_them_are_loaded(train, tiny_base_path, options):
    loader = Loader()
    found = discover(train(**options))
    for candidate in [*found, *found[::-1]]:
        assert np.array_equal(embedded(loader.load(candidate)[1]), plain(candidate.path))
        _, encoder = loader.load_base(candidate.base, candidate)
        assert np.array_equal(embedded(encoder), plain(tiny_base_path))


@pytest.mark.parametrize("order", [(4, 20, 4), (20, 4)])
def test_an_adapter_is_loaded_also_where_something_beside_it_is_stored(run, tiny_base_path, order):
    folder = run("peft")
    norms = {n: v for n, v in SentenceTransformer(str(tiny_base_path)).state_dict().items() if "LayerNorm" in n}
    save_file(
        {n.replace("0.model.", "0.model.base_model.model."): v + 0.1 for n, v in norms.items()},
        folder / "checkpoint-4" / EXTRA,
    )
    expected = SentenceTransformer(str(folder / "checkpoint-4"), device="cpu")
    expected.load_state_dict({n: v + 0.1 for n, v in norms.items()}, strict=False)
    loader, found = Loader(), {c.step: c for c in discover(folder)}
    for step in order:
        encoder = loader.load(found[step])[1]
    assert np.array_equal(embedded(encoder), expected.encode(TEXTS))


def test_an_adapter_that_does_not_train_is_read_from_a_checkpoint_all_the_same(run, tiny_base_path):
    folder = run("peft") / "checkpoint-20"
    model = SentenceTransformer(str(tiny_base_path), device="cpu")
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**LORA))
    model.requires_grad_(False)
    trained = {name: value for name, value in model.named_parameters() if "LayerNorm" in name}
    for value in trained.values():
        value.requires_grad_(True)
    save_file({name: value.detach() for name, value in trained.items()}, folder / EXTRA)
    load_weights(model, folder)
    (folder / EXTRA).unlink()
    assert np.array_equal(model.eval().encode(TEXTS), plain(folder))


def test_a_base_of_another_architecture_is_refused(run, tiny_st, tmp_path):
    tiny_st(extra=[Dense(32, 32)]).save_pretrained(str(tmp_path / "dense"))
    (first, *_) = discover(run("peft"))
    with pytest.raises(
        EvaluationError, match=r"the base '.*dense' has another architecture than its adapters: \['2.li"
    ):
        Loader().load_base(str(tmp_path / "dense"), first)


def test_the_base_is_its_own_whichever_adapters_load(run, golden, tiny_base_path, tiny_bert_path, tmp_path):
    folder = run("peft")
    other = Path(shutil.copytree(tiny_bert_path, tmp_path / "other"))
    rewrite(other / "model.safetensors", lambda s: {n: v * 1.7 if "query" in n else v for n, v in s.items()})
    config = folder / "checkpoint-8" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(other)}))
    for step in (12, 16, 20):
        shutil.rmtree(folder / f"checkpoint-{step}")
    rewrite(
        folder / "checkpoint-4" / "adapter_model.safetensors",
        lambda state: {n: v[:, :16] if "lora_A" in n else v for n, v in state.items()},
    )
    found = select_checkpoint(folder, golden, metric="ndcg@10", exhaustive=True)
    assert found.base.path == str(tiny_base_path)
    model = SentenceTransformer(str(tiny_base_path), device="cpu")
    assert found.base.score == evaluate(model, golden, metrics=["ndcg@10"])["ndcg@10"]


# ------------------------------------------------------------------------------- the base


def test_a_base_in_memory_is_not_read_again(run, tiny_base_path, monkeypatch):
    loader, read = Loader(str(tiny_base_path)), []
    real = candidates._loaded_model
    monkeypatch.setattr(candidates, "_loaded_model", lambda source: read.append(source) or real(source))
    for how, reads in (("full", 2), ("peft", 1)):
        first, second, *_ = discover(run(how))
        read.clear()
        for _ in range(3):
            loader.load_base(str(tiny_base_path), first)
        assert len(read) == reads  # the shape of the candidate, where it is no adapter, and the base
    loader.load(second)
    loader.load_base(str(tiny_base_path), first)
    assert len(read) == reads  # beside adapters what differs is kept


def test_a_base_folder_that_is_not_there_is_told_before_anything_else(run, golden, tmp_path, caplog):
    gone = str(tmp_path / "nope")
    with pytest.raises(DataError, match=rf"^the base model folder '{gone}' \(--base, base=...\) does not exist$"):
        select_checkpoint(run("peft"), golden, base=gone)
    assert not caplog.records


def test_a_base_that_cannot_be_reached_is_named_and_no_scratch_folder(run):
    with pytest.raises(DataError, match=r"cannot be loaded on the base 'nobody/nothing' \(--base\): ") as found:
        Loader("nobody/nothing").load(discover(run("peft"))[0])
    assert "fullrank-" not in str(found.value)
    assert "has moved" not in str(found.value)
