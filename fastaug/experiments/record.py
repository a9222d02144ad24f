"""Records of finished runs in three small files, which can be committed where run folders cannot.

runs.csv has a row for each run: its sweeps, the settings in which runs of its recipe differ, and
its measures. configs.json has all settings of one run of each recipe. curves.csv has a few points
of each training curve. Like run folders, they may come from a stranger.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fastaug.config import TrainConfig, free_on_resume, setting_owners
from fastaug.errors import ConfigError, DataError
from fastaug.experiments.metrics_file import Metrics, Record, equal_parts
from fastaug.experiments.report_format import number
from fastaug.experiments.run import Measures, Run
from fastaug.experiments.run_files import short_reason
from fastaug.runtime.atomic import atomic_write, write_json
from fastaug.runtime.folder_files import read_file, read_json_object

RUNS, CONFIGS, CURVES = "runs.csv", "configs.json", "curves.csv"
POINTS = 12
"""Points of a training curve."""
_MAX_BYTES = 2**26
_MAX_ROWS = 100_000
_VALIDATION = "validation_"
"""Prefix of the measures on held-out images."""
_SUMMARY = ("step", "total_steps", "parameters")
_TIMING = ("train_seconds", "views_per_s")
_ENVIRONMENT = ("torch", "commit")
_CURVE = ("run", "step", "epoch", "nll", "kl")


def is_record(files: Iterable[str]) -> bool:
    """True for the files of a folder that holds a record."""
    return {RUNS, CONFIGS} <= {*files}


def portable(config: TrainConfig) -> TrainConfig:
    """The config without the paths of a machine: the data and the weights by their names."""
    weights = config.model.weights
    return config.replace(
        data=Path(config.data.data).name,
        weights=Path(weights).name if weights else "",
        out="",
        resume="",
    )


def same_run(config: TrainConfig) -> tuple[Any, ...]:
    """Values that are equal for two runs with the same result: all settings that decide what is
    computed or measured."""
    own = portable(config)
    names = [n for n in setting_owners() if n not in free_on_resume() or n in ("data", "tta")]
    return tuple(own.get(name) for name in names)


# --- writing ---


def write_record(folder: Path, runs: Iterable[Run]) -> int:
    """Write the finished runs among these; returns their number. A run that several sweeps have is
    written once."""
    merged = _merged(run for run in runs if run.state == "finished")
    bases: dict[str, TrainConfig] = {}
    for run in merged.values():
        bases.setdefault(run.config.run.recipe, portable(run.config))
    varied = [
        name
        for name in setting_owners()
        if name != "recipe"
        and any(
            portable(run.config).get(name) != bases[run.config.run.recipe].get(name)
            for run in merged.values()
        )
    ]
    rows = [_row(name, run, varied) for name, run in merged.items()]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIGS, {recipe: base.to_flat() for recipe, base in bases.items()})
    _write_csv(folder / RUNS, list(dict.fromkeys(key for row in rows for key in row)), rows)
    points = [point for name, run in merged.items() for point in _curve(name, run)]
    _write_csv(folder / CURVES, _CURVE, points)
    return len(rows)


def _merged(runs: Iterable[Run]) -> dict[str, Run]:
    """The runs by name, each once, sorted; runs of one name and different settings get a number."""
    found: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = same_run(run.config)
        known = found.get(key, run)
        found[key] = replace(known, sweeps=tuple(sorted({*known.sweeps, *run.sweeps})))
    named: dict[str, Run] = {}
    for run in found.values():
        name, count = run.folder.name, 1
        while name in named:
            count += 1
            name = f"{run.folder.name}-{count}"
        named[name] = run
    return dict(sorted(named.items()))


def _row(name: str, run: Run, varied: Sequence[str]) -> dict[str, str]:
    row = {"run": name, "sweeps": " ".join(run.sweeps), "recipe": run.config.run.recipe}
    own = portable(run.config).to_flat()
    for key in varied:
        value = own[key]
        row[key] = value if isinstance(value, str) else json.dumps(value)
    for prefix, measures in (("", run.measures), (_VALIDATION, run.validation or {})):
        row |= {prefix + key: f"{value:.6g}" for key, value in measures.items()}
    row |= {key: str(run.summary[key]) for key in _SUMMARY if key in run.summary}
    timing, environment = run.summary.get("timing", {}), run.summary.get("environment", {})
    row |= {key: f"{timing[key]:.4g}" for key in _TIMING if key in timing}
    return row | {key: str(environment.get(key, "")) for key in _ENVIRONMENT}


def _curve(name: str, run: Run) -> Iterator[dict[str, str]]:
    """Means of the training loss over equal parts of the run."""
    known = [r for r in run.records if r.get("kind") == "train" and {"nll", "kl", "epoch"} <= {*r}]
    for part in equal_parts(known, POINTS):
        values = {key: f"{fmean(r[key] for r in part):.3g}" for key in ("nll", "kl")}
        last = part[-1]
        yield {
            "run": name,
            "step": f"{last['step']:.0f}",
            "epoch": f"{last['epoch']:g}",
            **values,
        }


def _write_csv(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(file) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


# --- reading ---


def read_record(folder: Path) -> list[Run]:
    """The runs of a record; DataError if a file of it cannot be used."""
    try:
        bases = {
            recipe: TrainConfig.from_saved(saved)
            for recipe, saved in read_json_object(folder / CONFIGS).items()
        }
    except ConfigError as error:
        raise DataError(f"{CONFIGS}: {short_reason(error)}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{CONFIGS}: not readable as JSON ({short_reason(error)})") from error
    curves = _read_curves(folder / CURVES)
    runs = []
    for line, row in enumerate(_read_csv(folder / RUNS), 2):
        try:
            runs.append(_run(folder, row, bases, curves))
        except (ConfigError, ValueError, RecursionError) as error:
            raise DataError(f"{RUNS}, line {line}: {short_reason(error)}") from error
    return runs


def _run(
    folder: Path,
    row: Mapping[str, str],
    bases: Mapping[str, TrainConfig],
    curves: Mapping[str, list[Record]],
) -> Run:
    base = bases.get(row.get("recipe", ""))
    if base is None:
        raise ValueError(f"{CONFIGS} has no recipe {row.get('recipe', '')!r}")
    settings = {name: row[name] for name in setting_owners() if name in row and name != "recipe"}
    config = base.replace(
        **{
            name: text if isinstance(base.get(name), str) else json.loads(text)
            for name, text in settings.items()
        }
    )
    name = row.get("run", "")
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} cannot be the name of a run")
    own = {*settings, *_SUMMARY, *_TIMING, *_ENVIRONMENT, "run", "sweeps", "recipe"}
    measures: dict[str, Measures] = {"": {}, _VALIDATION: {}}
    for key in (key for key in row if key not in own):
        prefix = _VALIDATION if key.startswith(_VALIDATION) else ""
        if row[key]:
            measures[prefix][key.removeprefix(prefix)] = _number(key, row[key])
    for prefix, found in measures.items():
        if "top1" not in found and (found or not prefix):
            raise ValueError(f"no {prefix}top1")
    summary: dict[str, Any] = {"finished": True, "measures": measures[""]}
    summary |= {"validation": measures[_VALIDATION]} if measures[_VALIDATION] else {}
    summary |= {key: int(_number(key, row[key])) for key in _SUMMARY if row.get(key)}
    summary["timing"] = {key: _number(key, row[key]) for key in _TIMING if row.get(key)}
    summary["environment"] = {key: row[key] for key in _ENVIRONMENT if row.get(key)}
    weight = config.loss.kl_weight
    points = [{**p, "loss": p["nll"] + weight * p["kl"]} for p in curves.get(name, [])]
    return Run(
        folder / name,
        config,
        summary,
        "finished",
        tuple(row.get("sweeps", "").split()),
        Metrics(points),
    )


def _read_curves(file: Path) -> dict[str, list[Record]]:
    curves: dict[str, list[Record]] = {}
    for line, row in enumerate(_read_csv(file), 2):
        try:
            numbers = {key: _number(key, row[key]) for key in _CURVE[1:]}
        except (KeyError, ValueError) as error:
            raise DataError(f"{file.name}, line {line}: {short_reason(error)}") from error
        point = {"kind": "train", **numbers, "step": int(numbers["step"])}
        curves.setdefault(row["run"], []).append(point)
    return curves


def _read_csv(file: Path) -> Iterator[dict[str, str]]:
    """The rows of a file; none if there is no such file."""
    try:
        text = read_file(file, _MAX_BYTES).decode("utf-8")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        for number_of_row, row in enumerate(reader):
            if None in row or None in row.values():
                raise DataError(f"{file.name}, line {reader.line_num}: wrong number of columns")
            if number_of_row >= _MAX_ROWS:
                raise DataError(f"{file.name}: more than {_MAX_ROWS:,} rows")
            yield row
    except FileNotFoundError:
        return
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file.name}: {short_reason(error)}") from error


def _number(name: str, text: str) -> float:
    if (value := number(float(text))) is None:
        raise ValueError(f"{name} must be a finite number, got {text}")
    return value
