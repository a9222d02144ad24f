"""Predictions for single images: the central crop, and the spread over random views."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastaug.data.image_set import ImageSet
from fastaug.data.readers.folder_index import is_image
from fastaug.engine.loaders import evaluation_view
from fastaug.errors import ConfigError, DataError
from fastaug.exporters.loading import LoadedNetwork
from fastaug.kernels.objective import image_kl
from fastaug.kernels.reference import ReferenceKernel
from fastaug.views.philox import TEST_VIEWS
from fastaug.views.plan import draw_plans
from fastaug.views.preprocessing import Preprocessing
from fastaug.views.reference import denormalize, reference_views


@dataclass(frozen=True)
class Prediction:
    """The network's outputs for one image."""

    image: str
    logits: Tensor
    """[C], of the central crop."""
    view_logits: Tensor
    """[K, C], of K random views; K may be 0."""

    def to_json(self, classes: Sequence[str], top: int) -> dict[str, Any]:
        """The most probable classes, and how the views differ."""
        probabilities = self.logits.softmax(0)
        ranked = probabilities.topk(min(top, len(classes))).indices.tolist()
        by_view = self.view_logits.softmax(1)
        found: dict[str, Any] = {"image": self.image, "top": []}
        for index in ranked:
            entry = {"class": classes[index], "index": index}
            entry["probability"] = float(probabilities[index])
            if views := by_view[:, index].tolist():
                entry["views"] = {"mean": float(np.mean(views)), "std": float(np.std(views))}
                entry["views"] |= {"min": min(views), "max": max(views)}
            found["top"].append(entry)
        if len(by_view):
            agree = int((by_view.argmax(1) == ranked[0]).sum())
            kl = image_kl(ReferenceKernel(), self.view_logits[None]).item()
            found |= {"views": len(by_view), "agree": agree, "invariance": kl}
        return found


@dataclass(frozen=True)
class UnreadableImage:
    """An image without a prediction."""

    image: str
    error: str


def find_images(named: Sequence[str]) -> list[str]:
    """Image files, and the images in folders at any depth, in order of their names."""
    found: list[str] = []
    for name in named:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = [
                os.path.join(folder, file)
                for folder, _, files in os.walk(path)
                for file in files
                if is_image(file)
            ]
            if not inside:
                raise DataError(f"{path}: no images in this folder")
            found += sorted(inside)
        elif path.is_file():
            found.append(str(path))
        else:
            raise DataError(f"{path}: no such image or folder")
    return found


class Predictor:
    """Makes the inputs of a network from images, as an evaluation does, and runs it."""

    def __init__(
        self, network: LoadedNetwork, *, views: int = 0, seed: int = 0, batch_size: int = 256
    ) -> None:
        """views: random views of each image besides the central crop, as in training.
        batch_size: of one forward pass, central crops and views together."""
        view = network.config.view
        if views and network.takes_pixels:
            raise ConfigError(
                f"--views {views}: {network.path} makes its own central crops; use an export "
                "without preprocessing, or the checkpoint"
            )
        if views and view.uses_dali_policy:
            raise ConfigError(
                f"--views {views}: {network.path} was trained with --randaugment-policy dali: only "
                "fastaug.evaluate --dali makes its views; leave out --views"
            )
        self._network, self._views, self._seed = network, views, seed
        self._batch_size = batch_size
        self._preprocessing = Preprocessing.from_config(view)
        self._view = evaluation_view(view, views)

    def predict(self, paths: Sequence[str]) -> Iterator[Prediction | UnreadableImage]:
        """One result for each path, in order. View k of image i is the same in every call with the
        same seed."""
        images = ImageSet.from_files(paths, np.zeros(len(paths), np.int64), self._network.classes)
        count = max(1, self._batch_size // (1 + self._views))
        for first in range(0, len(paths), count):
            yield from self._predict_batch(images, range(first, min(first + count, len(paths))))

    @torch.inference_mode()
    def _predict_batch(
        self, images: ImageSet, indices: range
    ) -> Iterator[Prediction | UnreadableImage]:
        decoded: dict[int, np.ndarray] = {}
        errors: dict[int, str] = {}
        for index in indices:
            try:
                decoded[index] = images.image(index)
            except DataError as error:
                errors[index] = str(error)
        logits = dict(zip(decoded, self._logits(decoded), strict=True))
        for index in indices:
            name = images.where(index)
            if index in errors:
                yield UnreadableImage(name, errors[index])
            else:
                yield Prediction(name, logits[index][0], logits[index][1:])

    def _logits(self, decoded: dict[int, np.ndarray]) -> list[Tensor]:
        """[1 + K, C] for each image: the central crop and the views."""
        if self._network.takes_pixels:  # images of different sizes cannot share a batch
            each = (torch.from_numpy(image.copy())[None] for image in decoded.values())
            return [self._network.logits(image) for image in each]
        if not decoded:
            return []
        inputs = torch.cat([self._inputs(index, image) for index, image in decoded.items()])
        parts = [self._network.logits(part) for part in inputs.split(self._batch_size)]
        return list(torch.cat(parts).unflatten(0, (-1, 1 + self._views)))

    def _inputs(self, index: int, image: np.ndarray) -> Tensor:
        """[1 + K, 3, S, S]."""
        central = self._preprocessing.apply(image)[None]
        if not self._views:
            return central
        size = self._preprocessing.size
        if self._view.crop == "pad" and image.shape[:2] != (size, size):
            image = denormalize(central[0], self._view).permute(1, 2, 0).numpy()
        sizes = np.array([image.shape[:2]])
        plans = draw_plans(self._view, self._seed, 0, TEST_VIEWS, np.array([index]), sizes)
        views = reference_views(image, plans.of_image(0), self._view)
        return torch.cat([central, views.permute(0, 3, 1, 2)])
