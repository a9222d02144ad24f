"""A picture of what the network will see: a row for each image, the original and its K views."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

from fastaug.data.image_set import ImageSet
from fastaug.views.batch import ViewBatch
from fastaug.views.config import ViewConfig
from fastaug.views.reference import denormalize

CELL = 128
"""Side of a drawn view in pixels at the least: small views are enlarged."""
_GAP, _LINE = 4, 18
_PAPER, _INK = (255, 255, 255), (30, 30, 30)


def draw_views(
    images: ImageSet, batch: ViewBatch, config: ViewConfig, rows: int = 8
) -> Image.Image:
    """The first images of a batch with their labels, as pixel values before normalization."""
    pixels = denormalize(batch.views[:rows].cpu(), config).permute(0, 1, 3, 4, 2).numpy()
    rows, columns = len(pixels), pixels.shape[1] + 1
    size = pixels.shape[2]
    cell = size * max(1, -(-CELL // size))
    step = cell + _GAP
    sheet = Image.new(
        "RGB", (columns * step + _GAP, _LINE + rows * (step + _LINE) + _GAP), color=_PAPER
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column in range(columns):
        title = f"view {column}" if column else "original"
        pen.text((_GAP + column * step, 1), title, fill=_INK, font=font)
    for row, (views, index, label) in enumerate(
        zip(pixels, batch.indices.tolist(), batch.labels.tolist(), strict=False)
    ):
        top = _LINE + row * (step + _LINE)
        caption = f"{images.classes[label]}  (label {label}, image {index})"
        pen.text((_GAP, top + 1), caption, fill=_INK, font=font)
        original = Image.fromarray(images.image(index))
        original.thumbnail((cell, cell))
        if max(original.size) < cell:
            scale = max(1, cell // max(original.size))
            original = original.resize((original.width * scale, original.height * scale), 0)
        drawn = [original, *(Image.fromarray(v).resize((cell, cell), 0) for v in views)]
        for column, picture in enumerate(drawn):
            sheet.paste(picture, (_GAP + column * step, top + _LINE))
    return sheet
