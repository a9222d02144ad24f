"""Progressive resizing: views grow from --initial-size to --size while a training proceeds.

A step on smaller views takes less time, and early epochs learn as much from them. The last fifth of
the epochs has views of --size: the network ends adapted to the size at which it is evaluated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fastaug.views.config import ViewConfig

LARGE = 128
"""From this --size on, sizes between the first and the last one are multiples of 32, the stride of
most networks; below, of 8."""


def growing_epochs(config: ViewConfig, epochs: int) -> int:
    """Epochs whose views are smaller than --size: the first four fifths, rounded down."""
    return 4 * epochs // 5 if config.initial_size else 0


def size_of_epoch(config: ViewConfig, epoch: int, epochs: int) -> int:
    """Side of the views in an epoch (from 0) of a training of `epochs`, in pixels.

    It grows linearly, and is rounded down to whole multiples.
    """
    growing = growing_epochs(config, epochs)
    if epoch >= growing:
        return config.size
    unit = 32 if config.size >= LARGE else 8
    size = config.initial_size + (config.size - config.initial_size) * epoch // growing
    return max(config.initial_size, size // unit * unit)


def sizes_of_training(config: ViewConfig, epochs: int) -> list[int]:
    """All sizes of the views in a training, in ascending order; the last one is --size."""
    growing = range(growing_epochs(config, epochs))
    return sorted({*(size_of_epoch(config, epoch, epochs) for epoch in growing), config.size})


@lru_cache(maxsize=64)  # the torch loader asks for every batch
def view_of_epoch(config: ViewConfig, epoch: int, epochs: int) -> ViewConfig:
    """The settings of the views in one epoch, with their size in it."""
    return replace(config, size=size_of_epoch(config, epoch, epochs), initial_size=0)
