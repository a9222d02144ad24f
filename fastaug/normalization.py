"""Normalization of the views: a data set's name, or a mean and a standard deviation as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

from fastaug.errors import ConfigError, shown
from fastaug.settings import typed

Channels = float | tuple[float, float, float]
"""One value for all channels, or one each for red, green and blue."""
Normalization = Literal["imagenet", "cifar"] | tuple[Channels, Channels]
"""A data set, or (mean, standard deviation) of pixel values from 0 to 1, as in torchvision."""

NORMALIZATION = {
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "cifar": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
}
"""Channel means and standard deviations of pixel values from 0 to 255."""
# Below it, normalized values could overflow fp16. A step of 8-bit pixels is 0.004.
SMALLEST_DEVIATION = 0.001
_ALLOWED = (
    f"{', '.join(NORMALIZATION)}, or MEAN STD for pixel values from 0 to 1, each one number or "
    "three for red, green and blue: 0.5 0.5, or 0.485,0.456,0.406 0.229,0.224,0.225"
)


def pixel_statistics(normalize: Normalization) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Channel means and standard deviations of pixel values from 0 to 255."""
    if isinstance(normalize, str):
        return NORMALIZATION[normalize]
    # Rounded, so that 0.224 becomes the 57.12 of the table and not 57.120000000000005.
    mean, deviation = (tuple(round(255 * value, 9) for value in _three(c)) for c in normalize)
    return mean, deviation


def check_normalization(name: str, value: Any) -> Normalization:
    """The value in its only form: a name, or the mean and the deviation of each of three channels.

    name: of the flag or argument, for messages.
    """
    if isinstance(value, str) and value in NORMALIZATION:
        return value  # type: ignore[return-value]
    try:
        if isinstance(value, str):
            raise ValueError
        mean, deviation = map(_three, value)
    except (TypeError, ValueError, OverflowError):
        try:
            words = typed(value)
        except RecursionError:  # lists in lists, from a stranger's file
            words = shown(value)
        raise ConfigError(f"{name} cannot be {words[:200]!r}: {_ALLOWED}") from None
    for what, values, least in (
        ("mean", mean, 0),
        ("standard deviation", deviation, SMALLEST_DEVIATION),
    ):
        for given in values:
            if not least <= given <= 1:  # also NaN
                advice = "; divide values of the scale 0 to 255 by 255" if given > 1 else ""
                raise ConfigError(
                    f"{name}: the {what} must be from {least} to 1, for pixel values from 0 to 1, "
                    f"got {given:g}{advice}"
                )
    return mean, deviation


def parse_normalization(name: str, words: Sequence[str]) -> Normalization:
    """The value of the words after a flag: a name, or MEAN STD with commas between channels."""
    parts = " ".join(words).split()
    if len(parts) != 2:
        return check_normalization(name, " ".join(parts))
    try:
        numbers = [[float(number) for number in part.split(",")] for part in parts]
    except ValueError:
        return check_normalization(name, " ".join(parts))
    return check_normalization(name, [n[0] if len(n) == 1 else n for n in numbers])


def _three(channels: Any) -> tuple[float, float, float]:
    """One number, or three -> three."""
    if isinstance(channels, str):
        raise ValueError
    if isinstance(channels, Real):
        return (float(channels),) * 3
    red, green, blue = map(float, channels)
    return red, green, blue
