"""python -m fastaug.preview: a picture of what the network will see."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.sources import open_split_or_flat
from fastaug.engine.loaders import build_loader, training_images
from fastaug.errors import ConfigError, printable
from fastaug.recipes import get_recipe
from fastaug.runs.folder import write_event_picture
from fastaug.runs.picture import draw_views


@dataclass(frozen=True)
class PreviewConfig(TrainConfig):
    """Draw what the network will see: some images, each with its K views. Takes train's flags."""

    images: int = 8
    """Images to draw, the first of the training's order."""
    out: str = "preview.png"
    """File of the picture."""
    logdir: str = "runs/preview"
    """Folder of TensorBoard events, for the same picture; empty: none."""

    def __post_init__(self) -> None:
        if not 1 <= self.images <= 100:
            raise ConfigError(f"--images must be between 1 and 100, got {self.images}")
        # Any number of views will do here: a step has the images of the picture.
        object.__setattr__(self, "batch_size", self.images * self.views)
        object.__setattr__(self, "accumulate", 1)
        super().__post_init__()


def main(args: Sequence[str]) -> int:
    config = configure(args)
    out = cli.output_file("--out", config.out)
    images, _ = training_images(config, open_split_or_flat(config.data, "train"))
    config = replace(config, images=min(config.images, len(images)))
    batch = next(iter(build_loader(config, images)))
    picture = draw_views(images, batch, config, rows=config.images)
    try:
        picture.save(out)
    except (OSError, ValueError) as error:  # no rights, or a suffix that is no image's
        raise ConfigError(f"--out {out}: cannot be written ({error})") from error
    of = f"{len(batch.indices)} images of {images.name}"
    print(printable(f"{of} with {config.views} views each: {out}"))
    if config.logdir:
        write_event_picture(Path(config.logdir).expanduser(), "views", picture)
        print(f"the same in TensorBoard: tensorboard --logdir {config.logdir}")
    return 0


def configure(args: Sequence[str]) -> PreviewConfig:
    """Train's flags; what a recipe says of the run's folder does not matter here."""
    recipe = get_recipe(cli.peek(args, "recipe")["recipe"] or PreviewConfig.recipe)
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    default = PreviewConfig(**values | {"out": PreviewConfig.out})
    return cli.parse(PreviewConfig, args, prog="python -m fastaug.preview", default=default)


if __name__ == "__main__":
    sys.exit(cli.run(main))
