"""python -m fastaug.evaluate CHECKPOINT: accuracy, test-time augmentation and invariance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from fastaug import cli
from fastaug.checkpoint import checkpoint_file, evaluated_weights, load_checkpoint
from fastaug.config import TrainConfig
from fastaug.console import measure_rows, show_table
from fastaug.data.sources import check_classes, open_split
from fastaug.device import avoid_broken_cpu_arithmetic, keep_freed_memory, resolve_device
from fastaug.distributed import Group
from fastaug.evaluation import Evaluation
from fastaug.launch import joined
from fastaug.loaders import survey_images
from fastaug.models import build_configured_model
from fastaug.options import EvaluateConfig
from fastaug.telemetry import environment, write_json


def main(args: Sequence[str]) -> int:
    with joined() as group:
        _evaluate(cli.parse(EvaluateConfig, args, prog="python -m fastaug.evaluate"), group)
    return 0


def _evaluate(options: EvaluateConfig, group: Group) -> None:
    out = cli.output_file("--out", options.out) if options.out else None
    path = checkpoint_file(options.checkpoint)
    state = load_checkpoint(path)
    config = TrainConfig.from_dict(state["config"])
    config = replace(
        config,
        data=options.data or config.data,
        loader=config.loader if options.loader == "as-trained" else options.loader,
        # Of the loader: another one may not have it.
        views_engine=config.views_engine if options.loader == "as-trained" else "auto",
        device=options.device,
        # A name with a colon is imported, and a checkpoint may come from anyone.
        kernel="auto" if ":" in config.kernel else config.kernel,
        workers=options.workers,
        seed=options.seed,
        precision=config.precision if options.precision == "as-trained" else options.precision,
        tta=config.tta if options.tta < 0 else options.tta,
    )
    images = group.in_turn(lambda: open_split(config.data, "test"))
    check_classes(images, tuple(state["classes"]), str(path))
    device = resolve_device(options.device)
    avoid_broken_cpu_arithmetic(device, config.precision)
    keep_freed_memory(device)
    model = build_configured_model(config, len(images.classes))
    model.load_state_dict(evaluated_weights(state))
    surveyed = group.in_turn(lambda: survey_images(config, images))
    evaluation = Evaluation(surveyed, config, device, group, batch_size=options.batch_size)
    measures = evaluation.measure(model.to(device), views=config.tta)
    if not group.is_first:
        return
    rows = [
        ("checkpoint", f"{path} (step {state['step']:,})"),
        ("data", f"{surveyed.name}, {len(surveyed) - len(surveyed.bad):,} images"),
        *measure_rows(measures, config.tta),
    ]
    show_table("fastaug evaluate", rows)
    if out is not None:
        result = {"checkpoint": str(path), "data": images.name, "tta": config.tta}
        result |= {"measures": measures, "environment": environment(device)}
        write_json(out, result)


if __name__ == "__main__":
    sys.exit(cli.run(main))
