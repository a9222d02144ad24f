"""preprocess.json and preprocess.py beside an export: its preprocessing as data and as code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastaug.errors import ExportError
from fastaug.exporters import preprocess
from fastaug.runtime.atomic import atomic_write, write_json
from fastaug.runtime.folder_files import read_file, read_json_object

CODE = Path(preprocess.__file__)
_CODE_BYTES = 2**20
"""Most bytes of a preprocess.py that is compared: fastaug's has 2 KB."""


def check_preprocess_files(folder: Path, about: dict[str, Any]) -> None:
    """Raise ExportError rather than replace a file that belongs to another network or to the user.

    about: the content of preprocess.json.
    """
    description, code = folder / "preprocess.json", folder / CODE.name
    if description.exists() and _description(description) != json.loads(json.dumps(about)):
        raise ExportError(
            f"{description}: describes another network; give --out in another folder, or remove it"
        )
    if code.exists() and _first_line(code) != _first_line(CODE):
        raise ExportError(
            f"{code}: not written by fastaug; give --out in another folder, or rename it"
        )


def write_preprocess_files(folder: Path, about: dict[str, Any]) -> None:
    """Write both files, after check_preprocess_files."""
    try:
        write_json(folder / "preprocess.json", about)
        with atomic_write(folder / CODE.name) as temporary:
            temporary.write_bytes(CODE.read_bytes())
    except OSError as error:
        raise ExportError(
            f"{folder}: preprocess.json and {CODE.name} cannot be written "
            f"({error.strerror or error}); free some space, or fix the permissions"
        ) from error


def _description(file: Path) -> Any:
    try:
        return read_json_object(file)
    except (OSError, ValueError):
        return None


def _first_line(file: Path) -> str | None:
    try:
        return read_file(file, _CODE_BYTES).decode().partition("\n")[0]
    except (OSError, ValueError):
        return None
