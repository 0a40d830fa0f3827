"""Candidates in memory, one after another: weights are put into one shared model, for adapters into one base.

Promise: what is encoded with is what the folder holds, whatever was in memory before; a candidate that does not fit is
one clear error of its own; weights are read from safetensors only and no code of a model is run.
"""

import hashlib
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fullrank._errors import DataError, EvaluationError, FullrankError
from fullrank._files import weights_as_files
from fullrank._optional import require
from fullrank.discover import Candidate
from fullrank.encode import Adapter
from fullrank.modelfiles import ADAPTER, ADAPTER_CONFIG, EXTRA, settled, shaping_files
from fullrank.models import bare_backbone, is_gone, load_sentence_transformer
from fullrank.shells import Shell, adapter_layers, names_below
from fullrank.weights import load_weights

__all__ = ["Loader", "backbone_folder", "refuse_gone", "save_loaded"]

logger = logging.getLogger(__name__)


class Loader:
    """Puts candidates into memory; those that differ in weights alone share one model.

    Args:
        base: path or hub id of the base model; default: the one that an adapter names.
    """

    def __init__(self, base: str | None = None) -> None:
        self.base = base
        self._shells: dict[str, Shell] = {}

    def load(self, candidate: Candidate) -> tuple[str, Adapter]:
        """Returns what encodes with the candidate's weights, and the name of the model that it shares.

        The weights stay in that model until another candidate of the same name is loaded.

        Raises:
            DataError: the folder or the base cannot be read.
            EvaluationError: the weights do not fit.
        """
        if candidate.problem:
            raise DataError(f"{candidate.path}: {candidate.problem}")
        if candidate.needs_base:
            refuse_gone(self.base)
        try:
            return self._loaded(candidate)
        except FullrankError:
            raise
        except Exception as error:  # a broken file raises what its reader likes: OSError, KeyError, RuntimeError, ...
            first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise DataError(f"{candidate.path} cannot be loaded: {first}") from error

    def load_base(self, source: str, like: Candidate | None) -> tuple[str, Adapter]:
        """Returns what encodes with the base model, in the shape (pooling, length, prompts) of the candidate ``like``.

        Raises:
            DataError: the base cannot be loaded.
            EvaluationError: it has another architecture.
        """
        name = f"base {source}"
        if like is None:
            alone = self._shells.get(name)
            return (name, alone.encoder) if alone else self._keep(name, _loaded_model(source), name)
        key = self._key(like)
        if key in self._shells and self._shells[key].current == name:
            return key, self._shells[key].encoder
        self.load(like)
        shell = self._shells[key]
        shell.current = None
        shell.restore()
        if like.kind == "adapter":
            shell.put_base(source, _loaded_model)
        else:
            _put_whole(shell.model, source, like)
        shell.current = name
        return key, shell.encoder

    def _key(self, candidate: Candidate) -> str:
        return _key(candidate, self.base or candidate.base)

    def _loaded(self, candidate: Candidate) -> tuple[str, Adapter]:
        base = self.base or candidate.base
        key = self._key(candidate)
        name = str(candidate.path)
        if key not in self._shells:
            adapter = candidate.kind == "adapter"
            model = _adapted(candidate, base, given=self.base) if adapter else _whole(candidate, base)
            self._keep(key, model, None)
        shell = self._shells[key]
        if shell.current != name:
            shell.current = None  # whatever fails below leaves weights of nobody
            shell.restore()
            shell.switch_adapters(on=True)
            if candidate.kind == "adapter":
                shell.put_adapter(candidate.path, _extra(candidate.path / EXTRA, shell.model))
            elif candidate.bare:
                _put_bare(shell.model, candidate)
            else:
                load_weights(shell.model, candidate.path)
            shell.current = name
        return key, shell.encoder

    def _keep(self, key: str, model: Any, current: str | None) -> tuple[str, Adapter]:
        shell = self._shells[key] = Shell(model)
        shell.current = current
        return key, shell.encoder


def refuse_gone(base: str | None) -> None:
    """Raises `DataError` where the base that was given is a path at which there is no folder."""
    if base is not None and is_gone(base):
        raise DataError(f"the base model folder {base!r} (--base, base=...) does not exist")


def save_loaded(encoder: Adapter, folder: Path, *, adapters: bool = True) -> None:
    """Writes the model behind ``encoder``, with the weights that are in it now, as a loadable folder.

    Adapters are merged into their base, or left out, which changes the model in memory: load anew before encoding.

    Raises:
        OSError: it cannot be written.
    """
    model: Any = getattr(encoder, "model", None)
    _remove_adapters(model, merge=adapters)
    with weights_as_files():
        model.save_pretrained(str(folder))


def _remove_adapters(model: Any, *, merge: bool) -> None:
    layers = {id(layer) for _, layer in adapter_layers(model)}
    if not layers:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if id(child) not in layers:
                continue
            if isinstance(child, BaseTunerLayer):
                if merge:
                    child.merge()
                setattr(part, name, child.get_base_layer())
            else:  # a module that was trained whole beside the adapter
                whole = child.modules_to_save[child.active_adapters[0]] if merge else child.original_module
                setattr(part, name, whole)
    backbone = model[0].model
    if hasattr(backbone, "get_base_model"):
        model[0].model = backbone = backbone.get_base_model()
    if getattr(backbone, "_hf_peft_config_loaded", False):
        backbone._hf_peft_config_loaded = False
        del backbone.peft_config
        # Loading an adapter leaves the renaming of its tensors here, and saving would turn every name back.
        backbone._weight_conversions = None


def _whole(candidate: Candidate, base: str | None) -> Any:
    if not candidate.bare:
        return _loaded_model(str(candidate.path))
    if base is None:
        raise DataError(
            f"{candidate.path} holds the weights of a backbone and no modules.json: pass --base MODEL (base=...), from "
            "which pooling, prompts and tokenizer are then taken"
        )
    return _base_model(base)


def _adapted(candidate: Candidate, base: str | None, *, given: str | None) -> Any:
    """Returns a model with the adapter's layers in it, on its base."""
    require("peft", extra="lora")
    if base is None:
        raise DataError(f"{candidate.path} is an adapter that names no base model; pass --base MODEL (base=...)")
    if not given and is_gone(base):
        raise DataError(
            f"{candidate.path} is an adapter on the base {base!r} ({ADAPTER_CONFIG}), and no such folder exists. Where "
            "it has moved, pass --base MODEL (base=...)"
        )
    try:
        if candidate.bare:
            return _adapted_bare(candidate, base)
        model = _adapted_folder(candidate, given)
        _refuse_made_up(model, base)
        return model
    except FullrankError as error:
        if given:
            raise DataError(f"{candidate.path} cannot be loaded on the base {base!r} (--base): {error}") from error
        raise DataError(
            f"{candidate.path} is an adapter on the base {base!r} ({ADAPTER_CONFIG}), which does not load: {error}. "
            "Where it has moved, pass --base MODEL (base=...)"
        ) from error


def _adapted_folder(candidate: Candidate, given: str | None) -> Any:
    if given is None:
        return load_sentence_transformer(str(candidate.path), adapter_follows=True)
    # sentence-transformers finds the base by the name in adapter_config.json: a copy of the folder names the one given.
    with tempfile.TemporaryDirectory(prefix="fullrank-") as scratch:
        copy = Path(scratch) / "model"
        copy.mkdir()
        for path in candidate.path.iterdir():
            if path.name != ADAPTER_CONFIG and path.name != EXTRA:
                (copy / path.name).symlink_to(path.resolve(), target_is_directory=path.is_dir())
        config = json.loads((candidate.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        local = Path(given).expanduser()
        config["base_model_name_or_path"] = str(backbone_folder(local)) if local.is_dir() else given
        (copy / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
        try:
            return load_sentence_transformer(str(copy), adapter_follows=True)
        except DataError as error:
            raise DataError(str(error).replace(str(copy), str(candidate.path))) from error


def _refuse_made_up(model: Any, base: str) -> None:
    """Loads a base by itself, which says what it lacks, where its files do not name all that stands below adapters.

    transformers tells of the adapter alone what was missing.
    """
    folder, stored = Path(base).expanduser(), set()
    if not folder.is_dir():
        return
    for file in backbone_folder(folder).glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored |= set(opened.keys())
    if any(name not in stored for name in names_below(model[0].model)):
        _loaded_model(base)


def _adapted_bare(candidate: Candidate, base: str) -> Any:
    peft = require("peft", extra="lora")
    model = _base_model(base)
    with safe_open(candidate.path / ADAPTER, framework="pt") as file:
        around = all(re.match(r"base_model\.model\.\d+\.", name) for name in file.keys())  # noqa: SIM118
    if around:
        return peft.PeftModel.from_pretrained(model, str(candidate.path))
    model[0].model = peft.PeftModel.from_pretrained(model[0].model, str(candidate.path))
    return model


def _loaded_model(source: str) -> Any:
    return load_sentence_transformer(source)


def _base_model(base: str) -> Any:
    for finding in bare_backbone(base):
        logger.warning("%s", finding)
    return _loaded_model(base)


def backbone_folder(folder: Path) -> Path:
    """Returns where in a SentenceTransformer's folder its backbone is."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return folder.resolve()
    first: str = json.loads(modules.read_text(encoding="utf-8"))[0]["path"]
    return (folder / first).resolve()


def _extra(file: Path, model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of ``extra.safetensors``, where there is one, by the names that they have in ``model``.

    They were written by the names of the model in training, where a PeftModel may stand around a part or the whole.
    """
    if not file.is_file():
        return {}
    live = {_plain(name): name for name in model.state_dict()}
    stored = {name: value for name, value in load_file(file).items() if not name.startswith("loss.")}
    if unknown := [name for name in stored if _plain(name) not in live]:
        raise EvaluationError(f"{file} does not fit the model: unknown {unknown[:3]}")
    return {live[_plain(name)]: value for name, value in stored.items()}


def _plain(name: str) -> str:
    return name.replace("base_model.model.", "")


def _put_whole(model: nn.Module, source: str, like: Candidate) -> None:
    """Copies the base's weights into a model of the shape of ``like``."""
    state, live = _loaded_model(source).state_dict(), model.state_dict()
    if state.keys() != live.keys() or any(state[n].shape != live[n].shape for n in state):
        raise EvaluationError(f"the base {source!r} has another architecture than {like.name}")
    with torch.no_grad():
        for name, value in state.items():
            live[name].copy_(value)


def _put_bare(model: Any, candidate: Candidate) -> None:
    """Copies the weights of a plain Trainer's checkpoint into the backbone, whatever module stood around it there."""
    state: dict[str, Tensor] = {}
    for file in sorted(candidate.path.glob("model*.safetensors")):
        state |= load_file(file)
    backbone = model[0].model
    live = backbone.state_dict()
    wanted = {name for name, _ in backbone.named_parameters()}
    ends = {
        name.removesuffix(first)
        for first in [min(n for n in wanted if "pooler" not in n)]
        for name in state
        if name.endswith(first)
    }
    for prefix in sorted(ends, key=len):
        # Weights that training did not use, such as BERT's pooler, may be missing from either side.
        missing = [name for name in wanted if prefix + name not in state and "pooler" not in name]
        shapes = [n for n in wanted if prefix + n in state and state[prefix + n].shape != live[n].shape]
        if not missing and not shapes:
            with torch.no_grad():
                for name in live.keys() & {n.removeprefix(prefix) for n in state if n.startswith(prefix)}:
                    live[name].copy_(state[prefix + name])
            return
    raise EvaluationError(
        f"{candidate.path} holds no weights for the backbone of the base ({type(backbone).__name__}): it has another "
        "architecture, or an adapter stands inside"
    )


def _key(candidate: Candidate, base: str | None) -> str:
    """Returns what candidates share whose weights can be swapped: the files that shape the model."""
    digest = hashlib.sha256(f"{candidate.kind} {candidate.bare} {base}".encode("utf-8", "surrogateescape"))
    if candidate.kind == "adapter":
        digest.update(settled(candidate.path / ADAPTER_CONFIG))
    if not candidate.bare:
        for path in shaping_files(candidate.path):
            digest.update(str(path.relative_to(candidate.path)).encode("utf-8", "surrogateescape"))
            digest.update(settled(path))
    return digest.hexdigest()
