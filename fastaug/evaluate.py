"""python -m fastaug.evaluate CHECKPOINT: accuracy, test-time augmentation and invariance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastaug import cli
from fastaug.checkpoint import evaluated_weights, load_checkpoint
from fastaug.config import EvaluateConfig, TrainConfig
from fastaug.console import measure_rows, show_table
from fastaug.data.sources import check_classes, open_split
from fastaug.device import avoid_broken_cpu_arithmetic, keep_freed_memory, resolve_device
from fastaug.errors import ConfigError
from fastaug.evaluation import Evaluation
from fastaug.loaders import survey_images
from fastaug.models import build_configured_model
from fastaug.telemetry import environment, write_json


def main(args: Sequence[str]) -> int:
    options = cli.parse(EvaluateConfig, args, prog="python -m fastaug.evaluate")
    if options.out and (Path(options.out).is_dir() or not Path(options.out).parent.is_dir()):
        raise ConfigError(f"--out {options.out}: must be a file in a folder that is there")
    path = Path(options.checkpoint).expanduser()
    path = path / "best.pt" if path.is_dir() else path
    state = load_checkpoint(path)
    config = TrainConfig.from_dict(state["config"])
    config = replace(
        config,
        data=options.data or config.data,
        loader=config.loader if options.loader == "as-trained" else options.loader,
        # Of the loader: another one may not have it.
        views_engine=config.views_engine if options.loader == "as-trained" else "auto",
        device=options.device,
        workers=options.workers,
        seed=options.seed,
        precision=config.precision if options.precision == "as-trained" else options.precision,
        tta=config.tta if options.tta < 0 else options.tta,
    )
    images = open_split(config.data, "test")
    check_classes(images, tuple(state["classes"]), str(path))
    device = resolve_device(options.device)
    avoid_broken_cpu_arithmetic(device, config.precision)
    keep_freed_memory(device)
    model = build_configured_model(config, len(images.classes))
    model.load_state_dict(evaluated_weights(state))
    images = survey_images(config, images)
    evaluation = Evaluation(images, config, device, batch_size=options.batch_size)
    measures = evaluation.measure(model.to(device), views=config.tta)
    rows = [
        ("checkpoint", f"{path} (step {state['step']:,})"),
        ("data", f"{images.name}, {len(images) - len(images.bad):,} images"),
        *measure_rows(measures, config.tta),
    ]
    show_table("fastaug evaluate", rows)
    if options.out:
        result = {"checkpoint": str(path), "data": images.name, "tta": config.tta}
        result |= {"measures": measures, "environment": environment(device)}
        write_json(Path(options.out), result)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
