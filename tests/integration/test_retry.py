"""Data that breaks under a running loader: the batches are those of a loader that knew of it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises
from image_sets import open_data
from PIL import Image
from shard_writers import WRITERS
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import fastaug
from fastaug.config import TrainConfig
from fastaug.data import retry, torch_loader
from fastaug.data.image_set import ImageSet
from fastaug.engine.loaders import build_evaluation_loader, scan_configured
from fastaug.errors import DataError
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]
Said = pytest.LogCaptureFixture

FAR = 15
"""A batch of the 18 of an epoch that no loader has read when the first one is handed out."""
LOADERS: dict[str, dict[str, Any]] = {
    "torch": {"loader": "torch", "workers": 0},
    "torch workers": {"loader": "torch", "workers": 2},
    "dali": {"loader": "dali", "workers": 1},
}
every_loader = pytest.mark.parametrize("kind", LOADERS)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:300]),
    "noise": lambda file: file.write_bytes(b"no image"),
    "gone": Path.unlink,
    "another size": lambda file: Image.new("RGB", (30, 10)).save(file),
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_PAUSES", (0.0, 0.01))


@pytest.fixture
def data(folder: Path, tmp_path: Path, compiled_cache: Path) -> Path:
    """36 images of 20 px, to be spoilt."""
    return Path(shutil.copytree(folder, tmp_path / "data"))


@pytest.fixture
def make(tiny: Tiny, data: Path) -> Tiny:
    """The config of a loader of two images a batch."""
    shared = {"data": str(data), "batch_size": 4, "max_bad": 0.2, "prefetch": 1}
    return lambda kind, **changes: tiny(**{**shared, **LOADERS[kind], **changes})


def scanned(config: TrainConfig) -> ImageSet:
    return scan_configured(config.data, open_data(config.data.data, "train"))


def knowing(images: ImageSet, *bad: int) -> ImageSet:
    """The same set as a scan that finds some images bad returns it."""
    assert images.manifest is not None
    manifest = replace(images.manifest, bad=dict.fromkeys(bad, "known before"))
    return replace(images, manifest=manifest)


def two_epochs(config: TrainConfig, images: ImageSet) -> list[ViewBatch]:
    loader = fastaug.build_loader(config, images)
    return [*loader, *loader]


def assert_same(ours: list[ViewBatch], theirs: list[ViewBatch]) -> None:
    assert [b.indices.tolist() for b in ours] == [b.indices.tolist() for b in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.views, other.views)


def lines(caplog: Said, words: str) -> list[str]:
    return [message for message in caplog.messages if words in message]


class TestQuarantine:
    @every_loader
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_the_run_goes_on_as_one_that_knew(
        self, make: Tiny, kind: str, damage: str, caplog: Said
    ) -> None:
        config = make(kind)
        images = scanned(config)
        whole = two_epochs(config, images)
        victim = int(whole[FAR].indices[1])
        known = two_epochs(config, knowing(images, victim))
        loader = fastaug.build_loader(config, images)
        batches = iter(loader)
        found = [next(batches)]
        DAMAGES[damage](Path(images.where(victim)))
        found += [*batches, *loader]
        assert_same(found, whole[:FAR] + known[FAR:])
        assert victim not in {int(i) for batch in found[FAR:] for i in batch.indices}
        assert (loader.epoch, loader.position) == (2, 0)
        assert list(loader.images.bad) == [victim]
        (line,) = lines(caplog, "continues without it")
        assert line.startswith(f"{Path(images.where(victim))}: {loader.images.bad[victim]}; ")
        if damage == "another size":
            assert "the file has changed" in line
        if damage != "gone":  # what is whole is found good by another run, of whatever size it is
            again = scan_configured(config.data, open_data(config.data.data, "train"))
            assert list(again.bad) == ([] if damage == "another size" else [victim])

    @every_loader
    @pytest.mark.parametrize("damage", ["truncated", "another size"])
    def test_in_a_batch_of_the_next_epoch_that_is_prefetched(
        self, make: Tiny, kind: str, damage: str, caplog: Said
    ) -> None:
        config = make(kind, prefetch=2)
        images = scanned(config)
        whole = two_epochs(config, images)
        # Read early in the first epoch, and at the start of the second one.
        read = {int(i) for batch in whole[:10] for i in batch.indices}
        place, victim = next(
            (place, int(i))
            for place, batch in enumerate(whole[18:])
            for i in batch.indices
            if int(i) in read
        )
        assert place < 2
        known = two_epochs(config, knowing(images, victim))
        loader = fastaug.build_loader(config, images)
        batches = iter(loader)
        found = [next(batches) for _ in range(10)]
        DAMAGES[damage](Path(images.where(victim)))
        found += batches
        assert (loader.epoch, loader.position) == (1, 0)
        assert loader.images.bad == {}  # not before its batch
        assert lines(caplog, "continues without it") == []
        state = loader.state_dict()
        found += loader
        assert_same(found, whole[: 18 + place] + known[18 + place :])
        assert list(loader.images.bad) == [victim]
        resumed = fastaug.build_loader(config, images)
        resumed.load_state_dict(state)
        assert_same(list(resumed), found[18:])

    @pytest.mark.parametrize("crop", ["resized", "pad"])
    @pytest.mark.parametrize("damage", ["truncated", "another size"])
    def test_with_dali_s_operators(self, make: Tiny, crop: str, damage: str) -> None:
        config = make("dali", views_engine="dali", crop=crop, size=20, batch_size=8)
        images = scanned(config)
        whole = list(fastaug.build_loader(config, images))
        victim = int(whole[-1].indices[0])
        known = list(fastaug.build_loader(config, knowing(images, victim)))
        loader = fastaug.build_loader(config, images)
        batches = iter(loader)
        found = [next(batches)]
        DAMAGES[damage](Path(images.where(victim)))
        assert_same(found + list(batches), whole[:-1] + known[-1:])

    @every_loader
    def test_several_in_one_batch_and_among_the_substitutes(self, make: Tiny, kind: str) -> None:
        config = make(kind, batch_size=24, views=2)  # 12 images a batch
        images = scanned(config)
        whole = list(fastaug.build_loader(config, images))
        bad = [int(whole[0].indices[0]), int(whole[0].indices[5])]
        stand_in = next(fastaug.build_loader(config, knowing(images, *bad)).batches()).indices[0]
        bad.append(int(stand_in))
        loader = fastaug.build_loader(config, images)
        for index in bad:
            Path(images.where(index)).write_bytes(b"")
        assert_same(list(loader), list(fastaug.build_loader(config, knowing(images, *bad))))
        assert sorted(loader.images.bad) == sorted(bad)

    @every_loader
    def test_a_shard_that_is_cut_short(
        self, make: Tiny, data: Path, tmp_path: Path, kind: str
    ) -> None:
        images = open_data(str(data), "train")
        samples = [(images.encoded(i), int(images.labels[i])) for i in range(len(images))]
        shards = tmp_path / "shards"
        shards.mkdir()
        WRITERS[".tar"](shards / "train-0.tar", samples[:20])
        cut = WRITERS[".tar"](shards / "train-1.tar", samples[20:])
        WRITERS[".tar"](shards / "val.tar", samples[:3])
        config = make(kind, data=str(shards))
        images = scanned(config)
        lost = [34, 35]
        first = min(i for i, key in enumerate(fastaug.build_loader(config, images).batches())
                    if set(lost) & set(key.indices.tolist()))  # fmt: skip
        loader = fastaug.build_loader(config, images)
        assert images.storage is not None
        os.truncate(cut, int(images.storage.offset[34]) + 10)
        found = [*loader, *loader]
        assert sorted(loader.images.bad) == lost
        assert "the shard ends before" in loader.images.bad[34]
        seen = [batch.indices.tolist() for batch in found]
        whole, known = (
            [[int(i) for i in key.indices] for key in fastaug.build_loader(config, some).batches()]
            for some in (images, knowing(images, *lost))
        )
        assert [len(batch) for batch in seen] == [2] * 36
        assert not {34, 35} & {index for batch in seen for index in batch}
        assert seen[:first] == whole[:first]
        last = max(i for i, batch in enumerate(whole) if set(lost) & set(batch))
        assert seen[last:18] == known[last:]

    @every_loader
    def test_too_many(self, make: Tiny, kind: str, caplog: Said) -> None:
        config = make(kind, max_bad=0.03, batch_size=24)
        images = scanned(config)
        loader = fastaug.build_loader(config, images)
        first, second = (Path(images.where(i)) for i in next(loader.batches()).indices[[1, 3]])
        first.write_bytes(b"")
        second.write_bytes(b"")
        with raises(DataError, f"2 36 5.56% --max-bad 3% {first.name}"):
            list(loader)
        assert lines(caplog, "continues without it") == []

    @every_loader
    def test_a_storage_that_is_gone_is_no_image_s_fault(
        self, make: Tiny, kind: str, data: Path, caplog: Said
    ) -> None:
        config = make(kind, max_bad=0.9, batch_size=24)
        loader = fastaug.build_loader(config)
        data.rename(data.with_name("elsewhere"))
        with raises(DataError, "12"):
            list(loader)
        data.with_name("elsewhere").rename(data)
        assert scanned(config).bad == {}
        assert lines(caplog, "continues without it") == []

    def test_one_that_is_repaired_before_it_is_noted(self, make: Tiny) -> None:
        """A worker finds it bad long before the trainer comes to its batch."""
        config = make("torch")
        images = scanned(config)
        content = Path(images.where(7)).read_bytes()
        Path(images.where(7)).write_bytes(b"")
        with pytest.raises(retry.BadImagesError) as raised:
            retry.read_with_retries(images, {7: retry.ReadFailure("x", True)}, images.image)
        time.sleep(0.01)
        Path(images.where(7)).write_bytes(content)
        assert list(retry.quarantine(images, raised.value, 0.2).bad) == [7]
        assert scanned(config).bad == {}


class TestPatience:
    @every_loader
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_what_comes_back_has_changed_nothing(
        self, make: Tiny, kind: str, damage: str, caplog: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make(kind)
        images = scanned(config)
        whole = two_epochs(config, images)
        victim = Path(images.where(int(whole[FAR].indices[0])))
        content, slept = victim.read_bytes(), []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if seconds == 0.3:
                victim.write_bytes(content)

        monkeypatch.setattr(retry, "RETRY_PAUSES", (0.1, 0.3, 1.0, 3.0))
        monkeypatch.setattr(retry.time, "sleep", sleep)
        loader = fastaug.build_loader(config, images)
        batches = iter(loader)
        found = [next(batches)]
        DAMAGES[damage](victim)
        found += [*batches, *loader]
        assert_same(found, whole)
        assert loader.images.bad == {}
        assert scanned(config).bad == {}
        if config.data.workers != 2:  # there it is the workers who sleep
            assert slept == [0.1, 0.3]
        (line,) = lines(caplog, "retrying for 4.4 s")
        assert line.startswith(f"{victim}: ")
        assert lines(caplog, "can be read again") == [f"{victim}: can be read again"]

    @every_loader
    def test_a_stall_is_waited_for(self, make: Tiny, kind: str, caplog: Said) -> None:
        config = make(kind)
        images = scanned(config)
        whole = list(fastaug.build_loader(config, images))
        victim = Path(images.where(int(whole[3].indices[0])))
        content = victim.read_bytes()
        loader = fastaug.build_loader(config, images)
        victim.unlink()
        os.mkfifo(victim)
        answer = threading.Timer(1.0, victim.write_bytes, [content])
        answer.start()
        started = time.monotonic()
        found = list(loader)
        assert time.monotonic() - started > 0.9
        answer.join()
        assert_same(found, whole)
        assert loader.images.bad == {}
        assert caplog.messages == []


class TestEvaluation:
    @every_loader
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_batch_lacks_what_has_gone_bad(
        self, make: Tiny, data: Path, kind: str, ranks: int
    ) -> None:
        """Of 15 images in batches of two: 2 and 3 are a batch, 14 is the last one alone."""
        config = make(kind, max_bad=0.5)
        images = scan_configured(config.data, open_data(str(data), "test"))
        expected: dict[int, torch.Tensor] = {
            int(index): views
            for batch in build_evaluation_loader(config, images, views=2, batch_size=4)
            for index, views in zip(batch.indices, batch.views, strict=True)
        }
        loaders = [
            build_evaluation_loader(config, images, views=2, batch_size=4, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        lengths = [len(loader) for loader in loaders]
        for index in (2, 3, 9, 14):
            Path(images.where(index)).write_bytes(b"")
        left = [[0, 1], [4, 5], [6, 7], [8], [10, 11], [12, 13]]
        owner = {0: 0, 4: 2, 6: 3, 8: 4, 10: 5, 12: 6}  # batches keep their places and ranks
        for epoch in range(2):  # the second time it is known
            for rank, loader in enumerate(loaders):
                loader.set_epoch(0)
                found = list(loader)
                own = [batch for batch in left if owner[batch[0]] % ranks == rank]
                assert [batch.indices.tolist() for batch in found] == own, epoch
                for batch in found:
                    for index, views in zip(batch.indices, batch.views, strict=True):
                        assert torch.equal(views, expected[int(index)])
                assert loader.epoch == 1
        assert [len(loader) for loader in loaders] == lengths
        assert sorted({i for loader in loaders for i in loader.images.bad}) == [2, 3, 9, 14]


class TestWorkers:
    @pytest.fixture(autouse=True)
    def quick_to_see(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch asks after its workers every 5 s."""
        wait = _MultiProcessingDataLoaderIter._try_get_data
        monkeypatch.setattr(wait, "__defaults__", (0.2,))
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)

    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
    def test_one_that_is_killed_is_replaced_once(
        self, make: Tiny, caplog: Said, signum: int
    ) -> None:
        config = make("torch workers")
        images = scanned(config)
        whole = list(fastaug.build_loader(config, images))
        batches = iter(fastaug.build_loader(config, images))
        found = [next(batches)]
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signum)
        # The training is busy with a step meanwhile, and must not hear of it there.
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
        assert_same(found + list(batches), whole)
        (line,) = lines(caplog, "a worker process of the loader has died")
        assert "the same batch" in line

    def test_twice_at_one_batch_is_the_end(
        self, make: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: Said
    ) -> None:
        monkeypatch.setattr(
            torch_loader, "_start_worker", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        with raises(DataError, "2"):
            list(fastaug.build_loader(make("torch workers")))
        assert len(lines(caplog, "has died")) == 1

    @pytest.mark.parametrize("kind", ["torch", "torch workers"])
    def test_a_mistake_in_the_code_is_not_hidden(
        self, make: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(*_: object) -> None:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(torch_loader, "reference_views", wrong)
        with pytest.raises(RuntimeError, match="a mistake"):
            list(fastaug.build_loader(make(kind)))
        gc.collect()  # torch's error holds itself and the workers, who would outlive this test

    def test_a_watchdog_can_ask_where_they_are(
        self, make: Tiny, capfd: pytest.CaptureFixture, caplog: Said
    ) -> None:
        config = make("torch workers")
        batches = iter(fastaug.build_loader(config))
        count = 0
        for _ in batches:
            count += 1
            if count < config.data.workers:  # one that has made nothing may not be listening yet
                continue
            for worker in multiprocessing.active_children():
                with contextlib.suppress(ProcessLookupError):  # after the last batch
                    os.kill(worker.pid, signal.SIGUSR1)
        assert count == 18
        assert caplog.messages == []
        assert "most recent call first" in capfd.readouterr().err

    def test_one_that_dies_while_it_hands_over_a_batch(self) -> None:
        class Dying:  # of a DataLoader: the connection ends, and the error has no text
            num_workers = 1

            def __iter__(self) -> Iterator[object]:
                raise EOFError

        with raises(retry.RetryError, "EOFError"):
            list(torch_loader._worker_results(Dying()))


class TestDali:
    @pytest.fixture
    def failures(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How often the decoding pipeline is still to fail, at its third batch."""
        decoder = pytest.importorskip("fastaug.pipelines.decoder")
        left, build = [0], decoder.decode_pipeline

        def breaking(*args: object, prefetch_queue_depth: int, **options: Any) -> object:
            pipeline = build(*args, prefetch_queue_depth=prefetch_queue_depth, **options)
            outputs, calls = pipeline.outputs, []

            def fails(**given: object) -> object:
                calls.append(1)
                if len(calls) == prefetch_queue_depth + 3 and left[0]:
                    left[0] -= 1
                    raise RuntimeError("out of memory\nand more")
                return outputs(**given)

            pipeline.outputs = fails
            return pipeline

        monkeypatch.setattr(decoder, "decode_pipeline", breaking)
        return left

    @pytest.mark.parametrize("times", [1, 3])
    def test_a_pipeline_that_breaks_down_is_built_again(
        self, make: Tiny, failures: list[int], times: int, caplog: Said
    ) -> None:
        config = make("dali")
        whole = list(fastaug.build_loader(config))
        failures[0] = times
        assert_same(list(fastaug.build_loader(config)), whole)
        assert failures == [0]
        said = "DALI stopped while decoding: out of memory"
        assert len(lines(caplog, said)) == times

    @pytest.mark.parametrize("damage", ["truncated", "gone", "another size"])
    def test_broken_pipelines_are_gone_at_once(self, make: Tiny, damage: str) -> None:
        """Memory; and one that is collected in a fork would wait for threads that it has not."""
        loader = fastaug.build_loader(make("dali"))
        batches = iter(loader)
        next(batches)
        broken = weakref.ref(loader._stages)
        DAMAGES[damage](Path(loader.images.where([*loader.batches()][FAR - 1].indices[0])))
        gc.disable()
        try:
            assert sum(1 for _ in batches) == 17
            assert loader._stages is not broken()
            assert broken() is None
        finally:
            gc.enable()

    def test_not_for_ever(self, make: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = pytest.importorskip("fastaug.pipelines.decoder")

        def breaks(self: object, _batch: object) -> None:
            tried.append(1)
            raise decoder._retry_error(RuntimeError("out of memory"))

        tried: list[int] = []
        config = make("dali")
        loader = fastaug.build_loader(config)
        next(iter(loader))
        monkeypatch.setattr(decoder.Decoder, "_decoded", breaks)
        with raises(DataError, "DALI 4"):
            list(loader)
        assert scanned(config).bad == {}
