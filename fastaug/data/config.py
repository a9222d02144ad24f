"""Settings of the data: which images, which loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.settings import Settings, setting
from fastaug.urls import is_url, parse_url


@dataclass(frozen=True)
class DataConfig(Settings):
    """The data and its loader."""

    data: str = setting(
        "shapes", free_on_resume=True, free_on_ranks=True
    )  # may have moved; its fingerprint is checked
    """shapes (built in), or the path of a data set, whose format is recognized: class folders,
    shards, tables, ImageNet or CIFAR as downloaded, and more; docs/guide/data.md has them all. Or
    the URL (s3://, gs://, http(s)://) of shards that fastaug.pack wrote."""
    image_column: str = setting("", free_on_resume=True)  # the fingerprint is checked
    """Column of the images in a CSV, TSV or Parquet file, by its name or its number from 1. Empty:
    recognized."""
    label_column: str = setting("", free_on_resume=True)
    """Column of the labels, by its name or its number from 1. Empty: recognized."""
    cache_size: float = setting(
        100.0, at_least=0, at_most=1e9, free_on_resume=True, free_on_ranks=True
    )
    """GB of local disk for images of a URL, shared by all processes of the machine; 0: no cache. A
    twentieth of the disk stays free in any case."""
    loader: Literal["torch", "dali"] = setting("torch", free_on_resume=True)
    """What decodes the images and makes the views. --dali is short for --loader dali."""
    workers: int = setting(-1, at_least=-1, at_most=1024, free_on_resume=True, free_on_ranks=True)
    """Loader processes (torch) or threads (dali). -1: one fewer than the cores, 1 to 8; 0: no
    extra process (torch), one thread (dali)."""
    prefetch: int = setting(2, at_least=1, at_most=1024, free_on_resume=True, free_on_ranks=True)
    """Batches that the dali loader prepares ahead."""
    decode_memory: int = setting(
        0, at_least=0, at_most=65536, free_on_resume=True, free_on_ranks=True
    )
    """MiB that each DALI decoder reserves at the start, on the host and on the GPU, so that large
    images do not grow it later. 0: as much as the first images need."""
    scan: Literal["quick", "full"] = setting("quick", free_on_resume=True)
    """Check of every image before training. quick: header, size and end of file; full: decode."""
    max_bad: float = setting(0.01, at_least=0, at_most=1, free_on_resume=True)
    """Largest share of unreadable images, 0 to 1; more is an error. They are listed, replaced by
    random others in training, and skipped in evaluation."""
    last_batch: Literal["drop", "fill"] = "drop"
    """Images at the end of an epoch that do not fill an optimizer step. drop: skip them (others
    each epoch); fill: complete the step with images from the start of the epoch."""
    train_images: int = setting(0, at_least=0)
    """Number of training images to use, the same from each class; 0: all."""
    validation: float = setting(0.0, at_least=0, below=1)
    """Share of the training images of each class to hold out, at least 1 image. They are evaluated
    after each epoch instead of the test images; the final evaluation covers both. 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_url(self.data):
            parse_url(self.data)  # before it is stored anywhere: it must not hold credentials
