"""Settings of the data: which images, which loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class DataConfig(Settings):
    """Which images are trained on, and what loads them."""

    data: str = setting("shapes", free_on_resume=True)  # may have moved; its fingerprint is checked
    """shapes (built in), a folder of class folders or of shards (WebDataset, TFRecord, RecordIO) in
    train/ and val/ or test/, CIFAR-10 or CIFAR-100 in python format (folder or .tar.gz), or an .npz
    with images and labels."""
    loader: Literal["torch", "dali"] = setting("torch", free_on_resume=True)
    """Decodes the images and makes the views; --dali is short for --loader dali."""
    workers: int = setting(-1, at_least=-1, free_on_resume=True)
    """Loader processes (torch) or threads (dali); -1: one less than the cores, 1 to 8; 0: no
    extra process (torch), one thread (dali)."""
    prefetch: int = setting(2, at_least=1, free_on_resume=True)
    """Batches that the dali loader prepares in advance."""
    decode_memory: int = setting(0, at_least=0, free_on_resume=True)
    """MiB that each DALI decoder reserves at the start, on the host and on the GPU, so that large
    images do not make it grow later; 0: what the first images need."""
    scan: Literal["quick", "full"] = setting("quick", free_on_resume=True)
    """How images are checked before the training. quick: header, size and end; full: decoded."""
    max_bad: float = setting(0.01, at_least=0, at_most=1, free_on_resume=True)
    """Largest share of unreadable images, 0 to 1. They are listed and not used: training takes
    another image in their place, evaluation leaves them out."""
    last_batch: Literal["drop", "fill"] = "drop"
    """Images of an epoch that do not fill a step. drop: left out, others each epoch; fill: the step
    is filled with images from the start of the epoch."""
    train_images: int = setting(0, at_least=0)
    """Training images to use, as many of each class as of the others; 0: all."""
    validation: float = setting(0.0, at_least=0, below=1)
    """Share of the training images, of each class, that is held out and evaluated after each epoch
    in place of the test images; the final evaluation covers both. 0: none."""
