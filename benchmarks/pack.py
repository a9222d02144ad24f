"""What fastaug.pack buys: decode and loader images/s before and after --max-side.

    python benchmarks/pack.py [--photos FOLDER] [--max-side 256] [--views 1 8]

Two sets: the photographs as they are (about 500 x 375), and pictures of 12 megapixels. Each of
those is a mosaic of 4 x 4 photographs, each enlarged to 1000 x 750, at quality 95: about as many
bytes per pixel as a camera writes. Before and after take turns in rounds; the ratio is the median
over the rounds. Files are in the page cache.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from parts import command, timing
from parts.loaders import FUSED, LOADERS, decode_only
from parts.timing import Stream, Turn
from PIL import Image
from rich.console import Console
from rich.table import Table

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.packing.config import PackConfig
from fastaug.data.packing.packer import pack
from fastaug.data.scan import scan_and_check
from fastaug.data.sources import DataSource
from fastaug.diagnostics.photos import photo_folder
from fastaug.errors import ConfigError
from fastaug.runtime.cores import core_count

MOSAIC, TILE = 4, (1000, 750)
"""Photographs per side of a 12-megapixel picture, and the size of each in it."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """Speed of decoding and of the loader before and after fastaug.pack --max-side."""

    photos: str = ""
    """Folder with JPEGs, at any depth. Default: 256 generated ones of about 500 x 375."""
    large: int = 24
    """Number of 12-megapixel pictures to make of them."""
    max_side: int = 256
    """Shorter side after packing."""
    quality: int = 90
    """JPEG quality after packing."""
    views: tuple[int, ...] = (1, 8)
    """Numbers of views K of the loader."""
    size: int = 224
    """Side of a view in pixels."""
    batch_size: int = 32
    """Views in a batch."""
    repeats: int = 5
    """Rounds."""
    turn_seconds: float = 1.0
    """Approximate duration of a turn."""
    quick: bool = False
    """Few rounds and pictures."""
    debug: bool = False
    """Show the traceback of an error."""


QUICK = Options(large=4, views=(8,), size=64, repeats=2, turn_seconds=0.2)


def main(args: Sequence[str]) -> int:
    options = command.parse(QUICK, args, "pack.py")
    folder = Path(options.photos).expanduser() if options.photos else photo_folder() / "train"
    photos = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if len(photos) < 2:
        raise ConfigError(f"--photos {folder}: need at least 2 JPEGs, found {len(photos)}")
    with tempfile.TemporaryDirectory(prefix="fastaug-pack-") as work:
        for name, make in {"photos": copy_photos, "12 megapixels": make_large}.items():
            source = Path(work) / name / "source"
            make(photos, source, options)
            measure(name, source, options)
            shutil.rmtree(source.parent)
    return 0


def copy_photos(photos: list[Path], source: Path, _options: Options) -> None:
    for i, photo in enumerate(photos):
        shutil.copy(photo, _file(source, i))


def make_large(photos: list[Path], source: Path, options: Options) -> None:
    rng = np.random.default_rng(0)
    for i in range(options.large):
        picture = Image.new("RGB", (MOSAIC * TILE[0], MOSAIC * TILE[1]))
        for place in range(MOSAIC**2):
            with Image.open(photos[rng.integers(len(photos))]) as photo:
                tile = photo.convert("RGB").resize(TILE, Image.Resampling.BICUBIC)
            row, column = divmod(place, MOSAIC)
            picture.paste(tile, (column * TILE[0], row * TILE[1]))
        picture.save(_file(source, i), quality=95)


def _file(source: Path, number: int) -> Path:
    """A place in one of two class folders."""
    file = source / "train" / "ab"[number % 2] / f"{number:05}.jpg"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def measure(name: str, source: Path, options: Options) -> None:
    """Pack a set, compare the speeds, and print a table."""
    before = _opened(source)
    out = source.with_name("packed")
    started = time.perf_counter()
    pack({"train": before}, out, PackConfig(max_side=options.max_side, quality=options.quality))
    taken = time.perf_counter() - started
    sets = {"before": before, "after": _opened(out)}
    height, width = np.median(_sizes(before), axis=0).astype(int)
    title = f"{name}: {len(before)} of about {width} x {height}, packed in {taken:.1f} s"
    table = Table("", "before", "after", "ratio", title=title)
    kilobytes = [_kilobytes(images) for images in sets.values()]
    table.add_row("KB per image", *_cells(kilobytes, kilobytes[1] / kilobytes[0]))
    streams: dict[tuple[str, str], Stream] = {}
    images_per_batch: dict[str, int] = {}
    for when, images in sets.items():
        config = _config(options, min(options.views))
        images_per_batch["decode"] = config.images_per_step
        streams["decode", when] = decode_only(images, config, CPU, "dali")
        for views in options.views:
            what, config = f"loader, K={views}", _config(options, views)
            images_per_batch[what] = config.images_per_step
            streams[what, when] = LOADERS[FUSED](images, config, CPU)
    for what, (speeds, ratio) in _compare(streams, images_per_batch, options).items():
        table.add_row(f"{what}, images/s", *_cells(speeds, ratio))
    Console().print(table)


def _compare(
    streams: dict[tuple[str, str], Stream], images_per_batch: dict[str, int], options: Options
) -> dict[str, tuple[list[float], float]]:
    """What -> images/s before and after, and their ratio."""
    measures: dict[tuple[str, str], Callable[[], Turn]] = {}
    for key, stream in streams.items():
        count, _ = timing.first_turn(stream, CPU, options.turn_seconds)
        measures[key] = partial(timing.turn, stream, count, CPU, options.turn_seconds)
    samples: dict[tuple[str, str], list[Turn]] = {}
    failed = timing.interleave(measures, samples, rounds=options.repeats)
    for error in failed.values():
        raise error
    found = {}
    for what, images in images_per_batch.items():
        seconds = [[turn.seconds for turn in samples[what, when]] for when in ("before", "after")]
        speeds = [images / statistics.median(taken) for taken in seconds]
        found[what] = speeds, timing.median_ratio(*seconds)
    return found


def _opened(source: Path) -> ImageSet:
    return scan_and_check(DataSource(DataConfig(data=str(source))).train)


def _sizes(images: ImageSet) -> np.ndarray:
    assert images.manifest is not None
    return images.manifest.sizes


def _kilobytes(images: ImageSet) -> float:
    assert images.storage is not None
    sizes = [images.storage.ends(index, 1)[2] for index in range(len(images))]
    return statistics.mean(sizes) / 1e3


def _config(options: Options, views: int) -> TrainConfig:
    return TrainConfig.from_flat(
        data="photos",
        loader="dali",
        size=options.size,
        views=views,
        batch_size=options.batch_size,
        workers=core_count(),
        device="cpu",
        interpolation="bilinear",
    )


def _cells(values: Sequence[float], ratio: float) -> list[str]:
    return [*(f"{value:,.4g}" for value in values), f"{ratio:.3g}"]


if __name__ == "__main__":
    sys.exit(cli.run(main))
