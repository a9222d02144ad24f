"""Evaluation: central crops, test-time augmentation, and the invariance measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.loader import ViewLoader
from fastaug.data.sources import check_classes, open_split
from fastaug.engine.loaders import build_evaluation_loader, scan_configured
from fastaug.kernels.objective import pairwise_kl
from fastaug.runs.weights import model_from_checkpoint
from fastaug.runtime.device import (
    autocast,
    avoid_broken_cpu_arithmetic,
    keep_freed_memory,
    resolve_device,
)
from fastaug.runtime.distributed import Group

BATCH_SIZE = 256
"""Views in one forward pass: without gradients, memory is no concern."""

_CENTRAL = ("top1", "top5", "nll")
_VIEWS = ("tta_top1", "tta_top5", "tta_logits_top1", "tta_logits_top5")


class Evaluation:
    """Measures models on every good image of a set, each on one of the ranks. Its loaders are built
    once and kept."""

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        device: torch.device,
        group: Group | None = None,
        *,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self._images, self._config, self._device = images, config, device
        self._group = group or Group()
        self._batch_size = batch_size
        self._loaders: dict[int, ViewLoader] = {}

    @property
    def image_sets(self) -> list[ImageSet]:
        """The images as the loaders know them: some may have gone bad."""
        return [self._images, *(loader.images for loader in self._loaders.values())]

    def measure(
        self,
        model: nn.Module,
        *,
        views: int,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, float]:
        """Measures of a model, by name, over the images of all ranks.

        top1, top5, nll: of the central crop. With views > 0 also tta_top1, tta_top5 (averaged
        probabilities) and tta_logits_top1, tta_logits_top5 (averaged logits), tta_top1_at_N over
        the first N = 1, 2, 4, ... views, and with views > 1 the invariance: the mean pairwise KL
        between the views of an image, in nats.
        on_batch is told the batches done and in all, as often on every rank; what it raises ends
        the evaluation.
        """
        passes = [0] if views == 0 else [0, views]
        # The ranks' batches may differ by one; their turns may not.
        turns = {number: max(self._group.gather(len(self._loader(number)))) for number in passes}
        measures: dict[str, float] = {}
        done = 0
        was_training = model.training
        model.eval()
        try:
            for number in passes:
                names = _names(number)
                # Sums over images stay on the device until the end: no host sync in the loop.
                sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=self._device)
                predictions = self._predictions(model, self._loader(number))
                for _ in range(turns[number]):
                    if (prediction := next(predictions, None)) is not None:
                        found = _measures(*prediction, number, self._config.loss.kernel)
                        found["count"] = torch.ones_like(prediction[1])
                        sums += torch.stack([found[n].double().sum() for n in (*names, "count")])
                    done += 1
                    on_batch(done, sum(turns.values()))
                *totals, count = self._group.sum_(sums).tolist()
                measures |= {name: total / count for name, total in zip(names, totals, strict=True)}
        finally:
            model.train(was_training)
        return measures

    def _loader(self, views: int) -> ViewLoader:
        if views not in self._loaders:
            self._loaders[views] = build_evaluation_loader(
                self._config,
                self._images,
                views=views,
                batch_size=self._batch_size,
                rank=self._group.rank,
                ranks=self._group.ranks,
            )
        return self._loaders[views]

    @torch.inference_mode()
    def _predictions(self, model: nn.Module, loader: ViewLoader) -> Iterator[tuple[Tensor, Tensor]]:
        """(logits: [B, K, C], labels: [B]) of each batch; the same views every time."""
        loader.set_epoch(0)
        for batch in loader:
            batch = batch.to(self._device)
            with autocast(self._device, self._config.run.precision):
                logits = model(batch.flat)
            yield logits.float().unflatten(0, batch.views.shape[:2]), batch.labels


def _names(views: int) -> tuple[str, ...]:
    """What is measured on so many views; 0 is the central crop."""
    if views == 0:
        return _CENTRAL
    fewer = tuple(f"tta_top1_at_{number}" for number in powers_of_two(views))
    return (*_VIEWS, *fewer) if views == 1 else (*_VIEWS, *fewer, "invariance")


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to and with most, if it is one: the numbers of views that the paper's figure
    of the test-time multiplicity shows."""
    return [1 << power for power in range(most.bit_length())]


def _measures(logits: Tensor, labels: Tensor, views: int, kernel: str) -> dict[str, Tensor]:
    """logits: [B, K, C] -> each measure of _names: [B]."""
    if views == 0:
        nll = nn.functional.cross_entropy(logits[:, 0], labels, reduction="none")
        return {**_hits("", logits[:, 0], labels), "nll": nll}
    probabilities = logits.softmax(-1)
    measures = _hits("tta_", probabilities.mean(1), labels)
    measures |= _hits("tta_logits_", logits.mean(1), labels)
    for number in powers_of_two(views):
        # View k is the same however many there are: the first ones are those of a smaller --tta.
        hits = probabilities[:, :number].mean(1).argmax(1) == labels
        measures[f"tta_top1_at_{number}"] = hits
    if views > 1:
        measures["invariance"] = pairwise_kl(logits, kernel=kernel)
    return measures


def _hits(prefix: str, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Whether the label is the best, or among the best five, of the scores: [B, C]."""
    ranked = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]
    return {f"{prefix}top1": ranked[:, 0], f"{prefix}top5": ranked.any(1)}


def evaluate_checkpoint(
    state: dict[str, Any], config: TrainConfig, group: Group, *, name: str, batch_size: int
) -> tuple[ImageSet, dict[str, float]]:
    """Test images of a config, and the measures of a loaded checkpoint on them.

    name: of the checkpoint, for messages.
    """
    images = group.in_turn(lambda: open_split(config.data.data, "test"))
    check_classes(images, tuple(state["classes"]), name)
    device = resolve_device(config.run.device)
    avoid_broken_cpu_arithmetic(device, config.run.precision)
    keep_freed_memory(device)
    model = model_from_checkpoint(state).to(device)
    scanned = group.in_turn(lambda: scan_configured(config.data, images))
    evaluation = Evaluation(scanned, config, device, group, batch_size=batch_size)
    return scanned, evaluation.measure(model, views=config.eval.tta)
