"""The preprocessing of exports: as fastaug applies it, as numpy code, and as an ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

import fastaug
from fastaug.data.image_set import decode
from fastaug.data.pixels import rgb_pixels
from fastaug.exporters.onnx_preprocessing import add_preprocessing
from fastaug.exporters.preprocess_files import CODE
from fastaug.views.config import ViewConfig
from fastaug.views.preprocessing import Preprocessing

SIZES = [(61, 97), (500, 375), (37, 37), (8, 200), (1, 1), (2, 3), (28, 40), (1700, 1300)]
SETTINGS = [
    {"interpolation": interpolation, "antialias": antialias, "size": size}
    for interpolation in ("bicubic", "bilinear")
    for antialias in (False, True)
    for size in (24, 161)
]
TOLERANCE = 5e-5
"""In normalized values. The view kernels compute in fp32, where pixel values have steps of 1.5e-5:
a filter that is wrong by a millionth is found."""


def preprocess_code() -> dict[str, Any]:
    """The names of the file that is written beside an export, from its very text."""
    names: dict[str, Any] = {}
    exec(CODE.read_text(), names)
    return names


def images() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]


def fused_views(image: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """[3, S, S] of the fused view kernel, which shares no code with the preprocessing."""
    tensors = [torch.from_numpy(image)]
    render = {name: settings[name] for name in ("interpolation", "antialias")}
    plan = fastaug.plan_views(tensors, views=1, size=settings["size"], augment="none")
    return fastaug.make_views(tensors, plan, **render)[0, 0].numpy()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_form_gives_what_evaluate_sees(settings: dict[str, Any]) -> None:
    preprocessing = Preprocessing.from_config(ViewConfig(**settings))
    about = preprocessing.to_json()
    preprocess = preprocess_code()["preprocess"]
    session = onnxruntime.InferenceSession(
        add_preprocessing(identity(settings["size"]), preprocessing).SerializeToString()
    )
    for image in images():
        expected = fused_views(image, settings)
        found = preprocess(Image.fromarray(image), about)
        assert (found.shape, found.dtype) == ((1, *expected.shape), np.float32)
        (in_graph,) = session.run(None, {"pixels": image[None]})
        for own in (preprocessing.apply(image).numpy(), found[0], in_graph[0]):
            np.testing.assert_allclose(own, expected, atol=TOLERANCE, err_msg=str(image.shape))


def identity(size: int) -> onnx.ModelProto:
    """A network that returns its input."""
    shape = f"float[batch, 3, {size}, {size}]"
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> net ({shape} images) => ({shape} logits) '
        "{ logits = Identity (images) }"
    )


def test_a_batch_of_pixels() -> None:
    preprocessing = Preprocessing.from_config(ViewConfig(size=16))
    model = add_preprocessing(identity(16), preprocessing)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    pixels = np.random.default_rng(1).integers(0, 256, (3, 30, 50, 3), np.uint8)
    (together,) = session.run(None, {"pixels": pixels})
    for one, image in zip(together, pixels, strict=True):
        np.testing.assert_array_equal(one, session.run(None, {"pixels": image[None]})[0][0])


def test_no_crop_for_cifar() -> None:
    """With --crop pad, the input is the whole image, and its pixels are not changed."""
    preprocessing = Preprocessing.from_config(
        ViewConfig(size=32, crop="pad", normalize=(0.0, 1 / 255))  # pixel values stay
    )
    image = np.random.default_rng(2).integers(0, 256, (32, 32, 3), np.uint8)
    expected = image.transpose(2, 0, 1).astype(np.float32)
    np.testing.assert_array_equal(preprocessing.apply(image).numpy(), expected)
    found = preprocess_code()["preprocess"](Image.fromarray(image), preprocessing.to_json())
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize("mode", ["L", "P", "PA", "RGBA", "LA", "CMYK", "1", "I;16", "I", "YCbCr"])
def test_images_of_every_mode(mode: str) -> None:
    """The written code decodes as fastaug's loaders do."""
    random = np.random.default_rng(3)
    if mode.startswith("I"):
        kind = np.uint16 if mode == "I;16" else np.int32
        image = Image.fromarray(random.integers(0, 65536, (20, 30)).astype(kind))
    else:
        pixels = random.integers(0, 256, (20, 30, 3), np.uint8)
        image = Image.fromarray(pixels).convert("P" if mode == "PA" else mode).convert(mode)
    assert image.mode == mode
    preprocessing = Preprocessing.from_config(ViewConfig(size=16))
    expected = preprocessing.apply(rgb_pixels(image)).numpy()
    found = preprocess_code()["preprocess"](image, preprocessing.to_json())[0]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_exif_orientation_is_ignored(tmp_path: Path) -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (20, 30, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.fromarray(pixels).save(tmp_path / "rotated.png", exif=exif)
    preprocessing = Preprocessing.from_config(ViewConfig(size=16))
    expected = preprocessing.apply(pixels).numpy()
    np.testing.assert_array_equal(decode((tmp_path / "rotated.png").read_bytes(), ""), pixels)
    with Image.open(tmp_path / "rotated.png") as image:
        assert image.getexif()[0x0112] == 6
        found = preprocess_code()["preprocess"](image, preprocessing.to_json())[0]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
