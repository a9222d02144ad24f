"""python -m fastaug.scan DATA: find images that cannot be used, before training does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from fastaug import cli
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import check_max_bad, scan_set
from fastaug.data.sources import DataSource, open_flat
from fastaug.diagnostics.scan_report import describe_scan, show_scan
from fastaug.errors import ConfigError, DataError
from fastaug.runtime.atomic import write_json
from fastaug.settings import Settings, setting

log = logging.getLogger("fastaug")


@dataclass(frozen=True)
class ScanConfig(Settings):
    """Scan every image of a data set and list those that cannot be used."""

    data: Annotated[str, arg(metavar="DATA")]
    """What --data of fastaug.train takes, or a folder of images without splits."""
    image_column: str = ""
    """Column of the images in a CSV or Parquet file, by its name or its number from 1. Empty:
    recognized."""
    label_column: str = ""
    """Column of the labels, by its name or its number from 1. Empty: recognized."""
    full: bool = False
    """Decode every image; by default only header, size and end of file are checked."""
    workers: int = setting(-1, at_least=-1)
    """Threads; -1: four per core, up to 32."""
    max_bad: float = setting(0.01, at_least=0, at_most=1)
    """Largest share of bad images in a split, 0 to 1; more is an error."""
    out: str = ""
    """Also write the results to this JSON file."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ConfigError("DATA is empty; give a folder, an archive, an .npz, or shapes")


def main(args: Sequence[str]) -> int:
    # Accept --data DATA as well, which the other commands take.
    args = [arg.removeprefix("--data=") for arg in args if arg != "--data"]
    options = cli.parse(ScanConfig, args, prog="python -m fastaug.scan")
    out = cli.output_file("--out", options.out) if options.out else None
    scanned = []
    for images in open_sets(options):
        found = scan_set(images, full=options.full, workers=options.workers, look_at_all=True)
        scanned.append((images, found))
        show_scan(images, found)
    if out is not None:
        result = {"data": options.data, "full": options.full}
        write_json(out, result | {"sets": [describe_scan(*pair) for pair in scanned]})
    for images, found in scanned:
        listed = f"{found.bad_list} lists them" if found.bad_list else "--out FILE lists them"
        check_max_bad(images, found.manifest, options.max_bad, listed)
    return 0


def open_sets(options: ScanConfig) -> list[ImageSet]:
    """Both splits, or the only one, or the images of a folder without classes."""
    config = DataConfig(
        options.data, image_column=options.image_column, label_column=options.label_column
    )
    if flat := open_flat(config):
        return [flat]
    source = DataSource(config)
    if not source.has_test:
        return [source.train]
    try:
        return [source.train, source.test()]
    except DataError as error:
        test = source.test()
        log.warning("scanned only %s: %s", test.name, error)
        return [test]


if __name__ == "__main__":
    sys.exit(cli.run(main))
