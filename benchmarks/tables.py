"""The tables of README.md and docs/performance.md, out of the committed results.

    python benchmarks/tables.py            # writes them anew, from the latest runs
    python benchmarks/tables.py --check    # says which are not what their runs say

A table stands between `<!-- table NAME DATE -->` and `<!-- end -->`, and is not edited by hand.
DATE is the run that it shows: a later one changes no table until it is written. Those of images in
memory show runs of --data cifar-like with --out benchmarks/results/cifar, each of its --batch-size.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import predict
import records
import throughput_rows as table
from loader_parts import FUSED
from predict_tables import check, of_many_gpus, of_one_gpu
from stages import LOADER, STAGES, STEP
from table_parts import markdown, number
from throughput_report import Found, Row, crops, index, policy_name, views_of
from throughput_rows import Key

from fastaug import cli
from fastaug.errors import ConfigError

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/performance.md")
BLOCK = re.compile(r"<!-- table (\S+)(?: (\S+))? -->\n.*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """Write the tables of README.md and docs/performance.md anew, from the committed results."""

    check: bool = False
    """Change nothing; exit code 1 if a table is not what its run says."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/tables.py")
    stale = []
    for name in FILES:
        file = ROOT / name
        text = file.read_text(encoding="utf-8")
        renewed = renew(text, latest=not options.check)
        if renewed != text:
            stale.append(name)
            if not options.check:
                file.write_text(renewed, encoding="utf-8")
    verb = "not up to date" if options.check else "written"
    print(f"{verb}: {', '.join(stale)}" if stale else "all tables are up to date")
    return 1 if options.check and stale else 0


def renew(text: str, *, latest: bool) -> str:
    """The text with each of its tables as the results say: those of its own run, or the latest."""

    def made(block: re.Match[str]) -> str:
        name, date = block.groups()
        if name not in TABLES:
            raise ConfigError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        source, make = TABLES[name]
        if not (run := records.run(source.rows(), "" if latest else date)):
            raise ConfigError(f"{source.file}: has no run of table {name!r}")
        lines = [f"<!-- table {name} {run[0]['date']} -->", *make(run), "<!-- end -->"]
        return "\n".join(lines)

    return BLOCK.sub(made, text)


@dataclass(frozen=True)
class Source:
    """The runs that a table may be of."""

    file: str
    columns: Sequence[str]
    has: Callable[[Row], bool]

    def rows(self) -> list[dict[str, str]]:
        path = ROOT / "benchmarks/results" / self.file
        return [row for row in records.read(path, self.columns) if self.has(row)]


def loaders(policy: str, run: Sequence[Row]) -> list[str]:
    """Views per second, and images in brackets."""
    found, views = index(run), views_of(run)
    head = ["views/s (images/s)", *(f"K={k}" for k in views), "one more view / one decode"]
    lines = []
    for name in dict.fromkeys(row["contender"] for row in run if row["part"] == table.LOADERS):
        own = Key(table.LOADERS, name, policy)
        rows = [
            [found.get((own._replace(K=k), quantity)) for quantity in (table.VIEWS, table.IMAGES)]
            for k in views
        ]
        if not any(map(any, rows)):
            continue
        cells = [f"{number(v)} ({number(i)})" if v and i else "-" for v, i in rows]
        marginal = found.get((own, table.MARGINAL))
        lines.append([name, *cells, f"{float(marginal['median']):.2f}" if marginal else ""])
    return markdown(head, lines)


def faster(policy: str, run: Sequence[Row]) -> list[str]:
    """The fused loader against each of the others."""
    found, views = index(run), views_of(run)
    lines = []
    for name in dict.fromkeys(row["contender"] for row in run if row["quantity"] == table.FASTER):
        own = Key(table.LOADERS, name, policy)
        cells = [_ratio(found.get((own._replace(K=k), table.FASTER))) for k in views]
        if set(cells) != {"-"}:
            lines.append([name, *cells])
    return markdown([f"{FUSED} / other", *(f"K={k}" for k in views)], lines)


def _ratio(row: Row | None) -> str:
    return f"{float(row['median']):.2f}" if row else "-"


def in_memory(run: Sequence[Row]) -> list[str]:
    """Views per second of images that are not decoded, and the fused loader against the others."""
    found, views, first = index(run), views_of(run), run[0]
    policies = [p for p in dict.fromkeys(row["policy"] for row in run) if p]
    columns = [(policy, k) for policy in policies for k in views]
    head = [f"views/s (fused / other), {first['batch_size']} views a batch"]
    head += [f"{policy_name(first, policy)}, K={k}" for policy, k in columns]
    lines = []
    for name in dict.fromkeys(row["contender"] for row in run if row["part"] == table.LOADERS):
        cells = []
        for policy, k in columns:
            own = Key(table.LOADERS, name, policy, k)
            rate, ratio = found.get((own, table.VIEWS)), found.get((own, table.FASTER))
            cells.append(number(rate) + (f" ({_ratio(ratio)})" if ratio else "") if rate else "-")
        if set(cells) != {"-"}:
            lines.append([name, *cells])
    return markdown(head, lines)


def stages(run: Sequence[Row]) -> list[str]:
    """Milliseconds of each stage."""
    found, views = index(run), views_of(run)
    policy = next(row["policy"] for row in run if row["contender"] == STEP)
    lines = []
    for stage in STAGES:
        own = Key(table.STAGES, stage, policy if stage in (LOADER, STEP) else "")
        lines.append([f"{stage}, ms", *_cells(found, own, table.TIME, views)])
    step = Key(table.STAGES, STEP, policy)
    lines.append(["step, images/s", *_cells(found, step, table.IMAGES, views)])
    lines.append(["step, views/s", *_cells(found, step, table.VIEWS, views)])
    lines.append(["wait for data, ms", *_cells(found, step, table.WAIT, views)])
    lines.append(["host memory of a step, MB", *_cells(found, step, table.HOST, views, 1e-6)])
    excess = "step beyond bare step + loader's CPU time, %"
    lines.append([excess, *_cells(found, step, table.EXCESS, views, 100, -100)])
    return markdown([f"{run[0]['batch_size']} views", *(f"K={k}" for k in views)], lines)


def shares(run: Sequence[Row]) -> list[str]:
    found, views = index(run), views_of(run)
    policy = next(row["policy"] for row in run if row["contender"] == STEP)
    lines = [
        [name, *_cells(found, Key(table.STAGES, name, policy), table.SHARE, views, 100)]
        for name in table.PARTS_OF_STEP
    ]
    return markdown(["% of a step", *(f"K={k}" for k in views)], lines)


def machine(run: Sequence[Row]) -> list[str]:
    """What the tables were measured on."""
    first = run[0]
    return [
        f"Measured on {first['date'][:10]}: {records.machine_of(first)}, "
        f"commit {first['commit']}, Python {first['python']}, torch {first['torch']}, "
        f"DALI {first['dali']}, torchvision {first['torchvision']}, timm {first['timm']}, "
        f"FFCV {first['ffcv'] or 'none'}; "
        f"{first['size']} px, {crops(first)}, batches of {first['batch_size']} views, "
        f"{first['workers']} loader workers; {first['model']}, {first['classes']} classes, "
        f"{first['precision']}."
    ]


def _of_photos(row: Row) -> bool:
    """As benchmarks/throughput.py runs by default, whatever else was measured beside it."""
    of = ("data", "crop", "interpolation", "antialias")
    return tuple(row[name] for name in of) == ("photos", "resized", "bilinear", "True")


def _of_cifar(batch_size: str) -> Source:
    def has(row: Row) -> bool:
        return (row["data"], row["crop"], row["batch_size"]) == ("cifar-like", "pad", batch_size)

    return Source(f"cifar/{table.NAME}.csv", table.COLUMNS, has)


PHOTOS = Source(f"{table.NAME}.csv", table.COLUMNS, _of_photos)
GPUS = Source(f"{predict.NAME}.csv", predict.COLUMNS, lambda row: row["device"] != "cpu")
CPU = Source(f"{predict.NAME}.csv", predict.COLUMNS, lambda row: row["device"] == "cpu")
TABLES: Mapping[str, tuple[Source, Callable[[Sequence[Row]], list[str]]]] = {
    "machine": (PHOTOS, machine),
    "loaders-crop-flip": (PHOTOS, partial(loaders, "crop-flip")),
    "loaders-randaugment": (PHOTOS, partial(loaders, "randaugment")),
    "faster-crop-flip": (PHOTOS, partial(faster, "crop-flip")),
    "faster-randaugment": (PHOTOS, partial(faster, "randaugment")),
    "in-memory-64": (_of_cifar("64"), in_memory),
    "in-memory-1024": (_of_cifar("1024"), in_memory),
    "stages": (PHOTOS, stages),
    "shares": (PHOTOS, shares),
    "prediction-one-gpu": (GPUS, of_one_gpu),
    "prediction-many-gpus": (GPUS, of_many_gpus),
    "prediction-check": (CPU, check),
}


def _cells(
    found: Found,
    key: Key,
    quantity: str,
    views: Sequence[int],
    scale: float = 1.0,
    shift: float = 0.0,
) -> list[str]:
    rows = [found.get((key, quantity)) or found.get((key._replace(K=k), quantity)) for k in views]
    return [number(row, scale, shift) if row else "-" for row in rows]


if __name__ == "__main__":
    sys.exit(cli.run(main))
