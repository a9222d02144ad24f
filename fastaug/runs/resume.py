"""Where a run continues: the checkpoint that --resume means, and the folder of a new run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError, ConfigError, DamagedCheckpointError, few
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.checkpoint_writer import FOLDER, kept_checkpoints, step_name
from fastaug.runs.contents import check_contents
from fastaug.runs.lock import wait_until_free
from fastaug.runtime.torchrun import launch_timestamp, num_nodes, torchrun_id, was_restarted


def newest_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint of a run folder; None if it has none at all.

    Damaged ones are renamed, so that no later step counts as older than them, and reported. If none
    is intact they stay where they are: another try must not start from the beginning.
    """
    check_contents(folder)
    wait_until_free(folder, say)
    whole: dict[Path, int] = {}
    damaged: dict[Path, DamagedCheckpointError] = {}
    for path in (folder / "last.pt", *kept_checkpoints(folder / FOLDER)):
        # last.pt is a second name of the newest one, or of the one before if the run was killed
        # between the two writes: the next one is read, too, unless it cannot be newer.
        if not path.exists() or any(path.name <= step_name(step) for step in whole.values()):
            continue
        try:
            whole[path] = load_checkpoint(path)["step"]
        except DamagedCheckpointError as error:
            damaged[path] = error
    if damaged and not whole:
        raise CheckpointError(f"{folder}: all checkpoints are damaged; {_best_of(folder)}")
    for bad, reason in damaged.items():
        with suppress(OSError):  # a read-only folder is reported soon enough
            bad.replace(bad.with_name(f"{bad.name}.damaged"))
        say(f"warning: {reason}; renamed it, and using the previous checkpoint")
    return max(whole, key=lambda path: whole[path], default=None)


def find_checkpoint(resume: str, out: str, say: Callable[[str], None]) -> Path | None:
    """What --resume means: a file, a run folder, or "auto": --out, else the newest run of runs/.

    None if "auto" finds nothing: the run then starts from the beginning.
    """
    if resume == "auto":
        folder = Path(out).expanduser() if out else _newest_run()
        return None if folder is None else newest_checkpoint(folder, say)
    path = Path(resume).expanduser()
    if not path.is_dir():
        return path
    if (newest := newest_checkpoint(path, say)) is None:
        if runs := _runs_in(path):
            raise CheckpointError(
                f"--resume {path}: not a run folder, but it holds some; name one of them, the "
                f"newest first: {few(runs)}"
            )
        raise CheckpointError(
            f"{path}: found no checkpoint, neither last.pt nor any in {FOLDER}/; {_best_of(path)}"
        )
    return newest


def _best_of(folder: Path) -> str:
    """Advice for a folder that has no checkpoint to resume from."""
    best = folder / "best.pt"
    try:
        step = load_checkpoint(best)["step"]
    except CheckpointError:
        return "start again, in another --out"
    return f"its best.pt (step {step:,}) is intact: --resume {best} --out NEW"


def _newest_run() -> Path | None:
    return next(iter(_runs_in(Path("runs"))), None)


def _runs_in(folder: Path) -> list[Path]:
    """Run folders with a checkpoint directly below a folder, the newest first."""
    files = [*folder.glob("*/last.pt*"), *folder.glob(f"*/{FOLDER}/step-*.pt")]
    files.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
    return list(dict.fromkeys(map(run_of, files)))


def run_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint."""
    folder = checkpoint.parent
    return folder.parent if folder.name == FOLDER else folder


def restarted_checkpoint(resume: str, out: str, say: Callable[[str], None]) -> Path | None:
    """The checkpoint of a run that torchrun has restarted, which needs no --resume."""
    if not (was_restarted() or torchrun_id()):
        return None
    folder = Path(out or resume or _folder_of_this_launch()).expanduser()
    if not folder.is_dir():
        return None
    checkpoint = newest_checkpoint(folder, say)
    if checkpoint is None:
        return None
    if was_restarted() or load_checkpoint(checkpoint)["launch"] == torchrun_id():
        say(f"restarted by torchrun: resuming from {checkpoint}")
        return checkpoint
    return None


def new_run_folder(config: TrainConfig) -> str:
    """runs/WHAT-DATE-TIME-PROCESS: the name of the recipe, or of the data where there is none."""
    if num_nodes() > 1:
        raise ConfigError("several machines need --out, a folder that all of them can access")
    # Only its last part: the name of a recipe in a stranger's checkpoint may lead anywhere.
    what = Path(config.run.recipe).name or Path(config.data.data).name.partition(".")[0]
    return f"runs/{what}-{launch_timestamp()}"


def _folder_of_this_launch() -> str:
    """What new_run_folder named when torchrun first started this run."""
    return next(
        (str(path) for path in Path("runs").glob(f"*-{launch_timestamp()}")), "no such folder"
    )
