"""Evaluation: central crops, test-time augmentation, and the invariance measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.data.images import ImageSet
from fastaug.device import autocast
from fastaug.loaders import Loader, build_evaluation_loader
from fastaug.objectives import pairwise_kl

BATCH_SIZE = 256
"""Views in one forward pass: without gradients, memory is no concern."""


class Evaluation:
    """Measures models on every good image of a set. Its loaders are built once and kept."""

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        device: torch.device,
        *,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self._images, self._config, self._device = images, config, device
        self._batch_size = batch_size
        self._loaders: dict[int, Loader] = {}

    def measure(
        self,
        model: nn.Module,
        *,
        views: int,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, float]:
        """Measures of a model, by name.

        top1, top5, nll: of the central crop. With views > 0 also tta_top1, tta_top5 (averaged
        probabilities) and tta_logits_top1, tta_logits_top5 (averaged logits), and with views > 1
        the invariance: the mean pairwise KL between the views of an image, in nats.
        on_batch is told the batches done and in all; what it raises ends the evaluation.
        """
        passes = [0] if views == 0 else [0, views]
        total = sum(len(self._loader(number)) for number in passes)
        sums: dict[str, Tensor] = {}

        def add(measures: dict[str, Tensor]) -> None:
            """Sums over images stay on the device until the end: no host sync in the loop."""
            for name, values in measures.items():
                sums[name] = sums.get(name, 0) + values.double().sum()

        was_training = model.training
        model.eval()
        try:
            done = 0
            for number in passes:
                for logits, labels in self._predictions(model, self._loader(number)):
                    add(
                        _view_measures(logits, labels, self._config.kernel)
                        if number
                        else _central_measures(logits[:, 0], labels)
                    )
                    done += 1
                    on_batch(done, total)
        finally:
            model.train(was_training)
        count = len(self._images) - len(self._images.bad)
        return {name: (value / count).item() for name, value in sums.items()}

    def _loader(self, views: int) -> Loader:
        if views not in self._loaders:
            self._loaders[views] = build_evaluation_loader(
                self._config, self._images, views=views, batch_size=self._batch_size
            )
        return self._loaders[views]

    @torch.inference_mode()
    def _predictions(self, model: nn.Module, loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
        """(logits: [B, K, C], labels: [B]) of each batch; the same views every time."""
        loader.set_epoch(0)
        for batch in loader:
            batch = batch.to(self._device)
            with autocast(self._device, self._config.precision):
                logits = model(batch.flat)
            yield logits.float().unflatten(0, batch.views.shape[:2]), batch.labels


def _central_measures(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """logits: [B, C] -> each measure: [B]."""
    nll = nn.functional.cross_entropy(logits, labels, reduction="none")
    return {**_hits("", logits, labels), "nll": nll}


def _view_measures(logits: Tensor, labels: Tensor, kernel: str) -> dict[str, Tensor]:
    """logits: [B, K, C] -> each measure: [B]."""
    measures = _hits("tta_", logits.softmax(-1).mean(1), labels)
    measures |= _hits("tta_logits_", logits.mean(1), labels)
    if logits.shape[1] > 1:
        measures["invariance"] = pairwise_kl(logits, kernel=kernel)
    return measures


def _hits(prefix: str, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Whether the label is the best, or among the best five, of the scores: [B, C]."""
    ranked = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]
    return {f"{prefix}top1": ranked[:, 0], f"{prefix}top5": ranked.any(1)}
