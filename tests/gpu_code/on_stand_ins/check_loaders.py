"""Loaders on a stand-in GPU: which stream does what, and where the host waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nullgpu_client as gpu
import numpy as np
import pytest
import torch
from image_sets import open_data
from nullgpu_client import Record
from training import run

import fastaug
from fastaug.config import TrainConfig
from fastaug.engine.evaluation import Evaluation
from fastaug.engine.learner import Learner
from fastaug.engine.loaders import build_evaluation_loader, scan_configured
from fastaug.errors import ConfigError
from fastaug.views.batch import ViewBatch

STAND_INS = {"devices": 2, "functional": True, "late_copies": True}
Tiny = Callable[..., TrainConfig]
DEVICE = torch.device("cuda:1")
VIEWS = 8 * 2 * 3 * 16 * 16  # numbers in a batch of the tiny config


@pytest.fixture
def in_memory(tmp_path: Path) -> str:
    """Images of a .npz file, which a GPU keeps in its memory."""
    numbers = np.random.default_rng(0)
    images = {
        name: numbers.integers(0, 256, (count, 16, 16, 3), np.uint8)
        for name, count in (("images", 24), ("test_images", 8))
    }
    labels = {"labels": np.arange(24) % 3, "test_labels": np.arange(8) % 3}
    np.savez(tmp_path / "images.npz", **images, **labels)
    return str(tmp_path / "images.npz")


def batches(config: TrainConfig) -> list[ViewBatch]:
    return list(fastaug.build_loader(config))


def assert_same_batches(config: TrainConfig, tolerance: float = 0) -> list[ViewBatch]:
    found = batches(config.replace(device=str(DEVICE)))
    expected = batches(config.replace(device="cpu"))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.views.device == ours.labels.device == DEVICE
        assert ours.indices.device.type == "cpu"
        assert ours.views.dtype == theirs.views.dtype
        assert torch.equal(ours.indices, theirs.indices)
        assert torch.equal(ours.labels.cpu(), theirs.labels)
        torch.testing.assert_close(ours.views.cpu(), theirs.views, rtol=0, atol=tolerance)
    return found


@pytest.fixture
def marked() -> Callable[[], list[Record]]:
    """The records since the start of a test."""
    before = len(gpu.records())
    return lambda: gpu.records()[before:]


class TestTorchLoader:
    def test_uploads_are_pinned_and_on_a_stream_of_their_own(
        self, tiny: Tiny, marked: Callable
    ) -> None:
        assert_same_batches(tiny(epochs=1))
        uploads = gpu.selected("memcpy", name="H2D", of=marked())
        assert [r.bytes for r in uploads].count(4 * VIEWS) == 4
        assert {(r.device, r.name) for r in uploads} == {(1, "H2D")}
        assert 0 not in {r.stream for r in uploads}
        assert gpu.selected("error", of=marked()) == []

    def test_the_next_batch_is_uploaded_before_this_one_is_used(
        self, tiny: Tiny, marked: Callable
    ) -> None:
        for _ in fastaug.build_loader(tiny(device=str(DEVICE), epochs=1)):
            gpu.mark("step")
        kinds = [
            "upload" if r.kind == "memcpy" else "step"
            for r in marked()
            if r.name == "step" or (r.kind == "memcpy" and r.bytes == 4 * VIEWS)
        ]
        assert kinds == ["upload", "upload", "step", "upload", "step", "upload", "step", "step"]

    def test_the_current_stream_waits_for_each_batch(self, tiny: Tiny, marked: Callable) -> None:
        batches(tiny(device=str(DEVICE), epochs=1))
        waits = gpu.selected("stream_wait", of=marked())
        assert {(r.device, r.stream) for r in waits} == {(1, 0)}
        assert len(waits) == 4


class TestFusedViews:
    def test_the_engine_does_not_wait_for_the_training(self, tiny: Tiny, in_memory: str) -> None:
        config = tiny(data=in_memory, loader="dali", views_engine="fused", size=8, batch_size=8)
        loader = fastaug.build_loader(config.replace(device=str(DEVICE)))
        next(iter(loader))  # builds the stages
        gpu.mark("pass")
        count = len(list(loader))
        gpu.mark("/pass")
        waits = gpu.selected("stream_wait", between=("pass", "/pass"))
        # Only the current stream waits, for each batch.
        assert {r.stream for r in waits} == {0}
        assert 0 < len(waits) <= count
        assert gpu.selected("memcpy", name="pageable", between=("pass", "/pass")) == []
        kernels = gpu.selected("kernel", name="views_", between=("pass", "/pass"))
        assert {r.device for r in kernels} == {1}
        assert 0 not in {r.stream for r in kernels}
        assert_same_batches(config, 1e-6)

    def test_make_views_waits_for_the_current_stream(self) -> None:
        image = torch.randint(256, (12, 12, 3), dtype=torch.uint8).to(DEVICE)
        plan = fastaug.plan_views([image], views=1, size=8)
        gpu.mark("make")
        fastaug.make_views([image], plan)
        gpu.mark("/make")
        waits = gpu.selected("stream_wait", between=("make", "/make"))
        assert [r.stream == 0 for r in waits] == [False, True]

    def test_images_in_memory_are_on_the_gpu_once(
        self, tiny: Tiny, in_memory: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = tiny(data=in_memory, loader="dali", device=str(DEVICE), size=8)
        images = fastaug.build_loader(config).images
        gpu.mark("upload")
        loaders = [
            build_evaluation_loader(config, images, views=views, batch_size=8) for views in (0, 2)
        ]
        for loader in loaders:
            next(iter(loader))
        gpu.mark("/upload")
        assert images.array is not None
        copies = gpu.selected("memcpy", between=("upload", "/upload"))
        assert [r.bytes for r in copies].count(images.array.nbytes) == 1
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2**34))
        copy = images.subset(np.arange(len(images)), "copy")
        with pytest.raises(ConfigError, match="free memory"):
            next(iter(build_evaluation_loader(config, copy, views=0, batch_size=8)))


class TestDecoder:
    @pytest.mark.parametrize("engine", ["dali", "fused"])
    def test_outputs_are_bound_to_the_stream_of_the_engine(
        self, tiny: Tiny, engine: str, marked: Callable
    ) -> None:
        config = tiny(loader="dali", views_engine=engine, size=8, epochs=1)
        torch.zeros(1, device="cuda:0")  # another GPU is the current one
        with torch.cuda.device(0):
            assert_same_batches(config, 1e-6)
        records = marked()
        outputs = gpu.selected("dali", of=records)
        assert {r.device for r in outputs} == {1}
        assert 0 not in {r.stream for r in outputs}
        name = "DALI" if engine == "dali" else "views_"
        work = gpu.selected("kernel", name=name, of=records)
        assert {(r.device, r.stream) for r in work} == {(r.device, r.stream) for r in outputs}
        assert gpu.selected("memcpy", name="D2D", of=records) == []
        assert {(r.device, r.stream) for r in gpu.selected("stream_wait", of=records)} == {(1, 0)}


def test_a_step_waits_once_for_the_step_before(tiny: Tiny) -> None:
    """Also with an optimizer that cannot skip a step by itself."""
    gpu.mark_calls(Learner, "start_step")
    config = tiny(epochs=4, kernel="reference", device=str(DEVICE), log_every=100, tta=0)
    for optimizer in ("sgd", "lamb"):
        before = len(gpu.records())
        run(config.replace(optimizer=optimizer, lr=0.001), optimizer)
        records = gpu.records()[before:]
        starts = [i for i, r in enumerate(records) if r.name == "Learner.start_step"]
        for first, second in ((1, 2), (5, 6), (6, 7)):  # within an epoch
            step = records[starts[first] : starts[second]]
            assert [r.kind for r in gpu.syncs(of=step)] == ["sync_event"]
            pageable = gpu.selected("memcpy", name="pageable", of=step)
            assert pageable == []


def test_an_evaluation_waits_once_for_all_its_batches(tiny: Tiny) -> None:
    config = tiny(kernel="reference", device=str(DEVICE))
    images = scan_configured(config.data, open_data(config.data.data, "test"))
    evaluation = Evaluation(images, config, DEVICE, batch_size=4)
    model = fastaug.build_model("wrn-10-1", num_classes=3).to(DEVICE)
    evaluation.measure(model, views=2)  # builds the loaders
    gpu.mark("measure")
    evaluation.measure(model, views=2)
    gpu.mark("/measure")
    within = ("measure", "/measure")
    assert gpu.count("op", name="aten::convolution", between=within) > 10
    # The sums of the two passes: over central crops, and over views.
    assert [r.kind for r in gpu.syncs(between=within)] == ["sync_stream"] * 2
    assert gpu.selected("memcpy", name="H2D pageable", between=within) == []
