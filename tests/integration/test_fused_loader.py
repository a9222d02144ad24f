"""The loader with the fused engine: its batches against the torch loader's; how it is chosen."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises
from image_sets import open_data
from mutants import encode
from PIL import Image

import fastaug
from fastaug.config import TrainConfig
from fastaug.data import retry
from fastaug.engine.loaders import build_evaluation_loader
from fastaug.errors import DataError, KernelUnavailableError
from fastaug.normalization import NORMALIZATION
from fastaug.toolchain.admission import AdmissionReport
from fastaug.views import admission, engine, native
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]
FUSED = {"loader": "dali", "views_engine": "fused"}
LEVEL = 1 / min(min(deviation) for _, deviation in NORMALIZATION.values())


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two classes of eight pictures each, in all shapes: smooth, with noise, JPEG and PNG."""
    rng = np.random.default_rng(5)
    root = tmp_path_factory.mktemp("photos")
    for number in range(32):
        height, width = rng.integers(9, 130, 2)
        y, x = np.mgrid[0:height, 0:width]
        waves = np.stack([np.sin(x / 9 + number), np.cos(y / 7), np.sin((x + y) / 5)], -1)
        levels = 128 + 80 * waves + rng.normal(0, 10, waves.shape)
        folder = root / ("train" if number < 16 else "test") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if number % 5 == 0 else "JPEG"
        picture = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
        (folder / f"{number:02}.{kind.lower()}").write_bytes(encode(picture, kind))
    return str(root)


@pytest.fixture
def in_memory(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (70, 20, 20, 3), np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(70) % 2)
    return str(tmp_path / "set.npz")


def same(one: list[ViewBatch], other: list[ViewBatch], most: float) -> None:
    """most: the largest difference of two levels."""
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.labels, b.labels)
        assert a.views.dtype == b.views.dtype
        assert a.views.stride() == b.views.stride()
        assert (a.views.float() - b.views.float()).abs().max() <= most * LEVEL


class TestViews:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"augment": "none"},
            {"crop_area": (0.08, 1.0), "crop_sampling": "tf", "size": 50},
            {"normalize": "cifar", "size": 8, "antialias": True},
            {"normalize": ((0.5, 0.4, 0.3), 0.25)},
            {"interpolation": "bilinear", "size": 31},
            {"interpolation": "bilinear", "antialias": True, "size": 8},
        ],
        ids=str,
    )
    def test_of_files_are_the_torch_loader_s(self, photos: str, changes: dict) -> None:
        config = TrainConfig.from_flat(
            **{"data": photos, "size": 32, "batch_size": 16, "workers": 0} | changes
        )
        ours = list(fastaug.build_loader(config.replace(**FUSED)))
        same(ours, list(fastaug.build_loader(config)), 2e-4)

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    def test_in_half_precision(self, photos: str, dtype: str) -> None:
        config = TrainConfig.from_flat(
            data=photos, batch_size=16, precision="bf16", views_dtype=dtype
        )  # type: ignore[arg-type]
        ours = list(fastaug.build_loader(config.replace(**FUSED)))
        # The last bit, where fp32 differed in its last one.
        same(ours, list(fastaug.build_loader(config)), 0.15 if dtype == "fp16" else 1.0)

    def test_with_randaugment(self, photos: str) -> None:
        """Levels before the operations may differ by one where a sum meets a whole level."""
        config = TrainConfig.from_flat(
            data=photos, size=40, views=8, batch_size=32, augment="randaugment", crop_area=(0.2, 1)
        )
        ours = list(fastaug.build_loader(config.replace(**FUSED)))
        theirs = list(fastaug.build_loader(config))
        pairs = zip(ours, theirs, strict=True)
        off = torch.stack([(a.views - b.views).abs() for a, b in pairs])
        assert (off > 1e-4).float().mean() < 1e-5

    @pytest.mark.parametrize("augment", ["none", "crop-flip", "randaugment"])
    @pytest.mark.parametrize("batch_size", [8, 40])
    def test_of_data_in_memory_are_the_torch_loader_s_to_the_last_bit(
        self, in_memory: str, augment: str, batch_size: int
    ) -> None:
        config = TrainConfig.from_flat(
            data=in_memory,
            crop="pad",
            size=20,
            normalize="cifar",
            augment=augment,  # type: ignore[arg-type]
            batch_size=batch_size,
        )
        ours, theirs = (fastaug.build_loader(c) for c in (config.replace(**FUSED), config))
        for _ in range(2):  # epochs
            same(list(ours), list(theirs), 0)

    def test_evaluation_views(self, photos: str) -> None:
        config = TrainConfig.from_flat(data=photos, workers=0)
        images = open_data(photos, "test")
        for views in (0, 3):
            ours, theirs = (
                build_evaluation_loader(c, images, views=views, batch_size=10)
                for c in (config.replace(**FUSED), config)
            )
            same(list(ours), list(theirs), 2e-4)


class TestRuns:
    @pytest.mark.parametrize("at", [1, 2, 5])
    def test_it_goes_on_where_it_was_stopped(self, in_memory: str, at: int) -> None:
        """Batches that are made at once are handed out one by one."""
        config = TrainConfig.from_flat(data=in_memory, crop="pad", size=20, batch_size=16, **FUSED)
        whole = list(fastaug.build_loader(config))
        first = fastaug.build_loader(config)
        before = list(islice(first, at))
        second = fastaug.build_loader(config)
        second.load_state_dict(first.state_dict())
        same([*before, *second], whole, 0)

    def test_a_file_that_changed_under_the_run(
        self, tmp_path: Path, photos: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retry, "RETRY_PAUSES", (0.01,))
        shutil.copytree(photos, tmp_path / "copy")
        config = TrainConfig.from_flat(data=str(tmp_path / "copy"), batch_size=8, **FUSED)
        loader = fastaug.build_loader(config)
        victim = sorted((tmp_path / "copy/train").rglob("*.jpeg"))[0]
        victim.write_bytes(encode(Image.new("RGB", (6, 5)), "JPEG"))
        with raises(DataError, victim.name, "changed"):
            list(loader)

    def test_views_keep_their_memory_when_the_loader_is_gone(self, in_memory: str) -> None:
        config = TrainConfig.from_flat(data=in_memory, crop="pad", size=20, batch_size=8, **FUSED)
        expected = [batch.views.clone() for batch in fastaug.build_loader(config)]
        batches = list(fastaug.build_loader(config))
        for batch, views in zip(batches, expected, strict=True):
            assert torch.equal(batch.views, views)

    def test_an_open_pass_at_the_end_of_the_process(self, in_memory: str) -> None:
        """torch aborts where it finds a tensor and a view of it in what Python throws away."""
        script = (
            "import fastaug, types\n"
            f"config = fastaug.TrainConfig.from_flat(data={in_memory!r}, crop='pad', size=20,"
            " batch_size=8, loader='dali', views_engine='fused')\n"
            "kept = types.SimpleNamespace(batches=iter(fastaug.build_loader(config)))\n"
            "kept.itself, kept.batch = kept, next(kept.batches)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_in_a_forked_child(self, in_memory: str) -> None:
        """Which has none of the threads that its parent had."""
        config = TrainConfig.from_flat(
            data=in_memory, crop="pad", size=20, batch_size=8, workers=2, **FUSED
        )
        loader = fastaug.build_loader(config)
        expected = list(loader)

        def child() -> None:
            signal.alarm(60)
            loader.set_epoch(0)
            same(list(loader), expected, 0)
            os._exit(7)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(90)
        assert process.exitcode == 7

    def test_from_several_threads_at_once(self) -> None:
        images = [torch.randint(0, 256, (60, 50, 3), dtype=torch.uint8) for _ in range(4)]
        plan = fastaug.plan_views(images, views=8, size=64, augment="randaugment")
        expected = fastaug.make_views(images, plan, threads=1)
        wrong: list[int] = []

        def work(number: int) -> None:
            made = [fastaug.make_views(images, plan, threads=1 + number) for _ in range(5)]
            wrong.extend(number for views in made if not torch.equal(views, expected))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestChoice:
    @pytest.fixture(autouse=True)
    def unknown_engines(self, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "_reports", {})

    def config(self, **changes: object) -> TrainConfig:
        return TrainConfig.from_flat(**{"loader": "dali"} | changes)  # type: ignore[arg-type]

    def test_auto_takes_the_fused_one_and_says_so_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "fastaug"):
            chosen = engine.resolve_engine(self.config().view, torch.device("cpu"))
            engine.resolve_engine(self.config().view, torch.device("cpu"), report=False)
        assert isinstance(chosen, native.NativeViews)
        assert caplog.messages.count("views engine: fused (native)") == 1

    def test_dali_means_its_operators(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "fastaug"):
            config = self.config(views_engine="dali")
            assert engine.resolve_engine(config.view, torch.device("cpu")) is None
        assert caplog.messages == ["views engine: dali"]

    def test_another_device(self) -> None:
        images = [torch.zeros(9, 9, 3, dtype=torch.uint8)]
        plan = fastaug.plan_views(images, views=2, size=8)
        with raises(KernelUnavailableError, "cpu meta"):
            fastaug.make_views([image.to("meta") for image in images], plan)

    def test_dali_s_own_policy_is_for_its_operators(self, caplog: pytest.LogCaptureFixture) -> None:
        config = self.config(augment="randaugment", randaugment_policy="dali")
        with caplog.at_level(logging.INFO, "fastaug"):
            assert engine.resolve_engine(config.view, torch.device("cpu")) is None
        assert "views engine: dali (its own RandAugment policy)" in caplog.messages

    def test_without_a_compiler(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(native, "_why_not", lambda: "needs a C++ compiler: install g++")
        with caplog.at_level(logging.INFO, "fastaug"):
            assert engine.resolve_engine(self.config().view, torch.device("cpu")) is None
        assert "views engine: dali (fused views on cpu: needs a C++ compiler" in caplog.text
        with raises(KernelUnavailableError, "--views-engine dali"):
            engine.resolve_engine(self.config(views_engine="fused").view, torch.device("cpu"))

    def test_one_that_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        report = AdmissionReport("native", "cpu", False, 3, "off by 7 x the tolerance, bicubic")
        monkeypatch.setattr(admission, "compare", lambda *_: report)
        assert engine.resolve_engine(self.config().view, torch.device("cpu")) is None
        assert "off by 7 x the tolerance" in caplog.text
        with raises(KernelUnavailableError, "3 7"):
            engine.resolve_engine(self.config(views_engine="fused").view, torch.device("cpu"))


class TestAdmission:
    def test_the_kernel_is_admitted(self) -> None:
        report = admission.compare(native.NativeViews(), torch.device("cpu"))
        assert report.admitted, str(report)
        assert report.cases == 12

    @pytest.mark.parametrize("kind", ["level", "flip", "operation", "nan", "shape", "raises"])
    def test_one_that_is_wrong_is_refused(self, kind: str) -> None:
        class Wrong(native.NativeViews):
            def start(self, pictures, plans, form, **more):  # type: ignore[no-untyped-def]
                if kind == "raises":
                    raise RuntimeError("no\nsuch thing")
                if kind == "flip":
                    plans = replace(plans, flips=~plans.flips)
                if kind == "operation":
                    plans = replace(
                        plans, operations=np.where(plans.operations == 2, 4, plans.operations)
                    )
                views = super().start(pictures, plans, form, **more).finish()
                if kind == "level":
                    views[0, 0, 1, 2, 3] += LEVEL / 4
                if kind == "nan":
                    views[0, 0, 0, 0, 0] = torch.nan
                views = views[:, :1] if kind == "shape" else views
                return type("Done", (), {"finish": lambda self: views})()

        report = admission.compare(Wrong(), torch.device("cpu"))
        assert not report.admitted
        if kind == "raises":
            assert report.worst == "bilinear, fp32: RuntimeError: no"
