"""python -m fastaug.evaluate CHECKPOINT: accuracy, test-time augmentation and invariance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.engine.evaluation import evaluate_checkpoint
from fastaug.engine.metrics import metric_rows
from fastaug.engine.rank_check import join_ranks
from fastaug.runs.checkpoint import checkpoint_file, load_checkpoint
from fastaug.runs.console import show_table
from fastaug.runtime.arithmetic import arithmetic_in_force
from fastaug.runtime.atomic import write_json
from fastaug.runtime.device import environment, resolve_device
from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class EvaluateConfig(Settings):
    """Evaluate a checkpoint. The model, data and settings are read from the file."""

    checkpoint: Annotated[str, arg(metavar="CHECKPOINT")]
    """Checkpoint file (best.pt, last.pt) or run folder (its best.pt)."""
    tta: int = setting(-1, at_least=-1)
    """Views of each test image for test-time augmentation. 0: only the central crop; -1: as in the
    run's final evaluation."""
    data: str = ""
    """Other data with the same classes; default: the data that the run was trained on."""
    batch_size: int = setting(256, at_least=1)
    """Views in one forward pass."""
    loader: Literal["as-trained", "torch", "dali"] = "as-trained"
    """What decodes the images and makes the views."""
    dali: bool = False
    """Short for --loader dali."""
    workers: int = setting(-1, at_least=-1)
    """Loader processes (torch) or threads (dali). -1: one fewer than the cores, 1 to 8."""
    device: str = "auto"
    """auto, cpu, cuda, or cuda:N."""
    precision: Literal["as-trained", "fp32", "tf32", "bf16", "fp16"] = "as-trained"
    """Precision of the forward pass."""
    seed: int = setting(0, at_least=0)
    """Seed of the views."""
    out: str = ""
    """Also write the results to this JSON file."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    with join_ranks(args) as group:
        options = cli.parse(EvaluateConfig, args, prog="python -m fastaug.evaluate")
        out = cli.output_file("--out", options.out) if options.out else None
        path = checkpoint_file(options.checkpoint)
        state = load_checkpoint(path)
        config = configure(options, TrainConfig.from_saved(state["config"]))
        images, measures, per_class = evaluate_checkpoint(
            state, config, group, name=str(path), batch_size=options.batch_size
        )
        if group.is_first:
            data = f"{images.name}, {len(images) - len(images.bad):,} images"
            rows = [("checkpoint", f"{path} (step {state['step']:,})"), ("data", data)]
            show_table("fastaug evaluate", rows + metric_rows(measures, config.eval.tta))
            show_table(*per_class.table(config.eval.tta, out))
        if group.is_first and out is not None:
            result = {"checkpoint": str(path), "data": images.name, "tta": config.eval.tta}
            device = resolve_device(config.run.device)
            used = {"precision": arithmetic_in_force(device, config.run.precision)}
            result |= {"measures": measures, "environment": environment(device) | used}
            write_json(out, result | per_class.as_json())
    return 0


def configure(options: EvaluateConfig, config: TrainConfig) -> TrainConfig:
    """Settings of the run, changed by the options."""
    loader = "dali" if options.dali else options.loader
    return config.replace(
        data=options.data or config.data.data,
        loader=config.data.loader if loader == "as-trained" else loader,
        # Another loader may not have the engine that the run was trained with.
        views_engine=config.view.views_engine if loader == "as-trained" else "auto",
        device=options.device,
        # A name with a colon is imported, and a checkpoint may come from anyone.
        kernel="auto" if ":" in config.loss.kernel else config.loss.kernel,
        workers=options.workers,
        seed=options.seed,
        precision=config.run.precision if options.precision == "as-trained" else options.precision,
        tta=config.eval.tta if options.tta < 0 else options.tta,
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
