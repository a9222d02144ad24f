"""Tables and conclusions from the rows of throughput.csv, and the comparison of two runs.

benchmarks/throughput.py prints the tables; benchmarks/tables.py writes them into the docs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from fastaug.errors import ConfigError
from parts import throughput_rows as rows
from parts.loaders import FUSED
from parts.results import Table, machine_name, number
from parts.stages import LOADER, STAGES, STEP
from parts.throughput_rows import Key

Row = Mapping[str, str]
Found = Mapping[tuple[Key, str], Row]

TARGET = 1.03
"""Limit of EXCESS: a step with the real loader over the sum of its parts."""
COMPARED = {rows.TIME: "lower", rows.VIEWS: "higher", rows.MARGINAL: "lower"}
"""Quantities that --compare judges, and which direction is better."""
TOLERANCE = 0.03
"""Relative changes up to this are ignored, however small the spread of the two runs."""


def index(run: Sequence[Row]) -> dict[tuple[Key, str], Row]:
    """The rows that have numbers, by key and quantity."""
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


def crop_name(first: Row) -> str:
    """How crops are made, by all loaders that have a choice."""
    if first["crop"] == "pad":
        return "crops of the image with reflected edges"
    if first["antialias"] == "True":
        return f"{first['interpolation']} antialiased crops"
    return f"{first['interpolation']} crops without antialiasing"


# --- tables ---


def loaders(policy: str, run: Sequence[Row]) -> Table:
    """Views per second, and images per second in brackets."""
    found, views = index(run), views_of(run)
    lines = []
    for name in dict.fromkeys(row["contender"] for row in run if row["part"] == rows.LOADERS):
        own = Key(rows.LOADERS, name, policy)
        pairs = [
            [found.get((own._replace(K=k), quantity)) for quantity in (rows.VIEWS, rows.IMAGES)]
            for k in views
        ]
        if not any(map(any, pairs)):
            continue
        cells = [
            f"{number(v['median'])} ({number(i['median'])})" if v and i else "-" for v, i in pairs
        ]
        marginal = found.get((own, rows.MARGINAL))
        lines.append([name, *cells, f"{float(marginal['median']):.2f}" if marginal else ""])
    return Table(["views/s (images/s)", *(f"K={k}" for k in views), rows.MARGINAL], lines)


def faster(policy: str, run: Sequence[Row]) -> Table:
    """The fused loader against each of the others."""
    found, views = index(run), views_of(run)
    lines = []
    for name in dict.fromkeys(row["contender"] for row in run if row["quantity"] == rows.FASTER):
        own = Key(rows.LOADERS, name, policy)
        cells = [_ratio(found.get((own._replace(K=k), rows.FASTER))) for k in views]
        if set(cells) != {"-"}:
            lines.append([name, *cells])
    return Table([f"{FUSED} / other", *(f"K={k}" for k in views)], lines)


def _ratio(row: Row | None) -> str:
    return f"{float(row['median']):.2f}" if row else "-"


def in_memory(run: Sequence[Row]) -> Table:
    """Views per second of images that need no decoding, and the fused loader against the others."""
    found, first = index(run), run[0]
    policies = [policy for policy in dict.fromkeys(row["policy"] for row in run) if policy]
    columns = [(policy, k) for policy in policies for k in views_of(run)]
    lines = []
    for name in dict.fromkeys(row["contender"] for row in run if row["part"] == rows.LOADERS):
        cells = []
        for policy, k in columns:
            own = Key(rows.LOADERS, name, policy, k)
            rate, ratio = found.get((own, rows.VIEWS)), found.get((own, rows.FASTER))
            cell = number(rate["median"]) if rate else "-"
            cells.append(f"{cell} ({_ratio(ratio)})" if ratio else cell)
        if set(cells) != {"-"}:
            lines.append([name, *cells])
    head = [f"views/s (fused / other), {first['batch_size']} views a batch"]
    head += [f"{policy_name(first, policy)}, K={k}" for policy, k in columns]
    return Table(head, lines)


def stages(run: Sequence[Row]) -> Table:
    """Milliseconds of each stage, and the results of whole steps."""
    policy = step_policy(run)
    step = Key(rows.STAGES, STEP, policy)
    lines = []
    for stage in STAGES:
        own = Key(rows.STAGES, stage, policy if stage in (LOADER, STEP) else "")
        lines.append([f"{stage}, ms", *_cells(run, own, rows.TIME)])
    lines += [
        ["step, images/s", *_cells(run, step, rows.IMAGES)],
        ["step, views/s", *_cells(run, step, rows.VIEWS)],
        ["wait for data, ms", *_cells(run, step, rows.WAIT)],
        ["host memory of a step, MB", *_cells(run, step, rows.HOST, 1e-6)],
    ]
    if run[0]["gpu"]:
        lines.append(["device memory of a step, MB", *_cells(run, step, rows.DEVICE, 1e-6)])
    excess = "step beyond bare step + loader's CPU time, %"
    lines.append([excess, *_cells(run, step, rows.EXCESS, 100, -100)])
    return Table([f"{run[0]['batch_size']} views", *(f"K={k}" for k in views_of(run))], lines)


def shares(run: Sequence[Row]) -> Table:
    policy = step_policy(run)
    lines = [
        [name, *_cells(run, Key(rows.STAGES, name, policy), rows.SHARE, 100)]
        for name in rows.PARTS_OF_STEP
    ]
    return Table(["% of a step", *(f"K={k}" for k in views_of(run))], lines)


VIEW_COST_LOADERS = (FUSED, "torchvision, one decode", "torchvision, K decodes")


def view_cost(run: Sequence[Row]) -> Table:
    """What an image costs with K views: milliseconds of each loader and of training."""
    found, views, policy = index(run), views_of(run), step_policy(run)
    keys = {f"loader, {name}": Key(rows.LOADERS, name, policy) for name in VIEW_COST_LOADERS}
    keys["training step"] = Key(rows.STAGES, STEP, policy)
    lines = []
    for name, key in keys.items():
        rates = [found.get((key._replace(K=k), rows.IMAGES)) for k in views]
        costs = [number(1000 / float(rate["median"])) if rate else "-" for rate in rates]
        lines.append([f"{name}, ms per image", *costs])
    epochs = epoch_cost(run)
    lines.append(["time of an epoch, relative to K=1", *(f"{epochs[k]:.1f}" for k in views)])
    return Table(["", *(f"K={k}" for k in views)], lines)


def epoch_cost(run: Sequence[Row]) -> dict[int, float]:
    """K -> training time of an epoch (one pass over the images) relative to that of K=1.

    Empty if the run has not measured steps with K=1.
    """
    found, key = index(run), Key(rows.STAGES, STEP, step_policy(run))
    steps = {k: found.get((key._replace(K=k), rows.IMAGES)) for k in views_of(run)}
    rates = {k: float(row["median"]) for k, row in steps.items() if row}
    return {k: rates[1] / rate for k, rate in rates.items()} if 1 in rates else {}


def step_policy(run: Sequence[Row]) -> str:
    return next((row["policy"] for row in run if row["contender"] == STEP), "")


def _cells(
    run: Sequence[Row], key: Key, quantity: str, scale: float = 1.0, shift: float = 0.0
) -> list[str]:
    found = index(run)
    chosen = [
        found.get((key, quantity)) or found.get((key._replace(K=k), quantity))
        for k in views_of(run)
    ]
    return [number(row["median"], scale, shift) if row else "-" for row in chosen]


# --- what a run says at its end ---


def show(run: Sequence[Row]) -> None:
    console, first = Console(highlight=False), run[0]
    console.print(
        f"{machine_name(first)}; torch {first['torch']}, DALI {first['dali'] or 'none'}, "
        f"torchvision {first['torchvision']}, timm {first['timm']}; commit {first['commit']}",
        soft_wrap=True,
    )
    batch = f"{first['size']} px, batches of {first['batch_size']} views"
    ran = [row for row in run if row["status"] == "ok"]
    loader_rows = [row for row in ran if row["part"] == rows.LOADERS]
    for policy in dict.fromkeys(row["policy"] for row in loader_rows):
        title = f"Loaders only, {policy_name(first, policy)}, {crop_name(first)}, {batch}"
        loaders(policy, loader_rows).print(console, f"{title}, {first['workers']} workers")
        if (table := faster(policy, loader_rows)).lines:
            table.print(console, f"Speed of {FUSED} relative to the others")
    stage_rows = [row for row in ran if row["part"] == rows.STAGES]
    if stage_rows:
        model = f"{first['model']}, {first['precision']}, {first['classes']} classes"
        title = f"A training step, {model}, {batch}, {first['loader']} loader"
        stages(stage_rows).print(console, title)
        if any(row["quantity"] == rows.SHARE for row in stage_rows):
            shares(stage_rows).print(console, "Shares of a step")
    for line in (*conclusions(index(run)), *_failures(run)):
        console.print(line, markup=False, soft_wrap=True)


def conclusions(found: Found) -> Iterator[str]:
    for (key, quantity), row in found.items():
        median, low, high = (float(row[column]) for column in ("median", "p20", "p80"))
        if quantity == rows.MARGINAL and key.contender.startswith("fastaug"):
            yield (
                f"{key.contender}, {key.policy}: 1 more view of an image costs {median:.2f} "
                f"decodes ({low:.2f} to {high:.2f})"
            )
        if quantity == rows.EXCESS:
            percent = [f"{100 * (value - 1):+.1f}" for value in (median, low, high)]
            yield (
                f"K={key.K}: a step takes {percent[0]}% more than a bare step and the loader's CPU "
                f"time together ({percent[1]} to {percent[2]}%; target "
                f"{100 * (TARGET - 1):+.0f}%: {'met' if median <= TARGET else 'not met'})"
            )


def _failures(run: Sequence[Row]) -> list[str]:
    """One line per reason, with the K it applies to."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in run:
        if row["status"] != "ok":
            what = ", ".join(filter(None, (row["contender"], row["policy"])))
            reasons.setdefault((what, row["status"]), []).append(row["K"])
    return [
        f"{what}{' K=' + ','.join(ks) if any(ks) else ''}: {status}"
        for (what, status), ks in reasons.items()
    ]


# --- two runs ---


def compare(before: Sequence[Row], after: Sequence[Row]) -> int:
    """Print the ratios; return 1 if something became slower beyond the noise, else 0."""
    console = Console(highlight=False)
    for name, run in (("before", before), ("after", after)):
        line = f"{name}: {run[0]['date']}, commit {run[0]['commit']}, {machine_name(run[0])}"
        console.print(line, soft_wrap=True)
    for column in (*rows.SETTINGS, "cpu", "threads", "gpu", "torch", "dali", "torchvision"):
        if (old := before[0][column]) != (new := after[0][column]):
            note = f"note: {column} was {old or 'none'}, is {new or 'none'}"
            console.print(note, soft_wrap=True, markup=False)
    lines, verdicts = [], []
    now, then = index(after), index(before)
    for (key, quantity), row in now.items():
        if quantity not in COMPARED or (key, quantity) not in then:
            continue
        if key.contender == LOADER or (quantity == rows.TIME and (key, rows.VIEWS) in now):
            continue  # the same measurement is in another row
        verdicts.append(judge(then[key, quantity], row, COMPARED[quantity]))
        values = [float(each["median"]) for each in (then[key, quantity], row)]
        cells = [*(f"{value:,.4g}" for value in values), f"{values[1] / values[0]:.3f}"]
        lines.append([str(key), quantity, *cells, verdicts[-1]])
    if not verdicts:
        raise ConfigError("--compare: the two runs have no measurement in common")
    Table(["", "quantity", "before", "after", "ratio", ""], lines).print(console)
    for line in _gone(before, after):
        console.print(line, markup=False, soft_wrap=True)
    slower, faster_ = (verdicts.count(word) for word in ("SLOWER", "faster"))
    console.print(
        f"of {len(verdicts)}: {slower} slower, {faster_} faster beyond the noise (no overlap "
        f"of the 20th to 80th percentiles, and more than {100 * TOLERANCE:.0f}%)",
        soft_wrap=True,
    )
    return 1 if slower else 0


def judge(before: Row, after: Row, better: str) -> str:
    """ "faster", "SLOWER", or "" where the difference is within the noise."""
    columns = ("median", "p20", "p80")
    old, old_low, old_high = (float(before[column]) for column in columns)
    new, new_low, new_high = (float(after[column]) for column in columns)
    overlap = new_low <= old_high and old_low <= new_high
    if overlap or abs(new / old - 1) <= TOLERANCE:
        return ""
    return "faster" if (new > old) == (better == "higher") else "SLOWER"


def _gone(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """What only one of the runs has measured."""
    ran = [{key_of(row) for row in run if row["status"] == "ok"} for run in (before, after)]
    status: Mapping = {key_of(row): row["status"] for row in after if row["status"] != "ok"}
    for key in sorted(ran[0] - ran[1], key=str):
        yield f"gone: {key}{': ' + status[key] if key in status else ''}"
    for key in sorted(ran[1] - ran[0], key=str):
        yield f"new: {key}"
