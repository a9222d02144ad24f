"""python -m fastaug.export CHECKPOINT --to FORMAT: a trained network for other programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.exporters.formats import BATCHES, FORMATS, check_packages, export_network
from fastaug.exporters.preprocess_files import check_preprocess_files, write_preprocess_files
from fastaug.runs.checkpoint import checkpoint_file, load_checkpoint
from fastaug.runs.console import show_table
from fastaug.runs.weights import model_from_checkpoint, safetensors_metadata
from fastaug.settings import Settings


@dataclass(frozen=True)
class ExportConfig(Settings):
    """Export a trained network in fp32. The file is read back and its logits are compared."""

    checkpoint: Annotated[str, arg(metavar="CHECKPOINT")]
    """Checkpoint file (best.pt, last.pt) or run folder (its best.pt)."""
    to: Literal["safetensors", "onnx", "onnx-with-preprocessing", "torch-export"] = "safetensors"
    """safetensors: weights by name, with metadata; onnx: one file for any batch size, with input
    "images" and output "logits" (needs fastaug[export]); onnx-with-preprocessing: the same with
    input "pixels", uint8 images of any size; torch-export: for torch.export.load."""
    out: str = ""
    """File to write; default: next to the checkpoint, as .safetensors, .onnx or .pt2. The folder
    also gets preprocess.json and preprocess.py, which make the network's input."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(ExportConfig, args, prog="python -m fastaug.export")
    path = checkpoint_file(options.checkpoint)
    out = output_file(options, path)
    check_packages(options.to)
    state = load_checkpoint(path)
    config = TrainConfig.from_saved(state["config"])
    model, metadata = model_from_checkpoint(state), safetensors_metadata(state)
    about = json.loads(metadata["preprocessing"])
    check_preprocess_files(out.parent, about)
    written = export_network(options.to, out, model, config, metadata)
    write_preprocess_files(out.parent, about)
    averaged = "" if state["ema"] is None else ", moving average"
    rows = [
        ("checkpoint", f"{path} (step {state['step']:,}{averaged})"),
        ("model", f"{config.model.model}, {len(state['classes'])} classes, {config.view.size} px"),
        ("file", f"{out} ({options.to}, {written.bytes / 1e6:,.1f} MB)"),
        (
            f"read back, batches of {' and '.join(map(str, BATCHES))}",
            f"logits differ by {written.difference:.1e} at most; the largest is "
            f"{written.largest_logit:.3g}",
        ),
        ("beside it", "preprocess.json, preprocess.py: from an image to the network's input"),
    ]
    show_table("fastaug export", rows)
    return 0


def output_file(options: ExportConfig, checkpoint: Path) -> Path:
    """--out, or the checkpoint's name with the suffix of the format."""
    suffix = FORMATS[options.to].suffix
    if not options.out:
        kind = "-with-preprocessing" if FORMATS[options.to].takes_pixels else ""
        return checkpoint.with_name(f"{checkpoint.stem}{kind}{suffix}")
    out = cli.output_file("--out", options.out)
    if out.suffix != suffix:
        meant = [name for name, kind in FORMATS.items() if kind.suffix == out.suffix]
        hint = f", or give --to {meant[0]}" if meant else ""
        raise ConfigError(
            f"--out {options.out}: files of --to {options.to} end in {suffix}; rename it{hint}"
        )
    return out


if __name__ == "__main__":
    sys.exit(cli.run(main))
