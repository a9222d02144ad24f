"""The pictures of the built-in data set: one textured shape over a cluttered background.

Everything is drawn with hard edges on a canvas of OVERSAMPLE times the side, then averaged down.
An outline is an array [N, 2] of (x, y).
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

SIDE = 64
OVERSAMPLE = 3
CANVAS = SIDE * OVERSAMPLE
DIM, BRIGHT = (20.0, 115.0), (140.0, 245.0)
MAX_TILT = 0.4
"""Largest rotation of a shape in radians: with any rotation, small networks stay near chance for
epochs, and how many depends on the seed."""

Array = npt.NDArray[np.float64]
Rng = np.random.Generator
Color = tuple[int, int, int]


def draw_picture(shape: str, rng: Rng) -> Image.Image:
    """A SIDE x SIDE RGB picture of `shape`; `rng` is the only source of variation."""
    mask = draw_silhouette(shape, rng)
    # Bright shapes on dim backgrounds: with the reverse, too, a small network stays at chance for
    # its first ten epochs. Brightness, not hue, so that a gray view still shows the shape.
    picture = _background(_color(rng, *DIM), _color(rng, *DIM), rng)
    _draw_clutter(picture, int(rng.integers(2, 7)), rng)
    picture.paste(_texture(_color(rng, *BRIGHT), _color(rng, *BRIGHT), rng), mask=mask)
    _draw_clutter(picture, int(rng.integers(0, 3)), rng)
    pixels = np.asarray(picture.reduce(OVERSAMPLE), dtype=np.float64)
    pixels += rng.normal(0, rng.uniform(2, 10), pixels.shape)
    return _from_pixels(pixels)


def draw_silhouette(shape: str, rng: Rng) -> Image.Image:
    """A CANVAS x CANVAS mask of `shape` at a random place and size, stretched, flipped, tilted."""
    radius = rng.uniform(0.5, 0.8) / 2
    # The shape stays inside the picture, and any square crop of half the area keeps its center.
    center = 0.5 + rng.uniform(-0.1, 0.1, 2)
    stretch = np.array([1.0, rng.uniform(0.8, 1.0)])
    mirror = np.array([1.0, rng.choice([-1.0, 1.0])])
    outline = OUTLINES[shape] * mirror * stretch @ _rotation(rng.uniform(-MAX_TILT, MAX_TILT))
    mask = Image.new("L", (CANVAS, CANVAS))
    _draw_polygon(mask, (center + radius * outline) * CANVAS, 255)
    return mask


def _rotation(angle: float) -> Array:
    cos, sin = math.cos(angle), math.sin(angle)
    return np.array([[cos, -sin], [sin, cos]])


def _random_direction(rng: Rng) -> Array:
    """(cos, -sin) of a random angle."""
    return _rotation(rng.uniform(0, math.tau))[0]


def _draw_polygon(image: Image.Image, points: Array, fill: int | Color) -> None:
    ImageDraw.Draw(image).polygon(points.ravel().tolist(), fill=fill)


def _from_pixels(pixels: Array) -> Image.Image:
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


# Colors, textures, backgrounds


def _color(rng: Rng, darkest: float = 0.0, brightest: float = 255.0) -> Color:
    """A random color with a brightness in this range."""
    while True:
        red, green, blue = rng.integers(10, 246, 3).tolist()
        if darkest <= 0.299 * red + 0.587 * green + 0.114 * blue <= brightest:
            return red, green, blue


def _texture(first: Color, second: Color, rng: Rng) -> Image.Image:
    ground, figure = (Image.new("RGB", (CANVAS, CANVAS), color) for color in (first, second))
    return Image.composite(figure, ground, _PATTERNS[rng.integers(len(_PATTERNS))](rng))


def _tiles(rng: Rng) -> tuple[Array, Array]:
    """Coordinates, [CANVAS, CANVAS] in 0..1, inside square tiles of 4 to 9 px at a random angle."""
    cos, sin = _random_direction(rng) / (rng.uniform(4, 9) * OVERSAMPLE)
    x, y = np.arange(CANVAS), np.arange(CANVAS)[:, None]
    across, along = cos * x + sin * y, cos * y - sin * x
    return across - np.floor(across), along - np.floor(along)


def _plain(rng: Rng) -> Image.Image:
    return Image.new("L", (CANVAS, CANVAS))


def _stripes(rng: Rng) -> Image.Image:
    across, _ = _tiles(rng)
    return Image.fromarray(across < 0.5).convert("L")


def _checks(rng: Rng) -> Image.Image:
    across, along = _tiles(rng)
    return Image.fromarray((across < 0.5) ^ (along < 0.5)).convert("L")


def _dots(rng: Rng) -> Image.Image:
    across, along = _tiles(rng)
    return Image.fromarray((across - 0.5) ** 2 + (along - 0.5) ** 2 < 0.1).convert("L")


def _noise(rng: Rng) -> Image.Image:
    return _smooth_noise(int(rng.integers(12, 24)), CANVAS, rng).convert("L")


_PATTERNS: tuple[Callable[[Rng], Image.Image], ...] = (_plain, _stripes, _checks, _dots, _noise)


def _smooth_noise(cells: int, side: int, rng: Rng) -> Image.Image:
    """`cells` x `cells` random colors, blended into each other."""
    coarse = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def _background(below: Color, above: Color, rng: Rng) -> Image.Image:
    """A gradient between two colors at a random angle, under low-frequency noise."""
    cos, sin = _random_direction(rng)
    ramp = np.linspace(-0.5, 0.5, SIDE)
    blend = (0.5 + cos * ramp + sin * ramp[:, None]).clip(0, 1)[..., None]
    noise = np.asarray(_smooth_noise(int(rng.integers(3, 8)), SIDE, rng)) - 127.5
    pixels = below + np.subtract(above, below) * blend + rng.uniform(0.1, 0.3) * noise
    return _from_pixels(pixels).resize((CANVAS, CANVAS), Image.Resampling.NEAREST)


def _draw_clutter(picture: Image.Image, count: int, rng: Rng) -> None:
    """Lines, blobs and irregular polygons, each too small or too thin to pass for a shape."""
    draw = ImageDraw.Draw(picture)
    for kind in rng.integers(0, 3, count):
        color = _color(rng)
        center = rng.uniform(0, CANVAS, 2)
        if kind == 0:
            reach = rng.uniform(-0.5, 0.5, 2) * CANVAS
            ends = np.concatenate([center - reach, center + reach])
            draw.line(ends.tolist(), fill=color, width=int(rng.integers(2, 6)))
        elif kind == 1:
            radii = rng.uniform(0.02, 0.06, 2) * CANVAS
            draw.ellipse(np.concatenate([center - radii, center + radii]).tolist(), fill=color)
        else:
            angles = np.sort(rng.uniform(0, math.tau, 5))
            corners = _polar(rng.uniform(0.03, 0.1, 5) * CANVAS, angles)
            _draw_polygon(picture, center + corners, color)


# The classes: one closed outline each, inside the unit circle


def _polar(radii: Array | float, angles: Array) -> Array:
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1)


def _arc(radius: float, start: float, stop: float) -> Array:
    """Points on a circle around the origin, from `start` to `stop` degrees."""
    return _polar(radius, np.radians(np.linspace(start, stop, 48)))


def _spokes(*radii: float) -> Array:
    """A polygon with its corners at `radii`, at equal angles."""
    return _polar(np.array(radii), np.arange(len(radii)) * math.tau / len(radii))


def _crescent() -> Array:
    """The unit disc without a second disc, around (0.55, 0), that cuts its edge at +-50 degrees."""
    bite, tip = np.array([0.55, 0.0]), _arc(1.0, 50, 310)[0]
    width, height = tip - bite
    tip_angle = math.degrees(math.atan2(height, width))
    inner = bite + _arc(math.hypot(width, height), 360 - tip_angle, tip_angle)
    return np.concatenate([_arc(1.0, 50, 310), inner])


def _heart() -> Array:
    t = np.linspace(0, math.tau, 64)
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([16 * np.sin(t) ** 3, y], 1)


def _cross() -> Array:
    quarter = np.array([(1, -0.3), (1, 0.3), (0.3, 0.3)])
    turn = np.array([[0, 1], [-1, 0]])
    return np.concatenate([quarter, quarter @ turn, -quarter, -quarter @ turn])


def _fit_unit_circle(outline: Array) -> Array:
    centered = outline - (outline.min(0) + outline.max(0)) / 2
    return centered / np.linalg.norm(centered, axis=1).max()


_ARROW_TOP = [(1, 0), (0.1, 0.75), (0.1, 0.25), (-1, 0.25)]

OUTLINES: dict[str, Array] = {
    name: _fit_unit_circle(outline)
    for name, outline in {
        "arrow": np.array(_ARROW_TOP + [(x, -y) for x, y in reversed(_ARROW_TOP)]),
        "crescent": _crescent(),
        "cross": _cross(),
        "disc": _arc(1.0, 0, 360),
        "ell": np.array([(0, 0), (1.3, 0), (1.3, 0.5), (0.5, 0.5), (0.5, 2), (0, 2)]),
        "heart": _heart(),
        # Polygons are filled by the even-odd rule, which leaves the inner circle empty.
        "ring": np.concatenate([_arc(1.0, 0, 360), _arc(0.55, 360, 0)]),
        "square": _spokes(1, 1, 1, 1),
        "star": _spokes(*[1, 0.42] * 5),
        "triangle": _spokes(1, 1, 1),
    }.items()
}
