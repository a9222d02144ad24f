"""config.json and summary.json of a run folder. They may come from a stranger: any value may have
any kind, and what is returned has the right ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastaug.config import TrainConfig
from fastaug.errors import DataError, FastaugError, describe_error, first_line
from fastaug.experiments.report_format import number
from fastaug.normalization import Normalization
from fastaug.runtime.folder_files import read_json_object

_MOST_CHARACTERS = 4096
"""Characters of a setting: the longest path that Linux opens."""
_NAME_CHARACTERS = 100
"""Characters of the name of a measure, and of a value of the environment."""
_LARGEST_INT = 2**63
_REASON_CHARACTERS = 300
"""Characters of a reason: errors quote values, which may be long."""


def read_run_config(folder: Path) -> TrainConfig:
    """The config of a run folder; DataError if it has none that can be used."""
    saved = _read(folder / "config.json")
    try:
        config = TrainConfig.from_saved(saved)
    except Exception as error:  # written for values of the right kind, others raise almost anything
        raise DataError(short_reason(error)) from error
    components = get_type_hints(TrainConfig).values()
    hints = {name: kind for part in components for name, kind in get_type_hints(part).items()}
    for name, kind in hints.items():
        # Normalization is checked when a config is made.
        if kind != Normalization and not _is_kind(config.get(name), kind):
            words = kind.__name__ if isinstance(kind, type) else "value of the right kind"
            raise DataError(f"config.json: {name} must be a {words}")
    return config


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


def _is_kind(value: Any, kind: Any) -> bool:
    """True if a setting has the kind of its field, and a size that can be shown."""
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and abs(value) < _LARGEST_INT
    if kind is float:
        return number(value) is not None
    if kind is str or get_origin(kind) is Literal:
        return isinstance(value, str) and len(value) <= _MOST_CHARACTERS
    element = get_args(kind)[0]  # of a tuple, whose elements have the same kind
    return isinstance(value, tuple) and all(_is_kind(own, element) for own in value)


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
