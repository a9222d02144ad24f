"""config.json and summary.json of a run folder. They may come from a stranger: any value may have
any kind, and what is returned has the right ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, DataError, FastaugError, describe_error, first_line
from fastaug.experiments.report_format import number
from fastaug.runtime.folder_files import read_json_object

_NAME_CHARACTERS = 100
"""Characters of the name of a measure, and of a value of the environment."""
_LARGEST_INT = 2**63
_REASON_CHARACTERS = 300
"""Characters of a reason: errors quote values, which may be long."""


def read_run_config(folder: Path) -> TrainConfig:
    """The config of a run folder; DataError if it has none that can be used."""
    try:
        return TrainConfig.from_saved(_read(folder / "config.json"))
    except ConfigError as error:
        raise DataError(f"config.json: {short_reason(error)}") from error


def read_summary(folder: Path) -> dict[str, Any]:
    """Known fields of summary.json, all of the right kinds; empty if there is no such file."""
    if not os.path.lexists(folder / "summary.json"):
        return {}
    if not (saved := _read(folder / "summary.json")):
        return {}
    summary: dict[str, Any] = {"finished": saved.get("finished") is True}
    for name in ("step", "total_steps", "skipped_steps", "parameters"):
        if (count := number(saved.get(name))) is not None and 0 <= count < _LARGEST_INT:
            summary[name] = int(count)
    if (best := number(saved.get("best_top1"))) is not None:
        summary["best_top1"] = best
    for name in ("measures", *(["validation"] if "validation" in saved else [])):
        summary[name] = _numbers(saved.get(name))
        if "top1" not in summary[name]:
            raise DataError(f"summary.json has no {name} with a top1")
    for name in ("timing", "environment"):
        summary[name] = _plain_values(saved.get(name))
    return summary


def short_reason(error: Exception) -> str:
    """The first line of an error, cut off if it is long."""
    if isinstance(error, OSError) and error.strerror:
        line = error.strerror
    else:
        line = first_line(error) if isinstance(error, FastaugError) else describe_error(error)
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]}..."


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except FileNotFoundError as error:
        raise DataError(f"it has no {file.name}") from error
    except OSError as error:
        raise DataError(f"{file.name}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{file.name}: not readable as JSON ({short_reason(error)})") from error


def _numbers(value: Any) -> dict[str, float]:
    """The finite numbers of an object."""
    items = value.items() if isinstance(value, dict) else ()
    return {
        name: known
        for name, own in items
        if len(name) <= _NAME_CHARACTERS and (known := number(own)) is not None
    }


def _plain_values(value: Any) -> dict[str, float | str]:
    """The finite numbers and the texts of an object, cut off where they are long."""
    found: dict[str, float | str] = {}
    for name, own in value.items() if isinstance(value, dict) else ():
        if isinstance(own, (str, bool)):
            found[name[:_NAME_CHARACTERS]] = str(own)[:_NAME_CHARACTERS]
        elif number(own) is not None:
            found[name[:_NAME_CHARACTERS]] = own
    return found
