"""Write the tables of README.md and docs/ from the committed results, and copy the plots to docs/.

    python benchmarks/tables.py            # write them, from the last runs
    python benchmarks/tables.py --check    # report tables and plots that differ from their runs

A table is between `<!-- table NAME DATE -->` and `<!-- end -->`, and is not edited by hand. DATE is
its run: a later run changes no table until it is written. The tables of images in memory show runs
of --data cifar-like with --out benchmarks/results/cifar, one for each --batch-size. The plots are
copied because the pages in docs/ can only show files below docs/.

The tables and figures whose names begin with "paper-" are made from the record of the paper's
sweeps, benchmarks/results/paper-small, and have its digest in place of the date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kernels
import predict
from parts import paper_tables, results, throughput_rows, throughput_tables
from parts.paper_record import Record
from PIL import Image

from fastaug import cli
from fastaug.errors import ConfigError

ROOT = Path(__file__).parents[1]
FILES = (
    *("README.md", "docs/performance.md", "docs/guide/kernels.md", "docs/guide/speed.md"),
    *("docs/design/gpu-prediction.md", "docs/paper.md", "docs/design/paper-small.md"),
)
RECORD = ROOT / "benchmarks/results/paper-small"
PLOTS = ("kernels.png", "predict.png", "throughput.png", "view-cost.png")
BLOCK = re.compile(r"<!-- table (\S+)(?: (\S+))? -->\n.*?<!-- end -->", re.DOTALL)

Row = Mapping[str, str]


@dataclass(frozen=True)
class Options:
    """Write the tables of README.md and docs/ from the committed results, and copy the plots."""

    check: bool = False
    """Change nothing; exit code 1 if a table or a plot differs from its run."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/tables.py")
    stale = []
    for name in FILES:
        file = ROOT / name
        text = file.read_text(encoding="utf-8")
        updated = update(text, latest=not options.check)
        if updated != text:
            stale.append(name)
            if not options.check:
                file.write_text(updated, encoding="utf-8")
    for name in PLOTS:
        drawn = (ROOT / "benchmarks/results" / name).read_bytes()
        copy = ROOT / "docs/images" / name
        if not copy.is_file() or copy.read_bytes() != drawn:
            stale.append(f"docs/images/{name}")
            if not options.check:
                copy.write_bytes(drawn)
    stale += paper_figures(write=not options.check)
    verb = "not up to date" if options.check else "written"
    print(f"{verb}: {', '.join(stale)}" if stale else "all tables and plots are up to date")
    return 1 if options.check and stale else 0


def update(text: str, *, latest: bool) -> str:
    """The text with all of its tables replaced: of the last run, or of the run they name."""

    def replacement(block: re.Match[str]) -> str:
        name, date = block.groups()
        if name in paper_tables.TABLES:
            record = Record(RECORD)
            lines = paper_tables.TABLES[name](record)
            return "\n".join([f"<!-- table {name} {record.digest} -->", *lines, "<!-- end -->"])
        if name not in TABLES:
            names = ", ".join((*TABLES, *paper_tables.TABLES))
            raise ConfigError(f"unknown table {name!r}, must be one of {names}")
        source, make = TABLES[name]
        if not (run := results.select_run(source.rows(), "" if latest else date)):
            raise ConfigError(f"{source.file}: has no run for table {name!r}")
        return "\n".join([f"<!-- table {name} {run[0]['date']} -->", *make(run), "<!-- end -->"])

    return BLOCK.sub(replacement, text)


def paper_figures(*, write: bool) -> list[str]:
    """Names of the paper's figures that are not of the record as it is; write: draws them."""
    if not (RECORD / "runs.csv").is_file():
        return []
    record = Record(RECORD)
    stale = []
    for name, drawn in paper_tables.figures(record):
        file = ROOT / "docs/images" / name
        if not file.is_file() or png_description(file) != record.digest:
            stale.append(f"docs/images/{name}")
            if write:
                file.write_bytes(paper_tables.png(drawn, record.digest))
    return stale


def png_description(file: Path) -> str:
    """The digest that a figure carries: pixels differ between versions of matplotlib."""
    with Image.open(file) as image:
        return str(image.info.get("Description", ""))


@dataclass(frozen=True)
class Source:
    """The rows of a file that a table may show."""

    file: str
    columns: Sequence[str]
    has: Callable[[Row], bool]

    def rows(self) -> list[dict[str, str]]:
        path = ROOT / "benchmarks/results" / self.file
        return [row for row in results.read(path, self.columns) if self.has(row)]


def machine(run: Sequence[Row]) -> list[str]:
    first = run[0]
    return [
        f"Measured on {first['date'][:10]}: {results.machine_name(first)}, "
        f"commit {first['commit']}, Python {first['python']}, torch {first['torch']}, "
        f"DALI {first['dali']}, torchvision {first['torchvision']}, timm {first['timm']}, "
        f"FFCV {first['ffcv'] or 'none'}; {first['size']} px, "
        f"{throughput_tables.crop_name(first)}, batches of {first['batch_size']} views, "
        f"{first['workers']} loader workers; {first['model']}, {first['classes']} classes, "
        f"{first['precision']}."
    ]


def markdown(
    make: Callable[..., results.Table], *args: str
) -> Callable[[Sequence[Row]], list[str]]:
    return lambda run: make(*args, run).markdown()


def _throughput(file: str, **wanted: str) -> Source:
    def has(row: Row) -> bool:
        return all(row[column] == value for column, value in wanted.items())

    return Source(file, throughput_rows.COLUMNS, has)


PHOTOS = _throughput(
    "throughput.csv", data="photos", crop="resized", interpolation="bilinear", antialias="True"
)
"""Runs with the default data and crops of benchmarks/throughput.py."""
SMALL = partial(_throughput, "cifar/throughput.csv", data="cifar-like", crop="pad")
GPUS = Source("predict.csv", predict.COLUMNS, lambda row: row["device"] != "cpu")
CPU = Source("predict.csv", predict.COLUMNS, lambda row: row["device"] == "cpu")
LOSSES = Source("kernels.csv", kernels.COLUMNS, lambda row: row["device"] == "cpu")
TABLES: Mapping[str, tuple[Source, Callable[[Sequence[Row]], list[str]]]] = {
    "machine": (PHOTOS, machine),
    "loaders-crop-flip": (PHOTOS, markdown(throughput_tables.loaders, "crop-flip")),
    "loaders-randaugment": (PHOTOS, markdown(throughput_tables.loaders, "randaugment")),
    "faster-crop-flip": (PHOTOS, markdown(throughput_tables.faster, "crop-flip")),
    "faster-randaugment": (PHOTOS, markdown(throughput_tables.faster, "randaugment")),
    "in-memory-64": (SMALL(batch_size="64"), markdown(throughput_tables.in_memory)),
    "in-memory-1024": (SMALL(batch_size="1024"), markdown(throughput_tables.in_memory)),
    "stages": (PHOTOS, markdown(throughput_tables.stages)),
    "view-cost": (PHOTOS, markdown(throughput_tables.view_cost)),
    "shares": (PHOTOS, markdown(throughput_tables.shares)),
    "kernels": (LOSSES, markdown(kernels.docs_table)),
    "prediction-one-gpu": (GPUS, markdown(predict.one_gpu_table)),
    "prediction-many-gpus": (GPUS, markdown(predict.many_gpus_table)),
    "prediction-check": (CPU, markdown(predict.check_table)),
}


if __name__ == "__main__":
    sys.exit(cli.run(main))
