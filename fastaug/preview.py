"""python -m fastaug.preview: draw the views that the network sees in training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.sources import DataSource, open_flat
from fastaug.engine.loaders import build_loader
from fastaug.errors import ConfigError, printable
from fastaug.recipes import default_recipe, get_recipe
from fastaug.runs.config import RunConfig
from fastaug.runs.loggers.tensorboard import write_event_picture
from fastaug.runs.picture import draw_views
from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class PictureConfig(Settings):
    """The picture to draw."""

    images: int = setting(8, at_least=1, at_most=100)
    """Number of images to draw: the first ones of the training order."""
    logdir: str = "runs/preview"
    """Folder for TensorBoard events with the same picture; empty: none."""


@dataclass(frozen=True)
class PreviewRunConfig(RunConfig):
    out: str = "preview.png"
    """Picture to write."""


@dataclass(frozen=True)
class PreviewConfig(TrainConfig):
    """Draw some images, each with its K views, as the network sees them. Takes train's flags."""

    run: PreviewRunConfig = field(default_factory=PreviewRunConfig)
    picture: PictureConfig = field(default_factory=PictureConfig)

    def images_per_part(self, ranks: int = 1) -> int:
        """All images of the picture in one batch, regardless of --batch-size."""
        return self.picture.images


def main(args: Sequence[str]) -> int:
    config = configure(args)
    out = cli.output_file("--out", config.run.out)
    images = open_flat(config.data) or DataSource(config.data).training()[0]
    config = config.replace(images=min(config.picture.images, len(images)), accumulate=1)
    batch = next(iter(build_loader(config, images)))
    picture = draw_views(images, batch, config.view, rows=config.picture.images)
    try:
        picture.save(out)
    except (OSError, ValueError) as error:  # no permission, or an unknown suffix
        raise ConfigError(f"--out {out}: cannot be written ({error})") from error
    drawn = f"{len(batch.indices)} images of {images.name} with {config.view.views} views each"
    print(printable(f"{drawn}: {out}"))
    if config.picture.logdir:
        write_event_picture(Path(config.picture.logdir).expanduser(), "views", picture)
        print(f"also in TensorBoard: tensorboard --logdir {config.picture.logdir}")
    return 0


def configure(args: Sequence[str]) -> PreviewConfig:
    """Settings from train's flags and the recipe, except for the recipe's run folder."""
    named = cli.peek(args, "recipe", "data")
    recipe = get_recipe(named["recipe"] or default_recipe(named["data"]))
    settings = recipe.to_flat() | {"out": PreviewRunConfig.out}
    default = PreviewConfig().replace(**settings)
    return cli.parse_training(
        PreviewConfig,
        args,
        prog="python -m fastaug.preview",
        default=default,
        follow_weights=True,
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
