"""Checkpoint files: written atomically, read without executing anything.

A checkpoint is what torch.save writes, a zip archive, with its checksum as the archive's comment:
one file that can be renamed in one go, and that torch.load reads as well.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

import fastaug
from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError, DamagedCheckpointError, few, first_line, shown
from fastaug.runs.checkpoint_fields import check_fields, check_resumable
from fastaug.runs.torch_archive import BadArchiveError, check_archive
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.device import memory_bound

FORMAT = 3
"""Raised when older versions cannot read a checkpoint. 1: no checksum; 2: other names."""

_LABEL = b"fastaug sha256 "
_COMMENT = len(_LABEL) + 64


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint with its checksum, atomically."""

    def write(file: IO[bytes]) -> None:
        hashing = _Hashing(file)
        torch.save({"format": FORMAT, "version": fastaug.__version__, **state}, cast(IO, hashing))
        comment = _LABEL + hashing.digest.hexdigest().encode()
        file.seek(-2, os.SEEK_END)  # the length of the comment, which torch leaves at 0
        file.write(len(comment).to_bytes(2, "little") + comment)

    write_atomically(path, write)


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically by write(file); raises OSError if that fails."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        try:
            write(file)
        except RuntimeError as error:  # torch's writer hides the system's error
            raise error.__cause__ or error.__context__ or OSError(str(error)) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load the saved state onto the CPU. Its fields have their kinds (checkpoint_fields.py)."""
    archive, has_checksum = _checked(path, _content(path))
    try:
        state = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises almost anything in torch's unpickler
        if has_checksum:  # too little memory, or not written by fastaug: not damage
            raise CheckpointError(f"{path}: cannot be loaded ({first_line(error)})") from error
        raise _damaged(path) from error
    if not isinstance(state, dict) or not {"format", "config"} <= state.keys():
        raise CheckpointError(
            f"{path}: not a fastaug checkpoint; name a run folder or a .pt file in one. To train "
            "from the weights of another program: python -m fastaug.train --weights FILE"
        )
    if not isinstance(state["format"], int) or state["format"] not in (2, FORMAT):
        written = f"by fastaug {shown(state['version'])} " if "version" in state else ""
        raise CheckpointError(
            f"{path}: written {written}in checkpoint format {shown(state['format'])}, and this is "
            f"fastaug {fastaug.__version__}, which reads {FORMAT}; load it with the version that "
            "wrote it"
        )
    if not has_checksum:
        raise _damaged(path, "its checksum is missing")
    if state["format"] == 2:
        state = _from_format_2(state)
    check_fields(state, path, len(archive))
    return state


def _from_format_2(state: dict[str, Any]) -> dict[str, Any]:
    """Format 2 has the same content under other names."""
    if "optimiser" in state:
        state["optimizer"] = state.pop("optimiser")
    if isinstance(loader := state.get("loader"), dict) and "--normalise" in loader:
        loader["--normalize"] = loader.pop("--normalise")
        names = ("--augment", "--randaugment-policy")
        uses_table = tuple(map(loader.get, names)) == ("randaugment", "nfnet")
        loader["RandAugment table"] = "16 operations, ef47db65" if uses_table else None
    return state | {"format": FORMAT}


def checkpoint_file(named: str) -> Path:
    """The checkpoint file itself, or best.pt of a run folder."""
    path = Path(named).expanduser()
    if not path.is_dir():
        return path
    if (best := path / "best.pt").exists():
        return best
    if (last := path / "last.pt").exists():
        raise CheckpointError(f"{best}: not written before the first evaluation; name {last}")
    found = sorted(path.glob("*/best.pt"), key=lambda file: file.stat().st_mtime, reverse=True)
    if runs := [file.parent for file in found]:
        raise CheckpointError(
            f"{path}: not a run folder, but it contains some; name one of them, the newest first: "
            f"{few(runs)}"
        )
    raise CheckpointError(
        f"{path}: not a run folder: it has neither best.pt nor last.pt; name another"
    )


def _content(path: Path) -> bytes:
    if not path.is_file():  # reading a pipe may block, and a device may have no end
        raise CheckpointError(
            f"{path}: no such checkpoint; name a run folder, or a .pt file in one"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: only weights, not a checkpoint; use the .pt beside it")
    try:
        if (size := path.stat().st_size) > memory_bound():
            raise CheckpointError(
                f"{path}: {size:,} bytes, over a third of the memory; load it on a larger machine"
            )
        return path.read_bytes()
    except OSError as error:
        # A failing disk is damage; a file that cannot be read just now may be intact.
        kind = DamagedCheckpointError if error.errno == errno.EIO else CheckpointError
        raise kind(f"{path}: cannot be read ({error.strerror})") from error


def _checked(path: Path, content: bytes) -> tuple[bytes, bool]:
    """The archive without its checksum, which is verified, and whether it had one."""
    comment = content[-_COMMENT:]
    has_checksum = is_checkpoint(content)
    if has_checksum:
        length = content[-_COMMENT - 2 : -_COMMENT]
        content = content[: -_COMMENT - 2] + bytes(2)
        digest = hashlib.sha256(content).hexdigest().encode()
        if (length, _LABEL + digest) != (_COMMENT.to_bytes(2, "little"), comment):
            raise _damaged(path, "its checksum differs")
    try:
        check_archive(content)
    except BadArchiveError as error:
        raise DamagedCheckpointError(
            f"{path}: damaged, or not a fastaug checkpoint ({error})"
        ) from error
    return content, has_checksum


def is_checkpoint(content: bytes) -> bool:
    """True for the content of a file that fastaug wrote."""
    return content[-_COMMENT:].startswith(_LABEL)


def _damaged(path: Path, what: str = "") -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path}: damaged{f' ({what})' if what else ', or not a fastaug checkpoint'}"
    )


def check_continuable(
    state: dict[str, Any], config: TrainConfig, classes: Sequence[str], name: str
) -> None:
    """Refuse to continue a checkpoint with other settings or classes than its own. --epochs depends
    on the schedule: engine/extension.py checks it."""
    check_resumable(state, name)
    saved = TrainConfig.from_saved(state["config"])
    if differing := saved.differences(config, ignore={"epochs"}):
        raise CheckpointError(
            f"{name} was trained with other settings: {', '.join(differing)}; "
            f"omit {'it' if len(differing) == 1 else 'them'}, or start a new run"
        )
    if list(classes) != state["classes"]:
        raise CheckpointError(
            f"{name} was trained on other classes than those of {config.data.data}"
        )


def check_progress(state: dict[str, Any], batches: int, accumulate: int, name: str) -> None:
    """Refuse a checkpoint whose step is not where its loader is. batches: in an epoch."""
    step, loader = state["step"], state["loader"]
    done = loader["epoch"] * batches + loader["position"]
    if done != step * accumulate or state["evaluated_epochs"] * batches > done:
        raise CheckpointError(
            f"{name}: its step, {step}, its evaluated epochs, {state['evaluated_epochs']}, and its "
            f"loader, at batch {loader['position']} of epoch {loader['epoch']}, disagree"
        )


def evaluated_weights(state: dict[str, Any]) -> dict[str, Any]:
    """The weights to evaluate: their moving average, if the run has one."""
    if state["ema"] is None:
        return state["model"]
    prefix = "module."
    return {n.removeprefix(prefix): v for n, v in state["ema"].items() if n.startswith(prefix)}


class _Hashing(io.RawIOBase):
    """A file that computes the checksum of all that is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
