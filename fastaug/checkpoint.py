"""Checkpoints: written whole or not at all, read without executing anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fastaug.errors import CheckpointError

FORMAT = 1
"""Raised when an older reader could not make sense of a checkpoint."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Temporary file, fsync, rename: a reader finds the old file or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into the latter
        reason = getattr(error, "strerror", None) or "is the disk full?"
        raise CheckpointError(
            f"{path}: cannot be written ({reason}); "
            "free some space or mend the permissions, then --resume"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state as it was saved, on the CPU."""
    if path.is_dir() or not path.exists():
        raise CheckpointError(f"{path}: no checkpoint there; a run folder has last.pt and best.pt")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises almost anything in torch's unpickler
        raise CheckpointError(
            f"{path}: damaged, or not a fastaug checkpoint; take the run's last.pt or best.pt, "
            "whichever is whole"
        ) from error
    if not isinstance(state, dict) or "format" not in state or "config" not in state:
        raise CheckpointError(f"{path}: not a fastaug checkpoint (a bare state_dict?)")
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {state['format']}; this version of fastaug reads {FORMAT}"
        )
    return state


def evaluated_weights(state: dict[str, Any]) -> dict[str, Any]:
    """The model's weights: their moving average where the run kept one."""
    if state["ema"] is None:
        return state["model"]
    prefix = "module."
    return {n.removeprefix(prefix): v for n, v in state["ema"].items() if n.startswith(prefix)}


def find_checkpoint(resume: str, out: str) -> Path | None:
    """What --resume means: a file, a run folder, or "auto": --out, else the newest run of runs/.

    None if "auto" finds nothing: the run then starts from the beginning.
    """
    if resume != "auto":
        path = Path(resume).expanduser()
        return path / "last.pt" if path.is_dir() else path
    if out:
        path = Path(out).expanduser() / "last.pt"
        return path if path.exists() else None
    runs = sorted(Path("runs").glob("*/last.pt"), key=lambda path: path.stat().st_mtime)
    return runs[-1] if runs else None
