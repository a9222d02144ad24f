"""python -m fastaug.predict CHECKPOINT IMAGE...: the most probable classes of images."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from fastaug import cli
from fastaug.engine.prediction import Predictor, UnreadableImage, find_images
from fastaug.errors import ConfigError, DataError, printable
from fastaug.exporters.loading import load_network
from fastaug.runtime.device import use_device
from fastaug.settings import Settings, setting

log = logging.getLogger("fastaug")


@dataclass(frozen=True)
class PredictConfig(Settings):
    """Print the most probable classes of images, from their central crops in fp32."""

    checkpoint: Annotated[str, arg(metavar="CHECKPOINT")]
    """Checkpoint file, run folder (its best.pt), or a file of fastaug.export: .safetensors, .onnx,
    .pt2."""
    images: Annotated[tuple[str, ...], arg(metavar="IMAGE...")]
    """Image files, and folders with images at any depth."""
    top: int = setting(5, at_least=1)
    """Number of classes to print."""
    views: int = setting(0, at_least=0, at_most=1024)
    """Random views of each image, at least 2, made as in training: how much the prediction depends
    on them. 0: none."""
    seed: int = setting(0, at_least=0)
    """Seed of the views."""
    json: bool = False
    """Print one JSON object per image and line."""
    batch_size: int = setting(256, at_least=1)
    """Central crops and views in one forward pass."""
    device: str = "auto"
    """auto, cpu, cuda, or cuda:N; ONNX runs on the CPU."""
    trust: bool = False
    """Load a .pt2, which can run code that it contains."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.views == 1:
            raise ConfigError("--views must be 0 or at least 2, got 1: one view has no spread")


def main(args: Sequence[str]) -> int:
    options = cli.parse(PredictConfig, args, prog="python -m fastaug.predict")
    if not options.images:
        raise ConfigError("no IMAGE given: name image files, or folders of images")
    paths = find_images(options.images)
    network = load_network(options.checkpoint, use_device(options.device), trust=options.trust)
    predictor = Predictor(
        network, views=options.views, seed=options.seed, batch_size=options.batch_size
    )
    unreadable = 0
    for found in predictor.predict(paths):
        if isinstance(found, UnreadableImage):
            unreadable += 1
            log.warning("%s", found.error)
            if options.json:
                print(json.dumps({"image": found.image, "error": found.error}))
            continue
        result = found.to_json(network.classes, options.top)
        print(json.dumps(result) if options.json else as_text(result), flush=True)
    if unreadable:
        raise DataError(f"{unreadable:,} of {len(paths):,} images have no prediction, see above")
    return 0


def as_text(result: dict[str, Any]) -> str:
    """A paragraph about one image."""
    lines = [printable(result["image"])]
    names = [printable(entry["class"]) for entry in result["top"]]
    for name, entry in zip(names, result["top"], strict=True):
        line = f"{entry['probability']:8.2%}  {name:{max(map(len, names))}}"
        if views := entry.get("views"):
            line += f"  {views['mean']:.2%} ± {views['std']:.2%} over the views, "
            line += f"{views['min']:.2%} to {views['max']:.2%}"
        lines.append(line.rstrip())
    if views := result.get("views"):
        lines.append(
            f"  {result['agree']} of {views} views agree, "
            f"pairwise KL {result['invariance']:.4f} nats"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(cli.run(main))
