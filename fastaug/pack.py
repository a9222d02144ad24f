"""python -m fastaug.pack SOURCE OUT: any data set as WebDataset shards with an index."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fastaug import cli
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.packing.config import PackConfig
from fastaug.data.packing.out_folder import check_folder
from fastaug.data.packing.packer import BAD_IMAGES, pack
from fastaug.data.packing.verify import verify
from fastaug.data.readers.packed_index import PackedIndex
from fastaug.data.sources import DataSource, align_classes
from fastaug.errors import ConfigError
from fastaug.settings import Settings

log = logging.getLogger("fastaug")


@dataclass(frozen=True)
class PackCommand(Settings):
    """Pack a data set into tar shards that train without a scan, from a disk or an object store."""

    source: Annotated[str, arg(metavar="SOURCE")]
    """What --data of fastaug.train takes."""
    out: Annotated[Positional[str], arg(metavar="OUT")] = ""
    """A new folder for the shards, or one that an interrupted command has left."""
    image_column: str = ""
    """Column of the images in a CSV or Parquet file, by its name or its number from 1. Empty:
    recognized."""
    label_column: str = ""
    """Column of the labels, by its name or its number from 1. Empty: recognized."""
    verify: bool = False
    """Check a packed folder instead: fastaug.pack OUT --verify reads all of it."""
    pack: PackConfig = field(default_factory=PackConfig)
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify == bool(self.out):
            raise ConfigError(
                "--verify takes one folder: fastaug.pack OUT --verify"
                if self.verify
                else "no OUT given: fastaug.pack SOURCE OUT"
            )


def main(args: Sequence[str]) -> int:
    command = cli.parse(PackCommand, args, prog="python -m fastaug.pack")
    if command.verify:
        out = Path(command.source).expanduser()
        indexes = verify(out)
        log.info("%s: every shard is as it was packed", out)
    else:
        out = Path(command.out).expanduser()
        check_folder(command.source, out)
        indexes = pack(open_splits(command), out, command.pack)
    show(out, indexes)
    return 0


def open_splits(command: PackCommand) -> dict[Split, ImageSet]:
    """The splits that the data itself has, with the same classes."""
    config = DataConfig(
        command.source, image_column=command.image_column, label_column=command.label_column
    )
    source = DataSource(config, random_access=False)
    sets: dict[Split, ImageSet] = {"train": source.train}
    if source.has_test:
        train = source.train
        sets["test"] = align_classes(source.test(), train.classes, train.name)
    return sets


def show(out: Path, indexes: dict[Split, PackedIndex]) -> None:
    for split, index in indexes.items():
        size = sum(shard.bytes for shard in index.shards)
        counts = f"{len(index):,} {split} images, shards: {len(index.shards):,}"
        print(f"{out}: {counts}, {size / 1e6:,.1f} MB")
    if (out / BAD_IMAGES).is_file():
        print(f"{out / BAD_IMAGES} lists the bad images that were left out")


if __name__ == "__main__":
    sys.exit(cli.run(main))
