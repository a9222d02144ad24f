"""The paper's claims in small: all sweeps of docs/paper.md on CIFAR-10 at 16 px.

    python benchmarks/paper_small.py --data cifar10-16.npz [--out runs/paper-small]

About 130 million views: 6 hours on two idle cores with AVX-512 BF16, at the 3,500 views/s of a core
that the record has. In any number of sittings: the same command continues, and what the committed
record (benchmarks/results/paper-small) already has is not trained again. After each sweep the
record is written, with one row for each run. `python benchmarks/tables.py` makes the tables and
figures of the docs from it.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastaug import cli
from fastaug.errors import ConfigError, few
from fastaug.experiments.grids import EXPERIMENTS
from fastaug.experiments.run_files import read_summary
from fastaug.settings import Settings

RECORD = Path(__file__).parent / "results" / "paper-small"
SWEEPS = tuple(name for name in EXPERIMENTS if name.startswith("small-"))
"""In the order in which they run: the first ones decide most."""
FINE_TUNING = "small-finetune"
_SOURCE_EPOCHS, _SOURCE_RATE = 60, 2**-9
"""How the weights for fine-tuning are trained; twice the rate diverges for some data."""


@dataclass(frozen=True)
class Options(Settings):
    """Run the sweeps of docs/paper.md, or continue them, and write their record."""

    data: str = ""
    """CIFAR-10 at 16 px: an .npz with train_images, train_labels, test_images, test_labels and
    classes."""
    out: str = "runs/paper-small"
    """Folder of the sweeps."""
    record: str = str(RECORD)
    """Folder of the record: read before each sweep, written after it."""
    only: tuple[str, ...] = ()
    """Sweeps to run; default: all, in their order."""
    sweep_args: str = ""
    """More arguments for fastaug.sweep: --sweep-args="--jobs 1"."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.only if name not in SWEEPS]:
            raise ConfigError(f"--only {unknown[0]}: no such sweep; allowed: {few(SWEEPS, 20)}")


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/paper_small.py")
    data = Path(options.data).expanduser().absolute()
    if not options.data or not data.is_file():
        raise ConfigError(f"--data {options.data or 'is not given'}: give CIFAR-10 at 16 px, .npz")
    out = Path(options.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.only or SWEEPS:
        flags = _fine_tuning_flags(data, out / "fine-tuning") if name == FINE_TUNING else []
        flags = flags or ["--data", str(data)]
        sweep = ["fastaug.sweep", name, "--dali", *flags, "--out", str(out / name)]
        # Not all of --out: the weights for fine-tuning are no result.
        known = [folder for other in SWEEPS if (folder := out / other).is_dir()]
        earlier = [str(folder) for folder in (*known, Path(options.record)) if folder.is_dir()]
        reuse = ["--reuse", *earlier] if earlier else []
        code = _run([*sweep, *reuse, *shlex.split(options.sweep_args)])
        if code not in (0, 1):  # 1: some runs have failed, the others count
            return code
        failed |= code
        found = dict.fromkeys([*earlier, str(out / name)])
        page = ["fastaug.report", *found, "--out", str(out / "report.html")]
        failed |= _run([*page, "--record", options.record])
    return failed


def _run(module: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", *module], check=False).returncode


def _fine_tuning_flags(data: Path, folder: Path) -> list[str]:
    """The flags of the fine-tuning sweep: five classes, and weights from the other five."""
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / "source.npz", folder / "target.npz"
    if not target.exists():
        write_half(data, source, first=True)
        write_half(data, target, first=False)
    run = folder / "source"
    if not read_summary(run).get("finished"):
        # All of their images but a tenth, of which the best epoch is chosen.
        recipe = ["--recipe", "small-cifar", "--views", "1", "--train-images", "0"]
        recipe += ["--validation", "0.1"]
        recipe += ["--epochs", str(_SOURCE_EPOCHS), "--lr", str(_SOURCE_RATE)]
        train = ["fastaug.train", "--dali", *recipe, "--data", str(source), "--out", str(run)]
        train += ["--resume", "auto"]
        if code := _run(train):
            raise ConfigError(f"{run}: the training of the weights ended with exit code {code}")
    return ["--data", str(target), "--weights", str(run / "best.safetensors")]


def write_half(data: Path, out: Path, *, first: bool) -> None:
    """Write the images of the first or the last half of the classes, with labels from 0."""
    with np.load(data) as arrays:
        half = len(arrays["classes"]) // 2
        kept = slice(0, half) if first else slice(half, 2 * half)
        written = {"classes": arrays["classes"][kept]}
        for split in ("train", "test"):
            labels = arrays[f"{split}_labels"]
            chosen = (labels >= kept.start) & (labels < kept.stop)
            written[f"{split}_images"] = arrays[f"{split}_images"][chosen]
            written[f"{split}_labels"] = labels[chosen] - kept.start
    np.savez_compressed(out, **written)


if __name__ == "__main__":
    sys.exit(cli.run(main))
