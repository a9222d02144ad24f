"""python -m fastaug.scan DATA: the images that cannot be used, before a training meets them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import numpy as np
from tyro.conf import arg

from fastaug import cli
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import ScanResult, check_share, scan_set
from fastaug.data.sources import Split, open_split_or_flat
from fastaug.errors import ConfigError, DataError, printable
from fastaug.runs.console import show_table
from fastaug.runtime.atomic import write_json

log = logging.getLogger("fastaug")

_SHOWN = 20


@dataclass(frozen=True)
class ScanConfig:
    """Look at every image of a data set and list those that cannot be used."""

    data: Annotated[str, arg(metavar="DATA")]
    """What --data of the training takes, or a folder of images without splits."""
    full: bool = False
    """Decode every image; else header and size, and the end of the file."""
    workers: int = -1
    """Threads that look at images; -1: four for each core, up to 32."""
    max_bad: float = 0.01
    """Largest share of bad images in a split that is no error."""
    out: str = ""
    """Write what was found to this JSON file too."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.workers < -1:
            raise ConfigError(f"--workers must be at least -1, got {self.workers}")
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(f"--max-bad must be between 0 and 1, got {self.max_bad}")
        if not self.data:
            raise ConfigError("DATA is empty; give a folder, an archive, an .npz, or shapes")


def main(args: Sequence[str]) -> int:
    # The other commands take --data DATA: by habit, so may this one.
    args = [arg.removeprefix("--data=") for arg in args if arg != "--data"]
    options = cli.parse(ScanConfig, args, prog="python -m fastaug.scan")
    out = cli.output_file("--out", options.out) if options.out else None
    scanned = []
    for images in open_sets(options.data):
        found = scan_set(images, full=options.full, workers=options.workers)
        scanned.append((images, found))
        show(images, found)
    if out is not None:
        result = {"data": options.data, "full": options.full}
        write_json(out, result | {"sets": [describe(*pair) for pair in scanned]})
    for images, found in scanned:
        check_share(images, found, options.max_bad)
    return 0


def open_sets(data: str) -> list[ImageSet]:
    """Both splits, or the one that is there, or the images of a folder without splits."""
    opened = [_open(data, split) for split in get_args(Split)]
    sets = {images.name: images for images in opened if isinstance(images, ImageSet)}
    errors = [error for error in opened if isinstance(error, DataError)]
    if not sets:
        raise errors[0]
    for error in errors:
        log.warning("only %s is looked at: %s", *sets, error)
    return list(sets.values())


def _open(data: str, split: Split) -> ImageSet | DataError:
    try:
        return open_split_or_flat(data, split)
    except DataError as error:
        return error


def show(images: ImageSet, found: ScanResult) -> None:
    facts, bad = describe(images, found), found.manifest.bad
    formats = ", ".join(f"{name} {count:,}" for name, count in facts["formats"].items())
    sizes = [facts[name] for name in ("smallest", "median", "largest")]
    rows = [
        ("images", f"{len(images):,}"),
        ("classes", f"{len(images.classes):,}"),
        ("formats", formats or "-"),
        ("smallest / median / largest", " / ".join(f"{w} x {h}" for w, h in sizes if w) or "-"),
        ("bad", f"{len(bad):,} ({100 * len(bad) / len(images):.3g}%)"),
    ]
    show_table(images.name, rows)
    for place, reason in list(facts["bad"].items())[:_SHOWN]:
        print(printable(f"{place}: {reason}"))
    if len(bad) > _SHOWN:
        rest = f"; all of them: {found.bad_list}" if found.bad_list else "; --out FILE has them all"
        print(printable(f"and {len(bad) - _SHOWN:,} more{rest}"))


def describe(images: ImageSet, found: ScanResult) -> dict[str, Any]:
    """What was found, as plain values; sizes are width and height, by area, of good images."""
    good = np.delete(found.manifest.sizes, list(found.manifest.bad), axis=0)
    order = np.argsort(good.prod(axis=1, dtype=np.int64), kind="stable")
    places = {"smallest": 0, "median": len(order) // 2, "largest": len(order) - 1}
    return {
        "name": printable(images.name),
        "images": len(images),
        "formats": dict(found.formats.most_common()),
        **{
            name: good[order[place]][::-1].tolist() if len(order) else [0, 0]
            for name, place in places.items()
        },
        "bad": {
            printable(images.where(index)): reason for index, reason in found.manifest.bad.items()
        },
    }


if __name__ == "__main__":
    sys.exit(cli.run(main))
