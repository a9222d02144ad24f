"""Small data sets made long: at the end of an epoch a loader has nothing to do ahead."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet, Manifest, Spans

EPOCH = 256
"""Least batches in an epoch of fastaug's loaders, which stop and start at its end: a small data set
is repeated, as an epoch of a large one is thousands of batches long."""
MOST_MEMORY = 2**28
"""Bytes up to which images in memory are repeated."""


def repeated(images: ImageSet, config: TrainConfig) -> ImageSet:
    """The scanned images one after another as often as EPOCH needs."""
    times = math.ceil(EPOCH * config.images_per_step / len(images))
    if images.array is not None:
        least = math.ceil(config.images_per_step / len(images))
        times = max(least, min(times, MOST_MEMORY // images.array.nbytes))
    if times <= 1:
        return images
    assert images.manifest is not None
    count, found, spans = len(images), images.manifest, images.spans
    places = np.tile(np.arange(count), times)

    def again(of_images: Any) -> dict[int, Any]:
        return {n * count + i: value for n in range(times) for i, value in of_images.items()}

    return replace(
        images,
        labels=images.labels[places],
        files=images.files * times,
        array=None if images.array is None else images.array[places],
        spans=None
        if spans is None
        else Spans(
            spans.shards,
            spans.shard[places],
            spans.offset[places],
            spans.size[places],
            again(spans.continued),
            spans.separator,
        ),
        manifest=Manifest(found.sizes[places], found.plain[places], again(found.bad)),
    )
