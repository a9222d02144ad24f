"""The tables of README.md and docs/performance.md, out of the committed results.

    python benchmarks/tables.py            # writes them anew, from the latest runs
    python benchmarks/tables.py --check    # says which are not what their runs say

A table stands between `<!-- table NAME DATE -->` and `<!-- end -->`, and is not edited by hand.
DATE is the run that it shows: a later one changes no table until it is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import predict
import records
import throughput_rows as table
from stages import FORWARD, LOADER, STAGES, STEP
from throughput_report import Found, Row, index, views_of
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
    measured, predicted = (
        _read(table.NAME, table.COLUMNS),
        _read(predict.NAME, predict.COLUMNS),
    )
    of_gpus = [row for row in predicted if row["device"] != "cpu"]
    of_cpu = [row for row in predicted if row["device"] == "cpu"]

    def made(block: re.Match[str]) -> str:
        name, date = block.groups()
        for tables, rows in ((TABLES, measured), (PREDICTED, of_gpus), (CHECKED, of_cpu)):
            if name in tables:
                run = records.run(rows, "" if latest else date)
                lines = [f"<!-- table {name} {run[0]['date']} -->", *tables[name](run)]
                return "\n".join([*lines, "<!-- end -->"])
        known = ", ".join({**TABLES, **PREDICTED, **CHECKED})
        raise ConfigError(f"no table is called {name!r}; there are {known}")

    return BLOCK.sub(made, text)


def _read(name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    return records.read(ROOT / "benchmarks/results" / f"{name}.csv", columns)


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
        cells = [f"{_number(v)} ({_number(i)})" if v and i else "-" for v, i in rows]
        marginal = found.get((own, table.MARGINAL))
        lines.append([name, *cells, f"{float(marginal['median']):.2f}" if marginal else ""])
    return _markdown(head, lines)


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
    return _markdown([f"{run[0]['batch_size']} views", *(f"K={k}" for k in views)], lines)


def shares(run: Sequence[Row]) -> list[str]:
    found, views = index(run), views_of(run)
    policy = next(row["policy"] for row in run if row["contender"] == STEP)
    lines = [
        [name, *_cells(found, Key(table.STAGES, name, policy), table.SHARE, views, 100)]
        for name in table.PARTS_OF_STEP
    ]
    return _markdown(["% of a step", *(f"K={k}" for k in views)], lines)


def machine(run: Sequence[Row]) -> list[str]:
    """What the tables were measured on."""
    first = run[0]
    return [
        f"Measured on {first['date'][:10]}: {records.machine_of(first)}, "
        f"commit {first['commit']}, Python {first['python']}, torch {first['torch']}, "
        f"DALI {first['dali']}, torchvision {first['torchvision']}, timm {first['timm']}, "
        f"FFCV {first['ffcv'] or 'none'}; "
        f"{first['size']} px, batches of {first['batch_size']} views, {first['workers']} loader "
        f"workers; {first['model']}, {first['classes']} classes, {first['precision']}."
    ]


def of_one_gpu(run: Sequence[Row]) -> list[str]:
    """Predicted views/s of one GPU, the band, and what limits."""
    found = {(row["device"], row["K"]): row for row in run if _is(row, "views/s", "1")}
    views = list(dict.fromkeys(k for _, k in found))
    lines = []
    for gpu in dict.fromkeys(gpu for gpu, _ in found):
        cells = [
            f"{float(row['value']):,.0f} ({float(row['low']):,.0f} to {float(row['high']):,.0f}), "
            + row["limit"]
            for row in (found[gpu, k] for k in views)
        ]
        lines.append([gpu, *cells])
    return _markdown(["PREDICTION: views/s of one GPU", *(f"K={k}" for k in views)], lines)


def of_many_gpus(run: Sequence[Row]) -> list[str]:
    """Predicted images/s of many GPUs together at the smallest and the largest K."""
    views = sorted({int(row["K"]) for row in run})
    counts = sorted({int(row["count"]) for row in run})
    lines = []
    for gpu in dict.fromkeys(row["device"] for row in run):
        for k in (views[0], views[-1]):
            rows = {
                int(row["count"]): row
                for row in run
                if row["device"] == gpu and row["K"] == str(k) and row["quantity"] == "images/s"
            }
            cells = [f"{float(rows[n]['value']):,.0f}, {rows[n]['limit']}" for n in counts]
            lines.append([f"{gpu}, K={k}", *cells])
    return _markdown(["PREDICTION: images/s in all", *(f"{n:,} GPUs" for n in counts)], lines)


def check(run: Sequence[Row]) -> list[str]:
    """The same model with this CPU's numbers, beside what was measured."""
    head = ["CPU, ms", "measured", "predicted from probes", "error"]
    head += ["predicted, calibrated on forward", "error"]
    suffix = ", calibrated on forward"
    found = {(row["quantity"], row["K"]): row for row in run}
    lines = []
    for (quantity, k), row in found.items():
        if (other := found.get((quantity + suffix, k))) is None:
            continue
        name = quantity.removesuffix(" time") + (f", K={k}" if k else "")
        cells = [name, _number({"median": row["measured"]})]
        for each in (row, other):
            cells += [_number({"median": each["value"]}), f"{100 * float(each['error']):+.0f}%"]
        if name == FORWARD:
            cells[-1] = "(input)"
        lines.append(cells)
    return _markdown(head, lines)


def _is(row: Row, quantity: str, count: str) -> bool:
    return row["quantity"] == quantity and row["count"] == count


Tables = Mapping[str, Callable[[Sequence[Row]], list[str]]]
PREDICTED: Tables = {"prediction-one-gpu": of_one_gpu, "prediction-many-gpus": of_many_gpus}
CHECKED: Tables = {"prediction-check": check}
TABLES: Tables = {
    "machine": machine,
    "loaders-crop-flip": lambda run: loaders("crop-flip", run),
    "loaders-randaugment": lambda run: loaders("randaugment", run),
    "stages": stages,
    "shares": shares,
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
    return [_number(row, scale, shift) if row else "-" for row in rows]


def _number(row: Row | None, scale: float = 1.0, shift: float = 0.0) -> str:
    assert row is not None
    value = scale * float(row["median"]) + shift
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 or not value else f"{value:.2f}"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *lines]
    return ["| " + " | ".join(row) + " |" for row in rows]


if __name__ == "__main__":
    sys.exit(cli.run(main))
