"""DALI's pipelines: their views against the torch loader's, and their memory."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises
from image_sets import open_data
from PIL import Image

import fastaug
from fastaug.config import TrainConfig
from fastaug.data import retry
from fastaug.engine.loaders import build_evaluation_loader
from fastaug.errors import ConfigError
from fastaug.normalization import pixel_statistics
from fastaug.pipelines.dali_views import plan_inputs, view_pipeline
from fastaug.pipelines.decoder import decode_pipeline
from fastaug.views.batch import ViewBatch
from fastaug.views.plan import PAD, ViewPlans, draw_plans
from fastaug.views.randaugment import NAMES
from fastaug.views.reference import denormalize

Tiny = Callable[..., TrainConfig]
# What this file is about; the fused engine's views are in test_fused_views.py.
OPERATORS = {"loader": "dali", "views_engine": "dali"}


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth pictures with detail, in all shapes, as JPEGs of every kind."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "test"):
        for number in range(12):
            height, width = rng.integers(20, 120, 2)
            coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), np.uint8))
            smooth = np.asarray(coarse.resize((int(width), int(height)), Image.Resampling.BICUBIC))
            noisy = smooth + rng.normal(0, 12, smooth.shape)
            picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
            if number == 3:
                picture = picture.convert("L")
            folder = root / split / ("odd" if number % 2 else "even")
            folder.mkdir(parents=True, exist_ok=True)
            options = {"subsampling": number % 3, "progressive": number % 2 == 0}
            picture.save(folder / f"{number:02}.jpg", quality=92, **options)
    return root


def levels(batch: ViewBatch, config: TrainConfig) -> np.ndarray:
    mean, deviation = (np.array(v)[:, None, None] for v in pixel_statistics(config.view.normalize))
    return batch.views.double().numpy() * deviation + mean


class TestViews:
    """The oracle is the torch loader; test_reference_views.py checks its views by hand."""

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"augment": "none"},
            {"crop_area": (0.08, 1.0), "crop_sampling": "tf", "size": 50},
            {"normalize": "cifar", "size": 8},
            {"normalize": ((0.5, 0.4, 0.3), 0.25)},
            {"antialias": True, "size": 8},
            {"antialias": True, "size": 100},
            {"interpolation": "bilinear", "size": 8},
            {"interpolation": "bilinear", "size": 100},
            {"interpolation": "bilinear", "antialias": True, "size": 8},
            {"interpolation": "bilinear", "antialias": True, "size": 50},
        ],
        ids=str,
    )
    def test_they_are_the_torch_loader_s(self, photos: Path, changes: dict) -> None:
        """To the edges: both repeat the edge pixels of the crop."""
        config = TrainConfig.from_flat(**{"data": str(photos), "size": 32, "workers": 0} | changes)
        ours = list(fastaug.build_loader(config.replace(**OPERATORS)))
        theirs = list(fastaug.build_loader(config))
        assert len(ours) == len(theirs) == 1
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.labels, other.labels)
            # DALI takes its cubic weights from a table: a tenth of a level. Places in fp32 are
            # all that differs in bilinear ones: a hundredth.
            cubic = config.view.interpolation == "bicubic"
            difference = np.abs(levels(one, config) - levels(other, config))
            assert difference.max() < (0.15 if cubic else 0.01)
            assert difference.mean() < (0.02 if cubic else 0.001)

    @pytest.mark.parametrize("source", ["folder", "array"])
    def test_views_of_cifar_are_the_same_to_the_last_bit(
        self, tiny: Tiny, tmp_path: Path, source: str
    ) -> None:
        config = tiny(crop="pad", size=20, normalize="cifar")
        if source == "array":
            rng = np.random.default_rng(0)
            images = rng.integers(0, 256, (40, 20, 20, 3), np.uint8)
            np.savez(tmp_path / "set.npz", images=images, labels=np.arange(40) % 2)
            config = config.replace(data=str(tmp_path / "set.npz"))
        for one, other in zip(
            fastaug.build_loader(config.replace(**OPERATORS)),
            fastaug.build_loader(config),
            strict=True,
        ):
            assert torch.equal(one.views, other.views)

    def test_randaugment_is_the_torch_loader_s(self, tiny: Tiny) -> None:
        """To the last bit, where no operation of a view is one of those that differ."""
        inexact = {"equalize", "auto_contrast", "color", "rotate"}
        config = tiny(
            crop="pad",
            size=20,
            views=8,
            batch_size=64,
            augment="randaugment",
            randaugment_layers=3,
            randaugment_magnitude=7.0,
        )
        loader = fastaug.build_loader(config.replace(**OPERATORS))
        keys, compared = list(loader.batches()), 0
        for key, one, other in zip(keys, loader, fastaug.build_loader(config), strict=True):
            sizes = np.full((len(key.indices), 2), 20)
            plans = draw_plans(
                config.view, config.run.seed, key.epoch, key.purpose, key.indices, sizes
            )
            for place in range(len(key.indices)):
                for view, plan in enumerate(plans.of_image(place)):
                    if not inexact & {operation.name for operation in plan.operations}:
                        assert torch.equal(one.views[place, view], other.views[place, view])
                        compared += 1
        assert compared > 80

    @pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
    @pytest.mark.parametrize("antialias", [False, True])
    def test_flat_images_keep_their_level_before_randaugment(
        self, interpolation: str, antialias: bool
    ) -> None:
        """DALI's weights do not sum to 1 either; invert shows the level that an operation gets."""
        config = TrainConfig.from_flat(
            size=16,
            augment="randaugment",
            randaugment_layers=1,
            interpolation=interpolation,
            antialias=antialias,
        )
        boxes = np.array([(0, 0, 60, 47), (2, 3, 13, 11), (5, 1, 37, 9)])
        cases = [(level, box) for level in range(1, 255, 3) for box in boxes]
        plans = ViewPlans(
            boxes=np.array([[box] for _, box in cases], np.int32),
            flips=np.zeros((len(cases), 1), bool),
            operations=np.full((len(cases), 1, 1), NAMES.index("invert"), np.int32),
            arguments=np.zeros((len(cases), 1, 1, 4)),
            size=16,
        )
        one_run = {"num_threads": 1, "device_id": None, "prefetch_queue_depth": 1}
        pipeline = view_pipeline(
            config.resolved_view, "cpu", "cpu", batch_size=len(cases), **one_run
        )
        images = [np.full((60, 47, 3), level, np.uint8) for level, _ in cases]
        for name, values in {"images": images, **plan_inputs(plans, config.view)}.items():
            pipeline.feed_input(name, values)
        (views,) = pipeline.run()
        found = denormalize(torch.from_dlpack(views.as_tensor()).permute(0, 3, 1, 2), config.view)
        for (level, box), view in zip(cases, found, strict=True):
            assert (view == 255 - level).all(), (level, box)

    def test_the_central_crop_by_hand(self, photos: Path) -> None:
        """Crop a square of 0.875 of the shorter side, then resize: exact where nothing is resized.

        An image whose crop has the size of the view is only cut out.
        """
        config = TrainConfig.from_flat(data=str(photos), size=32, **OPERATORS)
        images = open_data(str(photos), "test")
        checked = 0
        for size in range(18, 106):
            loader = None
            for index in range(len(images)):
                image = images.image(index)
                height, width, _ = image.shape
                side = int(np.rint(min(height, width) * 0.875))
                if side != size:
                    continue
                policy = config.replace(size=size)
                loader = loader or build_evaluation_loader(policy, images, views=0, batch_size=64)
                (batch,) = loader
                top, left = (height - side) // 2, (width - side) // 2
                expected = image[top : top + side, left : left + side].transpose(2, 0, 1)
                found = levels(batch, policy)[index, 0]
                np.testing.assert_allclose(found, expected, atol=1e-3)
                checked += 1
        assert checked == len(images)

    @pytest.mark.parametrize("loader", [{"loader": "torch"}, OPERATORS], ids=str)
    @pytest.mark.parametrize("name", ["fp16", "bf16"])
    def test_half_precision(self, photos: Path, loader: dict, name: str) -> None:
        config = TrainConfig.from_flat(data=str(photos), precision="bf16", workers=0, **loader)
        (full,) = fastaug.build_loader(config.replace(views_dtype="fp32"))
        (half,) = fastaug.build_loader(config.replace(views_dtype=name))
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
        assert half.views.dtype == dtype
        assert half.flat.is_contiguous(memory_format=torch.channels_last)
        last_digit = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(half.views.float(), full.views, **last_digit)


def test_a_batch_is_dali_s_own_memory(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over = []

    def spy(tensor: object) -> torch.Tensor:
        handed_over.append(tensor.data_ptr())
        return from_dlpack(tensor)

    from_dlpack = torch.from_dlpack
    monkeypatch.setattr(torch, "from_dlpack", spy)
    batches = list(fastaug.build_loader(tiny(**OPERATORS, epochs=1)))
    assert [batch.views.data_ptr() for batch in batches] == handed_over
    assert [batch.flat.data_ptr() for batch in batches] == handed_over


def test_a_file_that_passes_the_look_and_stops_dali(
    tiny: Tiny, folder: Path, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The culprit of a batch is found and named; this run and the next go on without it."""
    monkeypatch.setattr(retry, "RETRY_PAUSES", (0.01,))
    config = tiny(loader="dali", max_bad=0.05)
    loader = fastaug.build_loader(config)
    victim = int(next(loader.batches()).indices[3])
    encoded = type(loader.images).encoded

    def damaged(images: object, index: int) -> bytes:
        content = encoded(images, index)
        return content[:10] if index == victim else content

    monkeypatch.setattr(type(loader.images), "encoded", damaged)
    seen = {int(i) for batch in loader for i in batch.indices}
    assert victim not in seen
    assert dict(loader.images.bad) == {victim: "DALI cannot decode it"}
    assert dict(fastaug.build_loader(config).images.bad) == {victim: "DALI cannot decode it"}


def test_a_failure_that_is_no_image_s_fault_marks_none(
    tiny: Tiny, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoding pipeline breaks behind the decoder, which takes every image."""
    config = tiny(**OPERATORS, crop="pad", size=20)
    loader = fastaug.build_loader(config)
    expected = list(loader)
    loader.set_epoch(0)

    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loader._stages._decoder._decoder, "outputs", breaks)
    broken = loader._stages
    found = list(loader)  # with pipelines that are built again
    assert loader._stages is not broken
    assert all(torch.equal(a.views, b.views) for a, b in zip(found, expected, strict=True))
    monkeypatch.undo()
    assert dict(fastaug.build_loader(config).images.bad) == {}


def test_without_dali(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastaug.pipelines.loader", None)
    with raises(ConfigError, "pip nvidia-dali-cuda120"):
        fastaug.build_loader(tiny(loader="dali"))


class TestDecode:
    def test_dali_s_levels_are_pillow_s(self, photos: Path) -> None:
        images = open_data(str(photos), "train")
        config = TrainConfig()
        for index in range(len(images)):
            np.testing.assert_array_equal(
                run_decode(config, images.encoded(index)), images.image(index)
            )

    def test_the_orientation_of_the_camera_is_ignored(self) -> None:
        """As the manifest's sizes are: a turned image would have others."""
        exif = Image.Exif()
        exif[0x112] = 6  # to be turned by 90 degrees
        upright = np.random.default_rng(0).integers(0, 256, (20, 32, 3), np.uint8)
        content = io.BytesIO()
        Image.fromarray(upright).save(content, "JPEG", exif=exif)
        decoded = run_decode(TrainConfig(), content.getvalue())
        expected = np.asarray(Image.open(io.BytesIO(content.getvalue())))
        np.testing.assert_array_equal(decoded, expected)

    def test_reflection_at_the_edges(self, folder: Path) -> None:
        images = open_data(str(folder), "train")
        config = TrainConfig.from_flat(crop="pad", size=20)
        expected = np.pad(images.image(4), ((PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")
        found = run_decode(config, images.encoded(4), padded=True)
        np.testing.assert_array_equal(found, expected)


def run_decode(config: TrainConfig, content: bytes, padded: bool = False) -> np.ndarray:
    alone = {"batch_size": 1, "num_threads": 1, "device_id": None, "prefetch_queue_depth": 1}
    pipeline = decode_pipeline("cpu", padded_size=config.view.size if padded else None, **alone)
    pipeline.feed_input("encoded", [np.frombuffer(content, np.uint8)])
    (images,) = pipeline.run()
    return np.asarray(images[0])
