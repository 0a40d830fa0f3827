"""Score and weights belong together: stores the weights that were scored, and proves it when it puts them back.

Promise: a stored step carries its result and what the model made of some probe texts; weights that give other
embeddings are refused, and what could not be put back shows at step 0, before anything is spent.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullrank._errors import EvaluationError
from fullrank.card import FullCorpusRetrieval, card_section, with_section
from fullrank.encode import Precision
from fullrank.hooks import TrainerLink
from fullrank.isolate import undisturbed
from fullrank.journal import result_name
from fullrank.modelfiles import EXTRA
from fullrank.objective import Objective, pool_name
from fullrank.plan import EvaluationPlan
from fullrank.result import Result
from fullrank.store import BestStore, Stored
from fullrank.weights import check_folder, complete_extra, load_probe, load_weights, save_probe, save_weights

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

PROBE_TOLERANCE, HALF_PROBE_TOLERANCE = 1e-5, 1e-2
"""Largest difference between embeddings of the stored folder and those seen at its step, in fp32 and in half precision:
what another processor's rounding may do. On the same one they are equal."""


class Keeper:
    """Keeps the best steps of a model in training.

    Args:
        store: where.
        model: in training.
        plan: encodes the probe texts, as it encodes the golden set that chooses.
        link: the trainer, which writes the model as it would itself.
        objective: what chooses.
        precision: of encoding.
    """

    def __init__(
        self,
        store: BestStore,
        model: nn.Module,
        plan: EvaluationPlan,
        link: TrainerLink,
        objective: Objective,
        precision: Precision | None,
    ) -> None:
        self.store, self.model, self.plan, self.link = store, model, plan, link
        self.objective, self.precision = objective, precision
        self._frozen = self._frozen_now()

    def keep(
        self, step: int, score: float, results: Mapping[str, Result], *, base: Mapping[str, Result] | None = None
    ) -> bool:
        """Stores the weights if they are among the best; returns whether they are the new best.

        Args:
            step, score: as in `BestStore.offer`.
            results: by golden set; stored with the weights.
            base: of the base model, for the model card.
        """
        if not self.store.wants(step, score):
            return False
        try:
            is_best = self.store.offer(step, score, lambda folder: self._save(folder, step, results, base or {}))
            if step == 0 and self.store.best is not None:
                self.restore(self.store.best)
            return is_best
        except Exception as error:  # a model may raise anything when it is saved, and training must not die of it
            if step == 0:
                raise
            logger.error("the weights of step %d could not be stored (%s); the best so far stays", step, error)
            return False

    def before_update(self) -> None:
        """Completes the stored folders where tensors begin to train: beside adapters only trained ones are there."""
        begun = any(parameter.requires_grad for parameter in self._frozen)
        self._frozen = self._frozen_now()
        if begun:
            try:
                for entry in self.store.stored:
                    complete_extra(self.model, entry.path)
            except Exception as error:  # as in `keep`: training must not die of it
                logger.error("what begins to train could not be added to the stored steps: %s", error)

    def _frozen_now(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if not parameter.requires_grad]

    def restore(self, best: Stored) -> None:
        """Puts stored weights into the model.

        Raises:
            EvaluationError: they are not those that were scored.
        """
        load_weights(self.model, best.path, loss=self.link.loss)
        seen = load_probe(best.path)
        if seen is None:
            logger.warning("%s holds no probe embeddings; its weights cannot be verified", best.path)
            return
        now = self._probe()
        scale = max(1.0, float(seen.norm(dim=1).max()))
        off = float((now - seen).abs().max()) / scale if now.shape == seen.shape else float("inf")
        half = self.precision in ("bf16", "fp16") or any(p.element_size() < 4 for p in self.model.parameters())
        tolerance = HALF_PROBE_TOLERANCE if half else PROBE_TOLERANCE
        if not off <= tolerance:
            raise EvaluationError(
                f"the weights in {best.path} are not those that scored {best.score:.4f} at step {best.step}: probe "
                f"embeddings differ by {off:.2g} (at most {tolerance:g} is rounding). Do not use this folder"
            )
        check_folder(self.model, best.path)

    def describe(self, step: int, results: Mapping[str, Result]) -> None:
        """Gives the results to the model card of a sentence-transformers model, which writes it when it is saved."""
        card = getattr(self.model, "model_card_data", None)
        if not callable(tell := getattr(card, "set_evaluation_metrics", None)):
            return
        set_name, metric = self.objective.leading
        for name, result in results.items():
            values = {pool_name(metric, result.bound): value for metric, value in result.metrics.items()}
            primary = pool_name(str(metric), result.bound) if name == set_name else next(iter(values))
            tell(FullCorpusRetrieval(name, primary), values, step=step)

    def _save(self, folder: Path, step: int, results: Mapping[str, Result], base: Mapping[str, Result]) -> None:
        self.describe(step, results)
        elsewhere = save_weights(self.model, folder, save_model=self.link.save_model, loss=self.link.loss)
        save_probe(self._probe(), folder)
        for name, result in results.items():
            result.save(folder / result_name("result", name))
        self.write_card(folder, step, results, base)
        if elsewhere and step == 0:
            logger.warning(
                "another loader would not make the scored model of the stored folders: %s. Load them with "
                "fullrank.weights.load_weights(model, folder), which reads %s as well",
                "; ".join(elsewhere),
                EXTRA,
            )

    def write_card(
        self, folder: Path, step: int, results: Mapping[str, Result], base: Mapping[str, Result], **options: Any
    ) -> None:
        """Writes our section of the model card beside stored weights; ``options`` of `card_section`."""
        set_name, metric = self.objective.leading
        section = card_section(
            str(metric),
            results[set_name],
            golden=set_name,
            step=step,
            base=base.get(set_name),
            chosen_by=pool_name(self.objective.label, results[set_name].bound),
            **options,
        )
        path = folder / "README.md"
        path.write_text(with_section(path.read_text("utf-8") if path.is_file() else "", section), "utf-8")

    def _probe(self) -> torch.Tensor:
        with undisturbed(self.model):
            return self.plan.probe(precision=self.precision)
