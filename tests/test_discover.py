"""What a run left behind: every kind of folder is known for what it is, and a half-written one is named as such."""

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from fullrank import BestStore
from fullrank._errors import DataError
from fullrank.discover import discover, fingerprint_of, inspect_folder, refuse_mixed

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def write_model(folder, *, value=1.0, config=None, modules=True, state=None):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "bert", "hidden_size": 4}))
    save_file({"w": np.full((4, 4), value, np.float32)}, folder / "model.safetensors")
    if modules:
        (folder / "modules.json").write_text(json.dumps(MODULES))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text("{}")
    if state is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": state}))
    return folder


def write_adapter(folder, *, base="some/base", value=1.0, **config):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": base, **config})
    )
    save_file({"lora_A": np.full((2, 4), value, np.float32)}, folder / "adapter_model.safetensors")
    return folder


def test_every_kind_of_folder_is_known(tmp_path):
    write_model(tmp_path / "checkpoint-20", value=2)
    write_model(tmp_path / "checkpoint-3", value=3, modules=False)
    write_adapter(tmp_path / "checkpoint-100")
    write_model(tmp_path / "final", value=4)
    write_model(tmp_path / "epoch", value=5, state=50)
    (tmp_path / "runs").mkdir()  # TensorBoard's
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").write_text("no model")
    BestStore(tmp_path / "fullrank" / "best").offer(
        7, 0.5, lambda folder: write_model(folder / "x").rename(folder / "y")
    )
    store = BestStore(tmp_path / "fullrank" / "best", keep_best=2)

    def save(folder):
        folder.rmdir()
        write_model(folder, value=6)

    store.offer(9, 0.7, save)
    found = {c.name: (c.step, c.kind, c.bare, c.origin, c.problem) for c in discover(tmp_path)}
    assert found.pop("fullrank/best/step-7")[4] is not None  # nothing that a loader would find
    assert found == {
        "checkpoint-3": (3, "model", True, "checkpoint", None),
        "fullrank/best/step-9": (9, "model", False, "store", None),
        "checkpoint-20": (20, "model", False, "checkpoint", None),
        "epoch": (50, "model", False, "folder", None),
        "checkpoint-100": (100, "adapter", True, "checkpoint", None),
        "final": (None, "model", False, "folder", None),
    }
    assert [c.step for c in discover(tmp_path)] == [3, 7, 9, 20, 50, 100, None]
    assert next(c for c in discover(tmp_path) if c.kind == "adapter").base == "some/base"


def test_of_one_step_in_two_places_the_stored_one_is_taken_unless_it_is_broken(tmp_path):
    write_model(tmp_path / "checkpoint-9", value=6)

    def save(folder):
        folder.rmdir()
        write_model(folder, value=6)

    BestStore(tmp_path / "fullrank" / "best").offer(9, 0.7, save)
    assert [c.name for c in discover(tmp_path)] == ["fullrank/best/step-9"]
    (tmp_path / "fullrank" / "best" / "step-9" / "model.safetensors").write_bytes(b"half")
    found = discover(tmp_path)
    assert [c.name for c in found] == ["checkpoint-9", "fullrank/best/step-9"]
    assert found[1].problem.endswith("half-written")  # named all the same


def test_folders_of_one_step_with_unlike_weights_are_candidates_each(tmp_path):
    write_model(tmp_path / "checkpoint-8", value=1)
    write_model(tmp_path / "other run", value=2, state=8)
    write_model(tmp_path / "copy", value=1, state=8)
    (write_model(tmp_path / "half", value=3, state=8) / "model.safetensors").write_bytes(b"half")
    write_model(tmp_path / "checkpoint-4", value=1)  # of another step: a candidate, whatever its weights
    found = discover(tmp_path)
    assert [(c.name, c.step) for c in found] == [
        ("checkpoint-4", 4),
        ("checkpoint-8", 8),
        ("other run", 8),
        ("half", 8),
    ]
    assert [c.name for c in found if c.problem] == ["half"]


def test_of_equal_weights_in_another_shape_both_are_candidates(tmp_path):
    write_model(tmp_path / "checkpoint-8", value=1)
    write_model(tmp_path / "copy", value=1)
    pooling = write_model(tmp_path / "first token", value=1) / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode": "cls"}')
    write_adapter(tmp_path / "checkpoint-9", lora_alpha=16)
    write_adapter(tmp_path / "half", lora_alpha=8)
    assert [c.name for c in discover(tmp_path)] == ["checkpoint-8", "checkpoint-9", "first token", "half"]


def test_what_is_stored_beside_an_adapter_tells_candidates_apart(tmp_path):
    beside = {"norm": np.ones(4, np.float32)}
    write_adapter(tmp_path / "checkpoint-9")
    save_file(beside, write_adapter(tmp_path / "tuned") / "extra.safetensors")
    save_file({"norm": beside["norm"] * 2}, write_adapter(tmp_path / "tuned on") / "extra.safetensors")
    save_file(beside, write_adapter(tmp_path / "tuned, copied") / "extra.safetensors")
    assert [c.name for c in discover(tmp_path)] == ["checkpoint-9", "tuned", "tuned on"]

    def save(folder):
        folder.rmdir()
        save_file(beside, write_adapter(folder) / "extra.safetensors")

    BestStore(tmp_path / "fullrank" / "best").offer(9, 0.7, save)  # beside which the trainer writes the adapter alone
    assert [c.name for c in discover(tmp_path)] == ["fullrank/best/step-9", "tuned on"]


def test_a_state_that_cannot_be_read_leaves_a_folder_without_a_step(tmp_path, caplog):
    (write_model(tmp_path / "final", state=8) / "trainer_state.json").write_text("{")
    assert [(c.name, c.step, c.problem) for c in discover(tmp_path)] == [("final", None, None)]
    assert "its step is not known" in caplog.text


def test_the_model_that_the_trainer_saved_in_the_run_folder_is_a_candidate_unless_it_is_a_copy(tmp_path):
    run = write_model(tmp_path / "run", value=2)
    write_model(run / "checkpoint-4", value=4)
    assert [(c.name, c.step) for c in discover(run)] == [("checkpoint-4", 4), ("run", None)]
    shutil.copy(run / "checkpoint-4" / "model.safetensors", run / "model.safetensors")
    assert [c.name for c in discover(run)] == ["checkpoint-4"]


def broken(tmp_path, spoil):
    folder = write_model(tmp_path / "checkpoint-2")
    spoil(folder)
    return inspect_folder(folder, "checkpoint-2", step=2, origin="checkpoint").problem


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def long_header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def shard_missing(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def no_state(folder):
    (folder / "optimizer.pt").write_bytes(b"x")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (cut, r"model.safetensors has 128 bytes where its header says 136: half-written"),
        (long_header, "model.safetensors has no readable safetensors header: half-written or no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"abc"), "model.safetensors has 3 bytes: half-written"),
        (lambda f: (f / "model.safetensors").unlink(), "it holds no model.safetensors"),
        (shard_missing, "model-00002-of-00002.safetensors is missing, which model.safetensors.index.json names"),
        (pickled, r"its weights are a pickle (pytorch_model.bin), which may run code; only safetensors are read"),
        (no_state, "it holds no trainer_state.json, which the Trainer writes last: half-written"),
        (lambda f: (f / "modules.json").write_text("[{"), "modules.json cannot be read"),
        (
            lambda f: (f / "modules.json").write_text('[{"path": "../other"}]'),
            "modules.json names '../other', which lies outside the folder",
        ),
        (lambda f: (f / "trainer_state.json").write_text("{"), None),
    ],
)
def test_a_half_written_folder_says_what_it_lacks(tmp_path, spoil, problem):
    found = broken(tmp_path, spoil)
    if problem is None:
        assert found is None  # the step is in the name; the state is not needed
    elif problem.endswith("136: half-written"):
        assert "where its header says" in found
        assert found.endswith("half-written")
    else:
        assert found.startswith(problem)


def test_an_empty_checkpoint_is_named_and_an_adapter_needs_its_weights(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    adapter = write_adapter(tmp_path / "checkpoint-4")
    (adapter / "adapter_model.safetensors").unlink()
    write_adapter(tmp_path / "checkpoint-6", megatron_config={"a": 1}, megatron_core="os")
    problems = {c.name: c.problem for c in discover(tmp_path)}
    assert problems == {
        "checkpoint-2": "it is empty",
        "checkpoint-4": "it holds no adapter_model.safetensors",
        "checkpoint-6": "adapter_config.json names a module to import, which is refused",
    }


def test_no_folder_and_an_empty_one_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"run folder '.*/none' does not exist"):
        discover(tmp_path / "none")
    with pytest.raises(DataError, match=r"holds no checkpoints: looked for checkpoint-N, fullrank/best/step-N"):
        discover(tmp_path)


def test_another_architecture_than_most_is_refused_by_name(tmp_path):
    for step in (2, 4):
        write_model(tmp_path / f"checkpoint-{step}", value=step)
    write_model(tmp_path / "checkpoint-6", config={"model_type": "bert", "hidden_size": 8})
    problems = [c.problem for c in refuse_mixed(discover(tmp_path))]
    assert problems[:2] == [None, None]
    assert problems[2] == "mixed architectures: it is bert, 8 wide, and 2 of the others bert, 4 wide"


def test_a_fingerprint_tells_weights_apart_and_not_folders(tmp_path):
    one, same, other = (
        inspect_folder(write_model(tmp_path / name, value=value), name)
        for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.5))
    )
    assert fingerprint_of(one) == fingerprint_of(same) != fingerprint_of(other)
    for file, key in (("1_Pooling/config.json", "pooling_mode"), ("modules.json", "x"), ("tokenizer_config.json", "y")):
        folder = write_model(tmp_path / f"d{key}")
        before = fingerprint_of(inspect_folder(folder, "d"))
        (folder / file).write_text(json.dumps([] if file == "modules.json" else {key: "cls"}))
        assert fingerprint_of(inspect_folder(folder, "d")) != before
        (folder / "trainer_state.json").write_text("{}")  # shapes nothing
        (folder / "README.md").write_text("card")
        written_anew = {**json.loads((folder / "config.json").read_text()), "transformers_version": "9"}
        middle = fingerprint_of(inspect_folder(folder, "d"))
        (folder / "config.json").write_text(json.dumps(written_anew))
        assert fingerprint_of(inspect_folder(folder, "d")) == middle != before
    shutil.rmtree(one.path)
    with pytest.raises(OSError, match="a"):
        fingerprint_of(one)


def test_the_fingerprint_of_an_adapter_covers_its_settings_and_its_base(tmp_path):
    base = write_model(tmp_path / "base")
    adapter = inspect_folder(write_adapter(tmp_path / "a", base=str(base), lora_alpha=16), "a")
    first = fingerprint_of(adapter)
    write_adapter(tmp_path / "b", base=str(base), lora_alpha=1)
    assert fingerprint_of(inspect_folder(tmp_path / "b", "b")) != first
    assert fingerprint_of(adapter, str(write_model(tmp_path / "other"))) != first
    save_file({"w": np.full((4, 4), 7, np.float32)}, base / "model.safetensors")  # trained on in place
    assert fingerprint_of(adapter) != first
    whole = inspect_folder(base, "base")
    assert fingerprint_of(whole) == fingerprint_of(whole, "another/base")  # which it does not need


def test_ids_of_foreign_folders_are_only_names(tmp_path):
    write_model(tmp_path / "checkpoint-2")
    odd = "we[b]ird\nname"
    write_model(tmp_path / odd, value=3)
    assert odd in [c.name for c in discover(tmp_path)]
