"""The manifest: what is remembered of images, and what is done about bad ones."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from expect import missing, raises
from image_sets import JPEG, PNG, RGB, RNG, files_of, image_set, span_set, touch
from mutants import encode, png, whole_images
from PIL import Image

from fastaug.data import progress
from fastaug.data import scan as manifest
from fastaug.data import scan_image as image_scan
from fastaug.data.array_cache import map_arrays, store_mapped
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import mark_bad, scan_and_check, scan_set, stamp_of
from fastaug.data.storage import Files, Spans
from fastaug.errors import DataError


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache / "manifests"


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The indices of the images that are scanned."""
    seen: list[int] = []

    def noted(images: ImageSet, index: int, **options: object) -> image_scan.ImageInfo:
        seen.append(index)
        return image_scan.scan_image(images, index, **options)

    monkeypatch.setattr(manifest, "scan_image", noted)
    return seen


class TestMemory:
    """Images that were scanned are not scanned again."""

    contents = (JPEG, PNG, JPEG[:900], encode(RGB, "GIF"), JPEG)

    @pytest.mark.parametrize("stored", [image_set, span_set])
    def test_the_second_time(self, stored: Callable, tmp_path: Path, scanned: list[int]) -> None:
        images = stored(tmp_path / "set", self.contents)
        first = scan_and_check(images, max_bad=0.2).manifest
        assert sorted(scanned) == [0, 1, 2, 3, 4]
        scanned.clear()
        second = scan_and_check(images, max_bad=0.2).manifest
        assert scanned == []
        np.testing.assert_array_equal(first.sizes, second.sizes)
        assert first.sizes.dtype == second.sizes.dtype == np.int32
        assert second.plain.tolist() == first.plain.tolist() == [True, True, False, False, True]
        assert list(second.bad) == list(first.bad) == [2]
        assert second.bad == first.bad

    def test_a_file_that_has_changed(self, tmp_path: Path, scanned: list[int]) -> None:
        images = image_set(tmp_path / "set", self.contents)
        scan_set(images)
        scanned.clear()
        touch(Path(images.where(1)))
        Path(images.where(2)).write_bytes(JPEG)
        found = scan_set(images)
        assert sorted(scanned) == [1, 2]
        assert found.manifest.bad == {}
        scanned.clear()
        scan_set(images)
        assert scanned == []

    def test_a_change_of_only_the_size(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", self.contents)
        scan_set(images)
        before = Path(images.where(0)).stat().st_mtime_ns
        Path(images.where(0)).write_bytes(JPEG[:800])
        os.utime(Path(images.where(0)), ns=(before, before))
        assert list(scan_set(images).manifest.bad) == [0, 2]

    def test_a_file_that_is_gone_is_asked_for_again(
        self, tmp_path: Path, scanned: list[int]
    ) -> None:
        images = image_set(tmp_path / "set", self.contents)
        Path(images.where(1)).unlink()
        assert list(scan_set(images).manifest.bad) == [1, 2]
        scanned.clear()
        assert list(scan_set(images).manifest.bad) == [1, 2]
        assert scanned == [1]

    def test_a_shard_that_has_changed(self, tmp_path: Path, scanned: list[int]) -> None:
        images = span_set(tmp_path / "set", self.contents)
        scan_set(images)
        scanned.clear()
        touch(tmp_path / "set/1.tar")
        scan_set(images)
        assert sorted(scanned) == [1, 3]

    def test_images_that_came_and_went(self, tmp_path: Path, scanned: list[int]) -> None:
        scan_set(image_set(tmp_path / "set", self.contents))
        scanned.clear()
        names = ["003.jpg", "new.jpg", "000.jpg", "002.jpg"]
        files = tuple(tmp_path / "set" / name for name in names)
        files[1].write_bytes(PNG)
        images = ImageSet(str(tmp_path / "set"), ("a",), np.zeros(4, np.int64), Files.of(files))
        found = scan_set(images)
        assert scanned == [1]
        assert found.manifest.plain.tolist() == [False, True, True, False]
        assert list(found.manifest.bad) == [3]
        assert found.formats == {"GIF": 1, "PNG": 1, "JPEG": 1}

    def test_a_set_that_shrank(self, tmp_path: Path) -> None:
        contents = [JPEG] * 20
        contents[1], contents[17] = b"", b"text"
        many = image_set(tmp_path / "set", contents)
        scan_set(many)
        for kept, bad in (
            ([17, 1], {0: "not an image of a known format", 1: "it is empty"}),
            ([1, 3], {0: "it is empty"}),
            (range(20), {1: "it is empty", 17: "not an image of a known format"}),
        ):
            files = [Path(many.where(index)) for index in kept]
            labels = np.zeros(len(files), np.int64)
            images = ImageSet(many.name, many.classes, labels, Files.of(files))
            assert scan_set(images).manifest.bad == bad

    def test_a_full_scan_serves_a_quick_one(self, tmp_path: Path, scanned: list[int]) -> None:
        flipped = PNG[:-60] + bytes([PNG[-60] ^ 1]) + PNG[-59:]
        images = image_set(tmp_path / "set", [flipped, JPEG, b""])
        assert list(scan_set(images).manifest.bad) == [2]
        scanned.clear()
        assert list(scan_set(images, full=True).manifest.bad) == [0, 2]
        assert sorted(scanned) == [0, 1]  # what is bad stays so
        scanned.clear()
        assert list(scan_set(images).manifest.bad) == [0, 2]
        assert scanned == []

    def test_relative_paths_are_the_same_images(
        self, tmp_path: Path, scanned: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = image_set(tmp_path / "set", self.contents)
        scan_set(images)
        scanned.clear()
        monkeypatch.chdir(tmp_path)
        files = [file.relative_to(tmp_path) for file in files_of(images)]
        scan_set(ImageSet("set", images.classes, images.labels, Files.of(files)))
        assert scanned == []

    @pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no zip", None])
    def test_a_damaged_memory(
        self, damage: bytes | None, tmp_path: Path, cache: Path, scanned: list[int]
    ) -> None:
        images = image_set(tmp_path / "set", self.contents)
        scan_set(images)
        (file,) = cache.glob("*.scan")
        file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
        scanned.clear()
        assert list(scan_set(images).manifest.bad) == [2]
        assert len(scanned) == 5

    @pytest.mark.parametrize("what", ["stamp", "size", "bad", "reasons", "formats"])
    def test_another_layout_of_the_memory(self, what: str, tmp_path: Path, cache: Path) -> None:
        images = image_set(tmp_path / "set", self.contents)
        scan_set(images)
        (file,) = cache.glob("*.scan")
        about = json.loads(file.read_bytes().split(b"\n")[0][9:])["about"]
        stored = map_arrays(file, about["file"])
        assert stored is not None
        kind = stored.arrays[what].dtype
        for wrong in (np.zeros(3), stored.arrays[what][:0], np.zeros((5, 5), kind), None):
            arrays = stored.arrays | {what: wrong}
            kept = {name: array for name, array in arrays.items() if array is not None}
            facts = {name: fact for name, fact in about.items() if name != "file"}
            assert store_mapped(file, about["file"], kept, **facts)
            assert list(scan_set(images).manifest.bad) == [2]

    def test_a_cache_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path / "file"))
        images = image_set(tmp_path / "set", self.contents)
        with caplog.at_level(logging.WARNING, "fastaug"):
            assert list(scan_and_check(images, max_bad=0.5).bad) == [2]
            mark_bad(images, 0, "broke")
        about_cache, about_bad, about_marked = caplog.messages
        assert str(tmp_path / "file") in about_cache
        assert "all of them" not in about_bad
        assert "cannot be written" in about_marked

    def test_a_failure_of_the_storage_is_not_remembered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = image_set(tmp_path / "set", [JPEG, PNG])

        def broken(*_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", broken)
            assert scan_set(images).manifest.bad == {
                0: "cannot be read (Input/output error)",
                1: "cannot be read (Input/output error)",
            }
        assert scan_set(images).manifest.bad == {}
        with monkeypatch.context() as patched:
            patched.setattr(Files, "read", broken)
            bad = scan_set(images, full=True).manifest.bad
            assert bad[0] == "cannot be read (Input/output error)"
        assert scan_set(images, full=True).manifest.bad == {}

    def test_ctrl_c_keeps_what_was_seen(
        self, tmp_path: Path, scanned: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = image_set(tmp_path / "set", [JPEG] * 100)
        noted = manifest.scan_image

        def interrupted(images: ImageSet, index: int, **options: object) -> image_scan.ImageInfo:
            if index == 70:
                raise KeyboardInterrupt
            return noted(images, index, **options)

        with monkeypatch.context() as patched:
            patched.setattr(manifest, "scan_image", interrupted)
            with pytest.raises(KeyboardInterrupt):
                scan_set(images, workers=1)
        scanned.clear()
        scan_set(images, workers=1)
        assert scanned == list(range(64, 100))


class TestSpans:
    def test_sizes_and_bad_ones(self, tmp_path: Path) -> None:
        whole = list(whole_images(RNG).values())
        images = span_set(tmp_path, [*whole, JPEG[:900], b""])
        found = scan_set(images).manifest
        assert list(found.bad) == [len(whole), len(whole) + 1]
        expected = [Image.open(io.BytesIO(content)).size[::-1] for content in whole]
        assert found.sizes[: len(whole)].tolist() == [list(size) for size in expected]

    def test_a_shard_that_was_cut(self, tmp_path: Path) -> None:
        images = span_set(tmp_path, [encode(RGB, "BMP")] * 4)
        os.truncate(tmp_path / "1.tar", 15_000)
        assert scan_set(images).manifest.bad == {3: "its shard ends before the image does"}

    def test_an_image_in_two_parts(self, tmp_path: Path) -> None:
        joint = b"\x0a\x23\xd7\xce"
        parts = (JPEG[:200], JPEG[200 + len(joint) :])
        images = span_set(tmp_path, list(parts), separator=JPEG[200 : 200 + len(joint)])
        (tmp_path / "0.tar").write_bytes(b"".join(parts))
        continued = {0: ((200, len(parts[1])),)}
        spans = Spans(images.storage.shards, np.zeros(1, np.int32), np.zeros(1, np.int64),
                      np.array([200]), continued, images.storage.separator)  # fmt: skip
        images = ImageSet("x", ("a",), np.zeros(1, np.int64), storage=spans)
        found = scan_set(images, full=True).manifest
        assert found.bad == {}
        assert found.sizes.tolist() == [[RGB.height, RGB.width]]


class TestPolicy:
    @pytest.fixture
    def images(self, tmp_path: Path) -> ImageSet:
        """100 images, numbers 7 and 90 of them bad."""
        contents = [JPEG] * 100
        contents[7], contents[90] = b"", b"text"
        return image_set(tmp_path / "set", contents)

    def test_bad_ones_are_named_and_left_out(
        self, images: ImageSet, caplog: pytest.LogCaptureFixture, cache: Path
    ) -> None:
        with caplog.at_level(logging.WARNING, "fastaug"):
            out = scan_and_check(images, max_bad=0.02)
        assert out.bad == {7: "it is empty", 90: "not an image of a known format"}
        assert len(out) == len(out.manifest.plain) == 100
        assert files_of(out) == files_of(images)
        assert not out.manifest.plain[[7, 90]].any()
        assert out.manifest.sizes[[7, 90]].tolist() == [[0, 0], [0, 0]]
        (line,) = caplog.messages
        (listed,) = cache.glob("*.txt")
        assert (
            missing(line, f"{images.name} 2 100 {Path(images.where(7))} {Path(images.where(90))}")
            == []
        )
        assert missing(line, str(listed)) == []
        assert listed.read_text().splitlines() == [
            f"{Path(images.where(7))}: it is empty",
            f"{Path(images.where(90))}: not an image of a known format",
        ]
        for index in (7, 90):
            Path(images.where(index)).write_bytes(JPEG)
        assert scan_and_check(images).bad == {}
        assert not listed.exists()

    def test_more_than_the_allowed_share(self, images: ImageSet, cache: Path) -> None:
        with raises(DataError, "2 100 2% --max-bad 1.9% 007.jpg") as raised:
            scan_and_check(images, max_bad=0.019)
        (listed,) = cache.glob("*.txt")
        assert missing(str(raised.value), str(listed)) == []

    def test_the_share_itself_is_allowed(self, images: ImageSet) -> None:
        Path(images.where(7)).write_bytes(JPEG)
        assert list(scan_and_check(images, max_bad=0.01).bad) == [90]

    def test_none_allowed(self, images: ImageSet) -> None:
        with raises(DataError, "0%"):
            scan_and_check(images, max_bad=0)

    def test_none_left(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", [b"", b""])
        with raises(DataError, "2 100%"):
            scan_and_check(images, max_bad=1)

    def test_an_array_is_sound(self, tmp_path: Path, cache: Path) -> None:
        array = np.zeros((4, 8, 9, 3), np.uint8)
        out = scan_and_check(ImageSet("x", ("a",), np.zeros(4, np.int64), array=array))
        assert out.manifest.sizes.tolist() == [[8, 9]] * 4
        assert out.manifest.sizes.dtype == np.int32
        assert out.manifest.plain.all()
        assert out.bad == {}
        mark_bad(out, 0, "cannot be")
        assert not cache.exists()


class TestMarkBad:
    @pytest.mark.parametrize("stored", [image_set, span_set])
    @pytest.mark.parametrize("scanned_before", [True, False])
    def test_the_next_scan_leaves_it_out(
        self, stored: Callable, scanned_before: bool, tmp_path: Path
    ) -> None:
        images = stored(tmp_path / "set", [JPEG, b"", JPEG, JPEG])
        if scanned_before:
            scan_set(images)
        mark_bad(images, 2, "DALI: failed\nin two lines")
        for full in (False, True):
            found = scan_set(images, full=full).manifest
            assert found.bad == {1: "it is empty", 2: "DALI: failed in two lines"}
            assert not found.plain[2]
            assert found.sizes[2].tolist() == [0, 0]
            assert found.plain[[0, 3]].all()

    def test_until_it_is_repaired(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", [JPEG] * 3)
        mark_bad(images, 1, "failed")
        assert list(scan_set(images).manifest.bad) == [1]
        touch(Path(images.where(1)))
        assert scan_set(images).manifest.bad == {}

    def test_one_that_was_repaired_before_it_was_marked(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", [JPEG] * 3)
        stamp = stamp_of(images, 1)
        touch(Path(images.where(1)))
        mark_bad(images, 1, "failed", stamp)
        assert scan_set(images).manifest.bad == {}

    def test_the_newest_reason_stays(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", [JPEG] * 3)
        mark_bad(images, 0, "first")
        mark_bad(images, 0, "second")
        assert scan_set(images).manifest.bad == {0: "second"}


class TestBar:
    def test_a_log_gets_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
    ) -> None:
        clock = iter(range(0, 1000, 2))
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        scan_set(image_set(tmp_path / "set", [JPEG] * 40))
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("seconds", [0.0, 2.0])
    def test_a_terminal_after_a_second(
        self,
        seconds: float,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture,
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        clock = iter(np.arange(1000) * seconds)
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        scan_set(image_set(tmp_path / "set", [JPEG] * 40))
        out, err = capfd.readouterr()
        assert out == ""
        assert ("scanning images" in err) == (seconds > 0)


def test_pillow_does_not_warn_of_large_images(tmp_path: Path) -> None:
    images = image_set(tmp_path / "set", [png((10_000, 9_000), bytes(99))])
    with warnings.catch_warnings(action="error"):
        assert scan_set(images).manifest.sizes.tolist() == [[9_000, 10_000]]
