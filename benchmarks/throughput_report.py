"""What benchmarks/throughput.py says of a run: tables of the loaders and stages, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import throughput_rows as table
from records import machine_of
from rich.console import Console
from rich.table import Table
from stages import LOADER, OBJECTIVE, STAGES, STEP
from throughput_rows import Key

Row = Mapping[str, str]
Found = Mapping[tuple[Key, str], Row]

TARGET = 1.03
"""A step with the real loader against what its parts take alone (EXCESS)."""


def show(run: Sequence[Row]) -> None:
    console = Console(highlight=False)
    first, found = run[0], index(run)
    console.print(
        f"{machine_of(first)}; torch {first['torch']}, DALI {first['dali'] or 'none'}, torchvision "
        f"{first['torchvision']}, timm {first['timm']}; commit {first['commit']}",
        soft_wrap=True,
    )
    views = views_of(run)
    for policy in dict.fromkeys(key.policy for key, _ in found if key.part == table.LOADERS):
        console.print(_loaders(first, found, views, policy))
    if any(key.part == table.STAGES for key, _ in found):
        console.print(_stages(first, found, views))
    for line in (*verdicts(found), *_failures(run)):
        console.print(line, markup=False, soft_wrap=True)


def index(run: Sequence[Row]) -> dict[tuple[Key, str], Row]:
    """The rows that hold numbers, by what they are of."""
    return {(key_of(row), row["quantity"]): row for row in run if row["status"] == "ok"}


def key_of(row: Row) -> Key:
    return Key(row["part"], row["contender"], row["policy"], int(row["K"]) if row["K"] else "")


def views_of(run: Sequence[Row]) -> list[int]:
    return sorted({int(row["K"]) for row in run if row["K"]})


def policy_name(first: Row, policy: str) -> str:
    if policy != "randaugment":
        return "crop and flip"
    layers, magnitude = first["randaugment_layers"], float(first["randaugment_magnitude"])
    return f"crop, flip and RandAugment (N={layers}, M={magnitude:g})"


def crops(first: Row) -> str:
    """How all loaders make a crop, but for those that have one way alone."""
    if first["crop"] == "pad":
        return "crops of the image with reflected edges"
    if first["antialias"] == "True":
        return f"{first['interpolation']} antialiased crops"
    return f"{first['interpolation']} crops without antialiasing"


def _loaders(first: Row, found: Found, views: Sequence[int], policy: str) -> Table:
    """Views/s, images/s, and how much slower the others are."""
    shown = Table(
        title=f"\nLoaders alone, {policy_name(first, policy)}\n{first['size']} px, {crops(first)}, "
        f"batches of {first['batch_size']} views, {first['workers']} workers",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    shown.add_column("", no_wrap=True)
    for head in (*(f"K={k}" for k in views), "1 more view", "memory"):
        shown.add_column(head, justify="right", no_wrap=True)
    loaders = _distinct(key for key, _ in found if key.part == table.LOADERS)
    for quantity in (table.VIEWS, table.IMAGES, table.FASTER):
        if not any(q == quantity and key.policy == policy for key, q in found):
            continue
        shown.add_row(f"[bold]{quantity}[/]")
        for loader in loaders:
            keys = [loader._replace(K=k) for k in views]
            if loader.policy != policy or not any((key, quantity) in found for key in keys):
                continue
            extra = []
            if quantity == table.VIEWS:
                marginal = found.get((loader, table.MARGINAL))
                sizes = [float(row["median"]) for k in keys if (row := found.get((k, table.HOST)))]
                extra.append(f"{float(marginal['median']):.2f} dec." if marginal else "")
                extra.append(f"{max(sizes) / 1e6:,.0f} MB" if sizes else "")
            shown.add_row(loader.contender, *(_number(found, k, quantity) for k in keys), *extra)
    return shown


def _stages(first: Row, found: Found, views: Sequence[int]) -> Table:
    shown = Table(
        title=f"\nA step of {first['batch_size']} views, {first['model']}\n{first['precision']}, "
        f"{first['size']} px, {first['classes']} classes, {first['loader']} loader",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    shown.add_column("", no_wrap=True)
    for k in views:
        shown.add_column(f"K={k}", justify="right", no_wrap=True)
    policy = next((key.policy for key, _ in found if key.contender == STEP), "")

    def line(name: str, key: Key, quantity: str, digits: int = 0, scale: float = 1) -> None:
        rows = [
            found.get((key, quantity)) or found.get((key._replace(K=k), quantity)) for k in views
        ]
        if any(rows):
            texts = [f"{scale * float(row['median']):,.{digits}f}" if row else "-" for row in rows]
            shown.add_row(name, *texts)

    for stage in STAGES:
        own = policy if stage in (LOADER, STEP) else ""
        digits = 2 if stage == OBJECTIVE else 0
        line(f"{stage}, ms", Key(table.STAGES, stage, own), table.TIME, digits)
        if stage == LOADER:
            line("loader, ms of CPU", Key(table.STAGES, stage, own), table.CPU)
    step = Key(table.STAGES, STEP, policy)
    for name in table.PARTS_OF_STEP:
        line(f"  {name}, % of step", step._replace(contender=name), table.SHARE, 1, 100)
    line("step, images/s", step, table.IMAGES, 1)
    line("step, views/s", step, table.VIEWS, 1)
    line("host memory of a step, MB", step, table.HOST, 0, 1e-6)
    if first["gpu"]:
        line("device memory of a step, MB", step, table.DEVICE, 0, 1e-6)
    return shown


def verdicts(found: Found) -> Iterator[str]:
    """What the numbers say, in sentences."""
    for (key, quantity), row in found.items():
        if quantity == table.MARGINAL and key.contender.startswith("fastaug"):
            median, low, high = (float(row[column]) for column in ("median", "p20", "p80"))
            yield (
                f"{key.contender}, {key.policy}: 1 more view of an image costs {median:.2f} "
                f"decodes ({low:.2f} to {high:.2f})"
            )
    for (key, quantity), row in found.items():
        if quantity == table.EXCESS:
            excess = float(row["median"])
            met = "met" if excess <= TARGET else "not met"
            yield (
                f"K={key.K}: a step takes {100 * (excess - 1):+.1f}% more than a bare step and the "
                f"loader's CPU time together ({100 * (float(row['p20']) - 1):+.1f} to "
                f"{100 * (float(row['p80']) - 1):+.1f}%; target {100 * (TARGET - 1):+.0f}%: {met})"
            )


def _failures(run: Sequence[Row]) -> list[str]:
    """Once for each reason, with the K that it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in run:
        if row["status"] != "ok":
            what = ", ".join(filter(None, (row["contender"], row["policy"])))
            reasons.setdefault((what, row["status"]), []).append(row["K"])
    return [
        f"{what}{' K=' + ','.join(ks) if any(ks) else ''}: {status}"
        for (what, status), ks in reasons.items()
    ]


def _distinct(keys: Iterator[Key]) -> list[Key]:
    return list(dict.fromkeys(key._replace(K="") for key in keys))


def _number(found: Found, key: Key, quantity: str) -> str:
    if (key, quantity) not in found:
        return "-"
    value = float(found[key, quantity]["median"])
    if quantity == table.FASTER:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
