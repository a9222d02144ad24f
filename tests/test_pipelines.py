"""DALI's pipelines: their views against the torch loader's, their memory, their GPU placement."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import nvidia.dali.ops as dali_ops
import pytest
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline
from PIL import Image

import fastaug
from fastaug.batch import ViewBatch
from fastaug.config import TrainConfig
from fastaug.data import manifest
from fastaug.data.plan import PAD, draw_plans
from fastaug.data.sources import open_split
from fastaug.data.views import NORMALISATION
from fastaug.errors import ConfigError, DataError
from fastaug.loaders import build_evaluation_loader
from fastaug.pipelines import decode
from fastaug.pipelines.decode import decode_pipeline
from fastaug.pipelines.views import view_pipeline

Tiny = Callable[..., TrainConfig]


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
    mean, deviation = (np.array(v)[:, None, None] for v in NORMALISATION[config.normalise])
    return batch.views.double().numpy() * deviation + mean


class TestViews:
    """The torch loader's views are those of tests/test_views.py, made by hand there."""

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"augment": "none"},
            {"crop_area": (0.08, 1.0), "crop_sampling": "tf", "size": 50},
            {"normalise": "cifar", "size": 8},
        ],
        ids=str,
    )
    def test_they_are_the_torch_loader_s(self, photos: Path, changes: dict) -> None:
        config = TrainConfig(**{"data": str(photos), "size": 32, "workers": 0} | changes)
        ours = list(fastaug.build_loader(replace(config, loader="dali")))
        theirs = list(fastaug.build_loader(config))
        assert len(ours) == len(theirs) == 1
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.labels, other.labels)
            # DALI takes its cubic weights from a table: a tenth of a level.
            difference = np.abs(levels(one, config) - levels(other, config))
            assert difference.max() < 0.15
            assert difference.mean() < 0.01

    @pytest.mark.parametrize("source", ["folder", "array"])
    def test_views_of_cifar_are_the_same_to_the_last_bit(
        self, tiny: Tiny, tmp_path: Path, source: str
    ) -> None:
        config = tiny(crop="pad", size=20, normalise="cifar")
        if source == "array":
            rng = np.random.default_rng(0)
            images = rng.integers(0, 256, (40, 20, 20, 3), np.uint8)
            np.savez(tmp_path / "set.npz", images=images, labels=np.arange(40) % 2)
            config = replace(config, data=str(tmp_path / "set.npz"))
        for one, other in zip(
            fastaug.build_loader(replace(config, loader="dali")),
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
        loader = fastaug.build_loader(replace(config, loader="dali"))
        keys, compared = list(loader.batches()), 0
        for key, one, other in zip(keys, loader, fastaug.build_loader(config), strict=True):
            sizes = np.full((len(key.indices), 2), 20)
            plans = draw_plans(config, key.epoch, key.purpose, key.indices, sizes)
            for place in range(len(key.indices)):
                for view, plan in enumerate(plans.of_image(place)):
                    if not inexact & {operation.name for operation in plan.operations}:
                        assert torch.equal(one.views[place, view], other.views[place, view])
                        compared += 1
        assert compared > 80

    def test_the_central_crop_by_hand(self, photos: Path) -> None:
        """Crop a square of 0.875 of the shorter side, then resize: exact where nothing is resized.

        An image whose crop has the size of the view is only cut out.
        """
        config = TrainConfig(data=str(photos), size=32, loader="dali")
        images = open_split(str(photos), "test")
        checked = 0
        for size in range(18, 106):
            loader = None
            for index in range(len(images)):
                image = images.image(index)
                height, width, _ = image.shape
                side = int(np.rint(min(height, width) * 0.875))
                if side != size:
                    continue
                policy = replace(config, size=size)
                loader = loader or build_evaluation_loader(policy, images, views=0, batch_size=64)
                (batch,) = loader
                top, left = (height - side) // 2, (width - side) // 2
                expected = image[top : top + side, left : left + side].transpose(2, 0, 1)
                found = levels(batch, policy)[index, 0]
                np.testing.assert_allclose(found, expected, atol=1e-3)
                checked += 1
        assert checked == len(images)

    def test_half_precision(self, photos: Path) -> None:
        config = TrainConfig(data=str(photos), loader="dali", precision="bf16")
        (full,) = fastaug.build_loader(config)
        (half,) = fastaug.build_loader(replace(config, views_dtype="fp16"))
        assert half.views.dtype == torch.float16
        assert half.flat.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(half.views.float(), full.views, atol=2e-3, rtol=1e-3)

    @pytest.mark.parametrize("changes", [{"prefetch": 1}, {"prefetch": 5}, {"decode_memory": 4}])
    def test_memory_and_depth_change_no_batch(self, tiny: Tiny, changes: dict) -> None:
        config = tiny(loader="dali")
        for one, other in zip(
            fastaug.build_loader(config),
            fastaug.build_loader(replace(config, **changes)),
            strict=True,
        ):
            assert torch.equal(one.views, other.views)


def check_that_kept_batches_stay(config: TrainConfig) -> None:
    """DALI does not write over what it has handed out."""
    loader = fastaug.build_loader(config)
    kept, copies = [], []
    for _ in range(3):
        for batch in loader:
            kept.append(batch.views)
            copies.append(batch.views.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


class TestMemory:
    def test_a_batch_is_dali_s_own_memory(
        self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handed_over = []

        def spy(tensor: object) -> torch.Tensor:
            handed_over.append(tensor.data_ptr())
            return from_dlpack(tensor)

        from_dlpack = torch.from_dlpack
        monkeypatch.setattr(torch, "from_dlpack", spy)
        batches = list(fastaug.build_loader(tiny(loader="dali")))
        assert [batch.views.data_ptr() for batch in batches] == handed_over
        assert [batch.flat.data_ptr() for batch in batches] == handed_over

    def test_batches_that_are_kept_stay_as_they_were(self, tiny: Tiny) -> None:
        check_that_kept_batches_stay(tiny(loader="dali"))

    def test_it_does_not_grow_from_epoch_to_epoch(self, tiny: Tiny) -> None:
        """Resident memory after 20 epochs, against that after the second; in a fresh process."""
        script = (
            "import json, sys, fastaug\n"
            "from fastaug.config import TrainConfig\n"
            "def resident():\n"
            "    pages = int(open('/proc/self/statm').read().split()[1])\n"
            "    return pages * 4096 / 2**20\n"
            "config = TrainConfig.from_dict(json.loads(sys.argv[1]))\n"
            "loader = fastaug.build_loader(config)\n"
            "sizes = []\n"
            "for epoch in range(20):\n"
            "    count = sum(1 for batch in loader)\n"
            "    assert count == len(loader)\n"
            "    sizes.append(resident())\n"
            "print(sizes[1], sizes[-1])\n"
        )
        config = tiny(loader="dali", augment="randaugment", size=64, batch_size=16)
        command = [sys.executable, "-c", script, json.dumps(config.to_dict())]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        second, last = map(float, result.stdout.split())
        assert last < 1.05 * second, (second, last)


@pytest.mark.parametrize("augment", ["crop-flip", "randaugment"])
def test_a_pass_that_is_broken_off_leaves_nothing_behind(tiny: Tiny, augment: str) -> None:
    config = tiny(loader="dali", augment=augment)
    expected = list(fastaug.build_loader(config))
    loader = fastaug.build_loader(config)
    first = next(iter(loader))
    rest = list(loader)
    assert torch.equal(first.views, expected[0].views)
    assert len(rest) == len(expected) - 1
    for one, other in zip(rest, expected[1:], strict=True):
        assert torch.equal(one.views, other.views)


def test_a_file_that_passes_the_look_and_stops_dali(
    tiny: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The culprit of a batch is found, named, and marked for the next run."""
    marked = []
    monkeypatch.setattr(manifest, "mark_bad", lambda images, index, reason: marked.append(index))
    loader = fastaug.build_loader(tiny(loader="dali"))
    victim = int(next(loader.batches()).indices[3])
    encoded = type(loader.images).encoded

    def damaged(images: object, index: int) -> bytes:
        content = encoded(images, index)
        return content[:10] if index == victim else content

    monkeypatch.setattr(type(loader.images), "encoded", damaged)
    name = loader.images.files[victim].name
    with pytest.raises(DataError, match=rf"{name}: DALI cannot .*--resume goes on"):
        list(loader)
    assert marked == [victim]


def test_a_failure_that_is_no_image_s_fault_marks_none(
    tiny: Tiny, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoding pipeline breaks behind the decoder, which takes every image."""
    config = tiny(loader="dali", crop="pad", size=20)
    loader = fastaug.build_loader(config)
    next(iter(loader))  # the pipelines are built

    def breaks(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loader._stages._decoder, "outputs", breaks)
    monkeypatch.setattr(decode, "reflect", breaks)
    with pytest.raises(DataError, match=r"^DALI stopped while decoding: out of memory$"):
        list(loader)
    monkeypatch.undo()
    assert dict(fastaug.build_loader(config).images.bad) == {}


def test_a_file_that_is_of_another_size_than_before(
    tiny: Tiny, folder: Path, tmp_path: Path
) -> None:
    """The plans are made for the size that the manifest has."""
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    loader = fastaug.build_loader(tiny(data=str(data), loader="dali"))
    file = loader.images.files[next(loader.batches()).indices[2]]
    Image.new("RGB", (30, 10)).save(file)
    with pytest.raises(DataError, match=rf"{file.name}: the file has changed"):
        list(loader)


def test_without_dali(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastaug.pipelines.loader", None)
    with pytest.raises(ConfigError, match="pip install nvidia-dali-cuda120"):
        fastaug.build_loader(tiny(loader="dali"))


class TestDecode:
    def test_dali_s_levels_are_pillow_s(self, photos: Path) -> None:
        images = open_split(str(photos), "train")
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

    def test_a_gpu_decodes_with_the_same_settings(self) -> None:
        (images,) = decode_pipeline(TrainConfig(), "gpu", **GPU)._graph_out
        settings = images.source._op._init_args
        assert settings["jpeg_fancy_upsampling"] is True  # a CPU does so anyway
        assert settings["adjust_orientation"] is False

    def test_reflection_at_the_edges(self, folder: Path) -> None:
        images = open_split(str(folder), "train")
        config = TrainConfig(crop="pad", size=20)
        expected = np.pad(images.image(4), ((PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")
        np.testing.assert_array_equal(run_decode(config, images.encoded(4)), expected)


def run_decode(config: TrainConfig, content: bytes) -> np.ndarray:
    pipeline = decode_pipeline(
        config, "cpu", batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1
    )
    pipeline.feed_input("encoded", [np.frombuffer(content, np.uint8)])
    (images,) = pipeline.run()
    return np.asarray(images[0])


# --- the graphs of a GPU, which cannot be built here ---


class Operator(NamedTuple):
    name: str
    """In DALI's registry."""
    device: str
    sources: list[str]
    """Devices where its inputs were made."""
    inputs: list[str]
    """Devices where it finds its positional inputs, which a GPU takes on the GPU."""
    arguments: list[str]
    """Devices where it finds its named inputs, which are always on the host."""


def operators(pipeline: Pipeline) -> Iterator[Operator]:
    """Each operator of a graph."""
    waiting, seen = list(pipeline._graph_out), set()
    while waiting:
        operator = waiting.pop().source
        if id(operator) in seen:
            continue
        seen.add(id(operator))
        edges = [
            edge
            for given in operator.inputs
            for edge in (given if isinstance(given, list) else [given])
        ]
        waiting += edges
        name = getattr(operator._op, "schema_name", None) or type(operator._op).__name__
        devices, positional = [edge.device for edge in edges], operator._spec.NumRegularInput()
        yield Operator(
            name,
            operator._op.device,
            [edge.source._op.device for edge in edges],
            devices[:positional],
            devices[positional:],
        )


def misplaced(pipeline: Pipeline) -> list[str]:
    """Operators that DALI does not have for the device, or with an input on the wrong one."""
    registry = {
        "cpu": dali_ops.cpu_ops(),
        "gpu": dali_ops.gpu_ops(),
        "mixed": dali_ops.mixed_ops(),
    }
    wrong = []
    for name, device, sources, inputs, arguments in operators(pipeline):
        if name not in registry[device]:
            wrong.append(f"no {name} for {device}")
        if device != "gpu" and {"gpu", "mixed"} & set(sources):
            wrong.append(f"{name} on {device} after a GPU")
        if (device == "gpu" and "cpu" in inputs) or "gpu" in arguments:
            wrong.append(f"{name} on {device} with an input on the other one")
    return wrong


GPU = {"batch_size": 4, "num_threads": 1, "device_id": 0}
POLICIES = [
    {"augment": "none"},
    {},
    {"crop": "pad"},
    {"views_dtype": "fp16", "precision": "fp16", "decode_memory": 16},
    {"augment": "randaugment"},
    {"augment": "randaugment", "randaugment_policy": "dali", "loader": "dali"},
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("changes", POLICIES, ids=str)
class TestGpuPlacement:
    @pytest.mark.parametrize("decoded_on", ["cpu", "gpu"])
    def test_every_operator_has_a_place(self, changes: dict, decoded_on: str) -> None:
        config = TrainConfig(**changes)
        views = view_pipeline(config, "gpu", decoded_on, **GPU)
        decoding = decode_pipeline(config, "gpu", **GPU)
        assert misplaced(views) == []
        assert misplaced(decoding) == []
        places = {name: device for name, device, *_ in operators(decoding)}
        assert places["decoders__Image"] == "mixed"
        assert [out.device for out in (*views._graph_out, *decoding._graph_out)] == ["gpu", "gpu"]

    def test_all_work_on_pixels_is_on_the_gpu(self, changes: dict) -> None:
        """What stays on the host are the plans: their inputs, subscripts and conditions."""
        views = view_pipeline(TrainConfig(**changes), "gpu", "gpu", **GPU)
        on_host = {name for name, device, *_ in operators(views) if device == "cpu"}
        assert on_host <= {
            *("ExternalSource", "_TensorSubscript", "_ArithmeticGenericOp", "Cast", "Reshape"),
            *("_conditional__Split", "_conditional__Merge", "Constant"),
            *("transforms__Shear", "transforms__Translation"),
        }

    def test_the_same_operators_run_on_the_cpu(self, changes: dict) -> None:
        on_cpu = {**GPU, "device_id": None}
        config = TrainConfig(**changes)
        ours = sorted(name for name, *_ in operators(view_pipeline(config, "cpu", "cpu", **on_cpu)))
        gpu = sorted(name for name, *_ in operators(view_pipeline(config, "gpu", "gpu", **GPU)))
        assert ours == gpu


class TestTheWalkFindsMistakes:
    @staticmethod
    def graph(device: str) -> Pipeline:
        @pipeline_def(**GPU)
        def define() -> DataNode:
            data = fn.external_source(name="data", device="gpu", dtype=types.UINT8, ndim=3)
            flipped = fn.flip(data)
            return fn.rotate(flipped.cpu() if device == "cpu" else flipped, angle=10.0)

        return define()

    def test_an_operator_that_a_gpu_does_not_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert misplaced(self.graph("gpu")) == []
        has = set(dali_ops.gpu_ops())
        monkeypatch.setattr(dali_ops, "gpu_ops", lambda: has - {"Flip"})
        assert misplaced(self.graph("gpu")) == ["no Flip for gpu"]

    def test_an_input_that_was_left_on_the_host(self) -> None:
        @pipeline_def(**GPU)
        def define() -> DataNode:
            data = fn.external_source(name="data", device="gpu", dtype=types.UINT8, ndim=3)
            return fn.filter(data, types.Constant(np.ones((3, 3), np.float32)))

        assert misplaced(define()) == ["Filter on gpu with an input on the other one"]

    def test_a_graph_that_goes_back_to_the_host(self) -> None:
        assert misplaced(self.graph("cpu")) == ["Rotate on cpu after a GPU"]
