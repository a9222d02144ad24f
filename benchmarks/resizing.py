"""What progressive resizing saves: time of a training step at each size of the views.

    python benchmarks/resizing.py [--size 128:224] [--epochs 10] [--model nf_resnet26]

A step is the trainer's: JPEGs are decoded, views made, weights updated (by nothing: the learning
rate is 0). Sizes take turns in rounds,
and each is compared with the last size of the same round. The time of a training follows from the
number of epochs at each size; evaluations, which always have the last size, do not count.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from parts import command, results, timing
from parts.stages import Stages
from parts.timing import Turn
from rich.console import Console
from rich.table import Table

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.data.scan import scan_and_check
from fastaug.data.sources import DataSource
from fastaug.diagnostics.photos import photo_folder
from fastaug.runtime.cores import core_count
from fastaug.runtime.device import keep_freed_memory
from fastaug.views.resizing import size_of_epoch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """Time that growing views save on a CPU."""

    photos: str = ""
    """Data of any layout that --data of fastaug.train takes. Default: 256 generated JPEGs of about
    500 x 375."""
    model: str = "nf_resnet26"
    """Network."""
    initial_size: int = 128
    """Side of the views in the first epoch; --size 128:224 sets both."""
    size: int = 224
    """Side of the views in the last epochs."""
    epochs: int = 10
    """Epochs of the training."""
    views: int = 4
    """K."""
    batch_size: int = 32
    """Views in a step."""
    repeats: int = 5
    """Rounds."""
    turn_seconds: float = 5.0
    """Approximate duration of a turn, at least 2 steps."""
    quick: bool = False
    """A small network, small views, few rounds."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        numbers = {"--repeats": ((self.repeats,), 1), "--epochs": ((self.epochs,), 2)}
        command.check_at_least(numbers)


QUICK = Options(
    model="wrn-10-1", initial_size=32, size=64, batch_size=16, repeats=2, turn_seconds=0.2
)


def main(args: Sequence[str]) -> int:
    options = command.parse(QUICK, list(cli.without_short_forms(args)), "resizing.py")
    config = TrainConfig.from_flat(
        data=options.photos or str(photo_folder()),
        loader="dali",
        views_engine="fused",
        model=options.model,
        initial_size=options.initial_size,
        size=options.size,
        epochs=options.epochs,
        views=options.views,
        batch_size=options.batch_size,
        workers=core_count(),
        device="cpu",
    )
    epochs = Counter(size_of_epoch(config.view, n, options.epochs) for n in range(options.epochs))
    samples = measure(config, sorted(epochs), options)
    show(options, epochs, samples)
    return 0


def measure(config: TrainConfig, sizes: list[int], options: Options) -> dict[int, list[float]]:
    """Size -> seconds of a step, in each round."""
    images = scan_and_check(DataSource(DataConfig(data=config.data.data)).training()[0])
    keep_freed_memory(CPU)
    stages = Stages(config, len(images.classes), CPU)
    measures: dict[int, Callable[[], Turn]] = {}
    for size in sizes:
        own = config.replace(initial_size=0, size=size)
        # Reading, decoding and making views each prefetch.
        stream = stages.training(own, images, ahead=3 * config.data.prefetch)
        count, _ = timing.first_turn(stream, CPU, options.turn_seconds)
        measures[size] = partial(timing.turn, stream, count, CPU, options.turn_seconds)
    samples: dict[int, list[Turn]] = {}
    failed = timing.interleave(measures, samples, rounds=options.repeats)
    for error in failed.values():
        raise error
    return {size: [turn.seconds for turn in turns] for size, turns in samples.items()}


def share_of_time(epochs: Counter[int], samples: dict[int, list[float]]) -> float:
    """Time of the training relative to one with all epochs at the last size: the median over the
    rounds."""
    whole = [epochs.total() * seconds for seconds in samples[max(epochs)]]
    rounds = range(len(whole))
    growing = [sum(count * samples[size][n] for size, count in epochs.items()) for n in rounds]
    return timing.median_ratio(growing, whole)


def show(options: Options, epochs: Counter[int], samples: dict[int, list[float]]) -> None:
    machine = results.machine_name(results.describe_machine(CPU))
    title = f"{options.model}, {options.batch_size} views a step, {machine}"
    table = Table("size", "epochs", "step, ms", "ratio", "lowest to highest", title=title)
    last = samples[max(epochs)]
    for size in sorted(epochs):
        ratios = [one / other for one, other in zip(samples[size], last, strict=True)]
        table.add_row(
            str(size),
            str(epochs[size]),
            f"{1e3 * statistics.median(samples[size]):,.4g}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
        )
    Console().print(table)
    share = share_of_time(epochs, samples)
    sizes = f"--size {options.initial_size}:{options.size}"
    print(
        f"{options.epochs} epochs with {sizes} take {share:.3f} of the time with --size "
        f"{options.size}: {100 * (1 - share):.0f}% saved"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
