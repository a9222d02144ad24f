"""Evaluation: central crops, test-time augmentation, and the invariance measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.loader import ViewLoader
from fastaug.data.sources import DataSource, align_classes
from fastaug.engine.loaders import build_evaluation_loader, scan_configured
from fastaug.engine.metrics import Predictions, metrics_for
from fastaug.engine.per_class import PerClass, PredictedClasses
from fastaug.engine.preflight import prepare_device
from fastaug.engine.rank_check import check_same
from fastaug.engine.rank_data import agree_on_images
from fastaug.engine.rank_drift import hash_tensors
from fastaug.kernels.registry import resolve_kernel
from fastaug.runs.weights import model_from_checkpoint
from fastaug.runtime.device import autocast
from fastaug.runtime.distributed import Group

BATCH_SIZE = 256
"""Views in one forward pass: without gradients, memory is no concern."""


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
        """The image sets of the loaders, with the bad images known so far."""
        return [self._images, *(loader.images for loader in self._loaders.values())]

    def measure(
        self,
        model: nn.Module,
        *,
        views: int,
        predicted: PredictedClasses | None = None,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, float]:
        """The metrics of a model (engine/metrics.py), by name, over the images of all ranks.

        views: of each image, besides its central crop; 0: the central crop only.
        predicted: also collects the predicted class of every image.
        on_batch is called with the batches done and in all, equally often on every rank; what it
        raises ends the evaluation.
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
                metrics = metrics_for(number)
                # Sums over images stay on the device until the end: no host sync in the loop.
                sums = torch.zeros(len(metrics) + 1, dtype=torch.float64, device=self._device)
                predictions = self._predictions(model, number)
                for _ in range(turns[number]):
                    if (prediction := next(predictions, None)) is not None:
                        values = [metric.compute(prediction) for metric in metrics]
                        values.append(torch.ones_like(prediction.labels))
                        if predicted is not None:
                            predicted.add(prediction, number)
                        sums += torch.stack([value.double().sum() for value in values])
                    done += 1
                    on_batch(done, sum(turns.values()))
                *totals, count = self._group.sum_(sums).tolist()
                for metric, total in zip(metrics, totals, strict=True):
                    measures[metric.name] = total / count
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
    def _predictions(self, model: nn.Module, views: int) -> Iterator[Predictions]:
        """The network's outputs for each batch; the same views every time."""
        loader = self._loader(views)
        loader.set_epoch(0)
        kernel = resolve_kernel(
            self._config.loss.kernel,
            views=max(1, views),
            classes=len(self._images.classes),
            device=self._device,
        )
        for batch in loader:
            with autocast(self._device, self._config.run.precision):
                logits = model(batch.flat)
            logits = logits.float().unflatten(0, batch.views.shape[:2])
            yield Predictions(logits, batch.labels, kernel)


def evaluate_checkpoint(
    state: dict[str, Any], config: TrainConfig, group: Group, *, name: str, batch_size: int
) -> tuple[ImageSet, dict[str, float], PerClass]:
    """Test images of a config, and the measures of a loaded checkpoint on them, also by class.

    name: of the checkpoint, for messages.
    """
    classes = tuple(state["classes"])
    images = group.in_turn(lambda: align_classes(DataSource(config.data).test(), classes, name))
    device = group.in_turn(lambda: prepare_device(replace(config.run, compile="off")))
    group = group.on(device)
    model = model_from_checkpoint(state).to(device)
    weights = hash_tensors(model.state_dict().values(), device).item()
    check_same(group, {name: f"weights {weights:x}"}, "name the same checkpoint")
    scanned = group.in_turn(lambda: scan_configured(config.data, images))
    scanned = agree_on_images(group, config.data, {"test": scanned})["test"]
    evaluation = Evaluation(scanned, config, device, group, batch_size=batch_size)
    predicted = PredictedClasses(classes, config.eval.tta)
    measures = evaluation.measure(model, views=config.eval.tta, predicted=predicted)
    return scanned, measures, predicted.gather(group)
