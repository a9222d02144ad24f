"""The tables of README.md and docs/performance.md, out of the committed results.

    python benchmarks/tables.py            # writes them anew, from the latest runs
    python benchmarks/tables.py --check    # says which are not what the results say

A table stands between `<!-- table NAME -->` and `<!-- end -->`, and is not edited by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import records
import throughput_rows as table
from stages import ANY_K, DECODE, LOADER, OBJECTIVE, STEP, SYNTHETIC
from throughput_report import Found, Row, index, views_of
from throughput_rows import Key

from fastaug import cli
from fastaug.errors import ConfigError

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/performance.md")
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """Write the tables of README.md and docs/performance.md anew, from the committed results."""

    check: bool = False
    """Change nothing; exit code 1 if a table is not what the results say."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/tables.py")
    stale = []
    for name in FILES:
        file = ROOT / name
        text = file.read_text(encoding="utf-8")
        renewed = renew(text)
        if renewed != text:
            stale.append(name)
            if not options.check:
                file.write_text(renewed, encoding="utf-8")
    verb = "not up to date" if options.check else "written"
    print(f"{verb}: {', '.join(stale)}" if stale else "all tables are up to date")
    return 1 if options.check and stale else 0


def renew(text: str) -> str:
    """The text with each of its tables as the results say."""
    run = _latest()

    def made(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        if name not in TABLES:
            raise ConfigError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        return begin + "\n".join(TABLES[name](run)) + "\n" + end

    return BLOCK.sub(made, text)


def _latest() -> list[dict[str, str]]:
    return records.run(records.read(ROOT / "benchmarks/results/throughput.csv", table.COLUMNS))


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
    policy = run[0] and next(row["policy"] for row in run if row["contender"] == STEP)
    lines = []
    for stage in (DECODE, LOADER, *ANY_K, OBJECTIVE, SYNTHETIC, STEP):
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
        f"DALI {first['dali']}, torchvision {first['torchvision']}, timm {first['timm']}; "
        f"{first['size']} px, batches of {first['batch_size']} views, {first['workers']} loader "
        f"workers; {first['model']}, {first['classes']} classes, {first['precision']}."
    ]


TABLES: Mapping[str, Callable[[Sequence[Row]], list[str]]] = {
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
