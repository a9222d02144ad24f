"""Results that the paper reports, and the families they can be compared with.

Botev, Bauer and De (2022), Tab. 1 (tab:results) and the appendix's table (tab:app:results): top-1
test accuracy at K=1, and for the three objectives at K=16 on CIFAR-100 and K=8 on ImageNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastaug.config import TrainConfig
from fastaug.experiments.results import Family
from fastaug.recipes import get_recipe


class Cell(NamedTuple):
    """An accuracy from 0 to 1 and its ± (the paper does not define its ±)."""

    value: float
    spread: float | None = None


class Row(NamedTuple):
    """Accuracies with or without the regularizer; K=1 is the same in both rows."""

    single: Cell
    losses: Cell
    probs: Cell
    logits: Cell


@dataclass(frozen=True)
class Published:
    """One network of the paper. The key of a row is True with the regularizer."""

    dataset: str
    network: str
    views: int
    """K for the three objectives."""
    central: dict[bool, Row]
    tta: dict[bool, Row]
    """Empty if the network is not in the appendix's table."""


def _row(*values: float, spread: tuple[float, ...] = ()) -> Row:
    spreads = spread or (None,) * len(values)
    return Row(*(Cell(value, s) for value, s in zip(values, spreads, strict=True)))


PUBLISHED = {  # by recipe
    "cifar100-wrn-16-4": Published(
        "CIFAR-100",
        "WRN 16-4",
        16,
        central={
            False: _row(0.741, 0.750, 0.725, 0.643, spread=(0.003, 0.001, 0.001, 0.001)),
            True: _row(0.741, 0.759, 0.758, 0.759, spread=(0.003, 0.001, 0.002, 0.001)),
        },
        tta={False: _row(0.759, 0.768, 0.748, 0.715), True: _row(0.759, 0.772, 0.772, 0.772)},
    ),
    "imagenet-nf-resnet101": Published(
        "ImageNet",
        "NF-ResNet-101",
        8,
        central={False: _row(0.782, 0.793, 0.766, 0.696), True: _row(0.782, 0.801, 0.804, 0.804)},
        tta={False: _row(0.801, 0.808, 0.786, 0.757), True: _row(0.801, 0.806, 0.811, 0.810)},
    ),
    "imagenet-nf-resnet50": Published(
        "ImageNet",
        "NF-ResNet-50",
        8,
        central={False: _row(0.773, 0.781, 0.760, 0.695), True: _row(0.773, 0.784, 0.789, 0.787)},
        tta={False: _row(0.793, 0.799, 0.782, 0.753), True: _row(0.793, 0.792, 0.797, 0.797)},
    ),
    "imagenet-nfnet-f0": Published(
        "ImageNet",
        "NFNet-F0",
        8,
        central={False: _row(0.803, 0.813, 0.788, 0.717), True: _row(0.803, 0.819, 0.822, 0.819)},
        tta={},
    ),
}


def published(family: Family) -> Published | None:
    """The paper's results for a family; None if the paper does not have its experiment."""
    recipe = _recipe(family)
    return PUBLISHED[recipe] if recipe else None


def departures(family: Family) -> list[str]:
    """Settings in which a family differs from the paper's recipe."""
    recipe = _recipe(family)
    return fixed(get_recipe(recipe)).differences(fixed(family.config)) if recipe else []


def _recipe(family: Family) -> str | None:
    """The paper's recipe with the family's network, augmentation and number of images; None if
    flags have changed these, which makes it another experiment."""
    ours = family.config
    for recipe in sorted(family.recipes & set(PUBLISHED)):
        theirs = get_recipe(recipe)
        strong = {config.view.augment == "randaugment" for config in (ours, theirs)}
        same_network = ours.model.model == theirs.model.model
        if same_network and not ours.data.train_images and len(strong) == 1:
            return recipe
    return None


def same_but_model(one: Family, other: Family) -> bool:
    """True if two families differ only in the network."""
    ours, theirs = (fixed(f.config).replace(model="wrn-16-4") for f in (one, other))
    same_images = Path(ours.data.data).name == Path(theirs.data.data).name
    strong = {f.config.view.augment == "randaugment" for f in (one, other)}
    return same_images and len(strong) == 1 and not ours.differences(theirs)


def fixed(config: TrainConfig) -> TrainConfig:
    """A config with fixed values for all settings that the paper varies: the rest is what runs of a
    family share."""
    return config.replace(
        recipe="",
        views=1,
        average="losses",
        kl_weight=0.0,
        lr=1.0,
        epochs=1000,
        seed=0,
        augment="crop-flip",
    )
