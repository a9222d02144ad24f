"""What torch.save writes, checked before torch.load reads it: files may come from strangers.

torch.load(weights_only=True) runs no code, but it admits, e.g., a bytearray of any size, and it
inflates compressed entries.
"""

from __future__ import annotations

import argparse
import io
import pickletools
import zipfile
from collections.abc import Collection
from typing import IO, Any

import torch

TENSOR_NAMES = frozenset(
    (
        *("collections OrderedDict", "torch._utils _rebuild_tensor_v2"),
        *("torch._utils _rebuild_parameter",),
    )
)
"""What a pickle of tensors imports, as "module name", besides the storages."""
_FOREIGN_NAMES = TENSOR_NAMES | {
    *("torch Size", "torch device", "torch._utils _rebuild_parameter_with_state"),
    *("collections Counter", "builtins set", "__builtin__ set"),
    "argparse Namespace",  # timm's training script saves its arguments
    *(f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class BadArchiveError(Exception):
    """An archive is damaged, or has something else than tensors. The message is the reason."""


def check_archive(content: bytes, names: Collection[str] = TENSOR_NAMES) -> None:
    """Refuse an archive that could inflate, or whose pickle imports other names than these."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            # torch stores entries uncompressed; others could inflate to any size, or repeat one.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise BadArchiveError("compressed entries")
            if sum(entry.file_size for entry in entries) > len(content):
                raise BadArchiveError("entries larger than the file")
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            imported = _imported_names(io.BytesIO(archive.read(name)))
    except BadArchiveError:
        raise
    except Exception as error:  # not a zip archive, or not a pickle
        raise BadArchiveError("not readable") from error
    _check_names(imported, names)


def load_foreign(content: bytes) -> Any:
    """What another program has saved with torch.save, in the present or the former format."""
    try:
        is_archive = zipfile.is_zipfile(io.BytesIO(content))
    except zipfile.BadZipFile as error:  # one in several parts
        raise BadArchiveError("not readable") from error
    if is_archive:
        check_archive(content, _FOREIGN_NAMES)
    else:
        _check_former_format(content)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises almost anything in torch's unpickler
        raise BadArchiveError("not readable") from error


def _check_former_format(content: bytes) -> None:
    """Before torch 1.6: pickles of a magic number, a version, the machine, the object, and the
    names of its storages, whose bytes follow."""
    file = io.BytesIO(content)
    try:
        imported = [name for _ in range(5) for name in _imported_names(file)]
    except Exception as error:
        raise BadArchiveError("not readable") from error
    _check_names(imported, _FOREIGN_NAMES)


def _imported_names(file: IO[bytes]) -> list[str]:
    """What the next pickle of a file imports, as "module name"; "None" if it is computed."""
    return [
        str(name)
        for code, name, _ in pickletools.genops(file)
        if code.name in ("GLOBAL", "INST", "STACK_GLOBAL")
    ]


def _check_names(imported: list[str], allowed: Collection[str]) -> None:
    for name in imported:
        is_storage = name.startswith("torch ") and name.endswith("Storage")
        if not is_storage and name not in allowed:
            raise BadArchiveError(f"it asks for {name}")
