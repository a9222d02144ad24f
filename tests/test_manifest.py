"""The manifest: what is bad, what DALI may decode, what is remembered. Oracles: Pillow and DALI."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mutants import chunk, encode, photo, png, whole_images, with_thumbnail
from PIL import Image

from fastaug.data import look, manifest
from fastaug.data.images import ImageSet, Spans
from fastaug.data.look import Budget
from fastaug.data.manifest import look_over, mark_bad, survey
from fastaug.errors import DataError

RNG = np.random.default_rng(0)
RGB = photo(RNG)
JPEG = encode(RGB, "JPEG")
PNG = encode(RGB, "PNG")


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache / "manifests"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of the images that are looked at."""
    seen: list[int] = []

    def noted(images: ImageSet, index: int, **options: object) -> look.Look:
        seen.append(index)
        return look.look(images, index, **options)

    monkeypatch.setattr(manifest, "look", noted)
    return seen


def image_set(folder: Path, contents: dict[str, bytes] | Sequence[bytes]) -> ImageSet:
    """Files of these contents."""
    folder.mkdir(exist_ok=True)
    if not isinstance(contents, dict):
        contents = {f"{i:03}.jpg": content for i, content in enumerate(contents)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = tuple(folder / name for name in contents)
    return ImageSet(str(folder), ("a", "b"), np.arange(len(files)) % 2, files)


def span_set(folder: Path, contents: Sequence[bytes], **changes: object) -> ImageSet:
    """The same in two shards, with a gap before each image."""
    folder.mkdir(exist_ok=True)
    shards = (folder / "0.tar", folder / "1.tar")
    blobs, places = [b"", b""], []
    for i, content in enumerate(contents):
        blobs[i % 2] += bytes(100)
        places.append((i % 2, len(blobs[i % 2]), len(content)))
        blobs[i % 2] += content
    for shard, blob in zip(shards, blobs, strict=True):
        shard.write_bytes(blob)
    shard, offset, size = np.array(places, np.int64).T
    spans = Spans(shards, shard.astype(np.int32), offset, size, **changes)
    return ImageSet(str(folder), ("a", "b"), np.zeros(len(contents), np.int64), spans=spans)


def touch(file: Path) -> None:
    """Another time, as a file that was written again has."""
    later = file.stat().st_mtime_ns + 10_000_000
    os.utime(file, ns=(later, later))


def bad_of(content: bytes, tmp_path: Path, *, full: bool = False) -> str:
    """The reason why one image is bad, "" if it is not."""
    images = image_set(tmp_path / "one", [content])
    return look_over(images, full=full).manifest.bad.get(0, "")


class TestWhatIsBad:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "it is empty"),
            (b"<html>not found</html>" * 99, "not an image of a known format"),
            (JPEG[:1000], "truncated"),
            (JPEG[:-2], "truncated"),
            (JPEG[:-500] + bytes(9000), "truncated"),
            (PNG[: len(PNG) // 2], "truncated"),
            (PNG[:-12], "truncated"),
            (with_thumbnail(RGB)[:6800], "truncated"),
            (encode(RGB, "BMP")[:-300], "truncated"),
            (encode(RGB, "PPM")[:-1], "truncated"),
            (png((2**16, 2**16), bytes(99)), "exceeds limit|too many"),
            (png((0, 9), bytes(99)), "0 x 9|not an image"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "PostScript"),
        ],
    )
    @pytest.mark.parametrize("full", [False, True])
    def test_reasons(self, content: bytes, reason: str, full: bool, tmp_path: Path) -> None:
        assert re.search(reason, bad_of(content, tmp_path, full=full))

    @pytest.mark.parametrize("full", [False, True])
    def test_sound_images_are_not(self, full: bool, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", whole_images(RNG))
        assert look_over(images, full=full).manifest.bad == {}

    def test_bytes_behind_an_image_are_not_its_end(self, tmp_path: Path) -> None:
        for content in (JPEG, PNG):
            assert bad_of(content + bytes(9000), tmp_path) == ""

    def test_full_alone_sees_damaged_pixels(self, tmp_path: Path) -> None:
        flipped = PNG[:-60] + bytes([PNG[-60] ^ 1]) + PNG[-59:]
        wrong_sum = PNG[:-16] + bytes([PNG[-16] ^ 1]) + PNG[-15:]
        packer, rows = zlib.compressobj(), bytes(40 * 151)
        data = packer.compress(rows) + packer.flush(zlib.Z_SYNC_FLUSH) + b"\xff" * 20
        junk_behind = png((50, 40), rows).replace(
            chunk(b"IDAT", zlib.compress(rows)), chunk(b"IDAT", data)
        )
        few_rows = png((50, 49), bytes(40 * 151))
        for content, reason in (
            (flipped, "broken data stream"),
            (wrong_sum, "checksum"),
            (junk_behind, "data stream"),
            (few_rows, "40 of its 49 rows"),
        ):
            assert bad_of(content, tmp_path) == ""
            assert reason in bad_of(content, tmp_path, full=True)

    def test_a_stream_that_only_zlib_refuses(self) -> None:
        with pytest.raises(DataError, match="broken data stream"):
            look._inflated_size(zlib.compress(bytes(999))[:-4] + b"abcd")

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        images = image_set(tmp_path, {"a.jpg": JPEG, "b.jpg": JPEG, "c.jpg": JPEG, "d.jpg": JPEG})
        for name in "abc":
            (tmp_path / f"{name}.jpg").unlink()
        (tmp_path / "b.jpg").mkdir()
        os.mkfifo(tmp_path / "c.jpg")  # whoever opens it to read waits for a writer
        bad = look_over(images).manifest.bad
        assert bad == {0: "cannot be read (No such file or directory)", 1: bad[1], 2: "not a file"}
        assert bad[1] in ("not a file", "cannot be read (Is a directory)")

    def test_a_file_too_large_to_be_read(self, tmp_path: Path) -> None:
        images = image_set(tmp_path, [JPEG])
        os.truncate(images.files[0], 5 << 30)  # sparse
        assert look_over(images).manifest.bad == {0: "5.0 GiB are too many for an image"}

    def test_sizes_are_those_of_the_decoded_image(self, tmp_path: Path) -> None:
        turned = Image.Exif()
        turned[0x112] = 6
        contents = [
            *whole_images(RNG).values(),
            encode(RGB, "JPEG", exif=turned),
            encode(RGB, "TIFF", exif=turned),
            encode(RGB, "JPEG", exif=b"Exif\0\0" + bytes(60_000)),  # a header of 60 KB
        ]
        images = image_set(tmp_path, contents)
        expected = [np.asarray(Image.open(io.BytesIO(c)).convert("RGB")).shape for c in contents]
        for full in (False, True):
            sizes = look_over(images, full=full).manifest.sizes
            assert sizes.tolist() == [[height, width] for height, width, _ in expected]

    def test_a_quick_look_does_not_read_the_pixels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[int] = []
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(n) or pread(fd, n, at))
        monkeypatch.setattr(ImageSet, "encoded", lambda *_: pytest.fail("read as a whole"))
        noise = Image.fromarray(RNG.integers(0, 256, (400, 400, 3), np.uint8))
        images = image_set(tmp_path, [encode(noise, "JPEG"), encode(noise, "PNG")])
        assert len(look_over(images).manifest.bad) == 0
        assert sum(read) == 4 * 4096


def bmp16() -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, 6, 5, 1, 16, 0, 60, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 114, 0, 0, 54) + header + RNG.bytes(60)


def without_segment(jpeg: bytes, name: bytes) -> bytes:
    begin = jpeg.index(name) - 4
    (length,) = struct.unpack(">H", jpeg[begin + 2 : begin + 4])
    return jpeg[:begin] + jpeg[begin + 2 + length :]


def kinds() -> dict[str, tuple[bool, bytes]]:
    """(whether it may go to DALI, content) of each kind of image."""
    whole = whole_images(RNG)
    cmyk = encode(Image.fromarray(RNG.integers(0, 256, (40, 50, 4), np.uint8), "CMYK"), "JPEG")
    palette = Image.fromarray(RNG.integers(0, 256, (40, 50), np.uint8), "P")
    palette.putpalette(RNG.bytes(768))
    turned = Image.Exif()
    turned[0x112] = 6
    rows = b"".join(b"\0" + RNG.bytes(300) for _ in range(40))
    plain = {name: whole[name] for name in whole if name.startswith(("jpeg", "webp", "ppm", "bmp"))}
    plain |= {
        "jpeg-turned": encode(RGB, "JPEG", exif=turned),
        "jpeg-rgb": encode(RGB, "JPEG", keep_rgb=True),
        "jpeg-one-pixel": encode(RGB.crop((0, 0, 1, 1)), "JPEG"),
        "jpeg-no-jfif": without_segment(JPEG, b"JFIF"),
        "jpeg-fill": JPEG[:2] + b"\xff\xff" + JPEG[2:],
        "jpeg-followed": JPEG + bytes(9000),
        "png": PNG,
        "png-followed": PNG + bytes(9000),
        "png-turned": encode(RGB, "PNG", exif=turned),
        "png-alpha": whole["png-alpha"],
        "png-grey-alpha": encode(Image.open(io.BytesIO(whole["png-alpha"])).convert("LA"), "PNG"),
        "png-palette": encode(palette, "PNG"),
        "png-palette-transparent": encode(palette, "PNG", transparency=bytes(range(256))),
        "png-transparent": encode(RGB, "PNG", transparency=RGB.getpixel((3, 3))),
        "png-bits": encode(RGB.convert("1"), "PNG"),
        "png-2-bits": encode(RGB.quantize(4), "PNG", bits=2),
        "png-gamma": png((100, 40), rows, extra=chunk(b"gAMA", struct.pack(">I", 30_000))),
        "bmp-palette": encode(palette, "BMP"),
        "bmp-grey": encode(RGB.convert("L"), "BMP"),
        "webp-lossless": encode(RGB, "WEBP", lossless=True),
        "webp-profile": encode(RGB, "WEBP", icc_profile=RNG.bytes(301)),
        "pgm": encode(RGB.convert("L"), "PPM"),
        "pbm": encode(RGB.convert("1"), "PPM"),
    }
    del plain["jpeg-cmyk"]
    other = {
        "jpeg-cmyk": cmyk,
        "jpeg-cmyk-no-adobe": without_segment(cmyk, b"Adobe"),
        "jpeg-stray-bytes": JPEG[:20] + b"\0\0\0" + JPEG[20:],
        "png-16": whole["png-16"],
        "png-16-rgb": png((50, 40), rows, depth=16),
        "apng": whole["apng"],
        "png-bad-animation": png((100, 40), rows, extra=chunk(b"acTL", RNG.bytes(30))),
        "bmp-16": bmp16(),
        "bmp-padding-cut": encode(RGB, "BMP")[:-1],  # 75 x 3 bytes and 3 of padding a row
        "webp-exif": encode(RGB, "WEBP", exif=turned, lossless=True),
        "webp-animated": encode(RGB, "WEBP", save_all=True, append_images=[photo(RNG)]),
        "ppm-100": b"P6\n2 2\n100\n" + bytes(range(0, 96, 8)),
        "pgm-16": encode(Image.fromarray(RNG.integers(0, 65536, (9, 9), np.uint16)), "PPM"),
        "pfm": b"Pf\n2 2\n-1.0\n" + np.arange(4, dtype="<f4").tobytes(),
        "ppm-text": b"P3\n2 2\n255\n" + b"7 " * 12,
        "ppm-comment": b"P6\n2#c\n 2\n255\n" + RNG.bytes(12),
        "tiff": whole["tiff"],
        "tiff-palette": encode(palette, "TIFF"),
        "gif": encode(RGB, "GIF"),
        "gif-animated": whole["gif-animated"],
        "mpo": encode(RGB, "MPO", save_all=True, append_images=[photo(RNG)]),
        "jpeg2000": encode(RGB, "JPEG2000"),
        "tga": encode(RGB, "TGA"),
    }
    return {n: (True, c) for n, c in plain.items()} | {n: (False, c) for n, c in other.items()}


KINDS = kinds()


class TestPlain:
    def test_the_kinds_that_are(self, tmp_path: Path) -> None:
        expected = {name: plain for name, (plain, _) in KINDS.items()}
        images = image_set(tmp_path, {name: content for name, (_, content) in KINDS.items()})
        for full in (False, True):
            found = look_over(images, full=full).manifest
            bad = {images.files[i].name: reason for i, reason in found.bad.items()}
            assert bad == {}
            assert dict(zip(expected, found.plain.tolist(), strict=True)) == expected

    def test_dali_decodes_them_to_the_same_levels(self) -> None:
        decoded = decode_with_dali([content for plain, content in KINDS.values() if plain])
        names = [name for name, (plain, _) in KINDS.items() if plain]
        for name, levels in zip(names, decoded, strict=True):
            with warnings.catch_warnings(action="ignore"):
                expected = np.asarray(Image.open(io.BytesIO(KINDS[name][1])).convert("RGB"))
            np.testing.assert_array_equal(levels, expected, err_msg=name)


def decode_with_dali(contents: list[bytes]) -> list[np.ndarray]:
    dali = pytest.importorskip("nvidia.dali")
    pipe = dali.Pipeline(len(contents), num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipe:
        encoded = dali.fn.external_source(name="encoded")
        levels = dali.fn.decoders.image(
            encoded,
            device="cpu",
            output_type=dali.types.RGB,
            jpeg_fancy_upsampling=True,
            adjust_orientation=False,
        )
        pipe.set_outputs(levels)
    pipe.build()
    pipe.feed_input("encoded", [np.frombuffer(content, np.uint8) for content in contents])
    (out,) = pipe.run()
    return [np.array(out.at(i)) for i in range(len(contents))]


class TestMemory:
    """Images that were looked at are not looked at again."""

    contents = (JPEG, PNG, JPEG[:900], encode(RGB, "GIF"), JPEG)

    @pytest.mark.parametrize("stored", [image_set, span_set])
    def test_the_second_time(self, stored: Callable, tmp_path: Path, looked: list[int]) -> None:
        images = stored(tmp_path / "set", self.contents)
        first = survey(images, max_bad=0.2).manifest
        assert sorted(looked) == [0, 1, 2, 3, 4]
        looked.clear()
        second = survey(images, max_bad=0.2).manifest
        assert looked == []
        np.testing.assert_array_equal(first.sizes, second.sizes)
        assert first.sizes.dtype == second.sizes.dtype == np.int32
        assert second.plain.tolist() == first.plain.tolist() == [True, True, False, False, True]
        assert list(second.bad) == list(first.bad) == [2]
        assert second.bad == first.bad

    def test_a_file_that_has_changed(self, tmp_path: Path, looked: list[int]) -> None:
        images = image_set(tmp_path / "set", self.contents)
        look_over(images)
        looked.clear()
        touch(images.files[1])
        images.files[2].write_bytes(JPEG)
        found = look_over(images)
        assert sorted(looked) == [1, 2]
        assert found.manifest.bad == {}
        looked.clear()
        look_over(images)
        assert looked == []

    def test_a_change_of_size_alone(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", self.contents)
        look_over(images)
        before = images.files[0].stat().st_mtime_ns
        images.files[0].write_bytes(JPEG[:800])
        os.utime(images.files[0], ns=(before, before))
        assert list(look_over(images).manifest.bad) == [0, 2]

    def test_a_file_that_is_gone_is_asked_for_again(
        self, tmp_path: Path, looked: list[int]
    ) -> None:
        images = image_set(tmp_path / "set", self.contents)
        images.files[1].unlink()
        assert list(look_over(images).manifest.bad) == [1, 2]
        looked.clear()
        assert list(look_over(images).manifest.bad) == [1, 2]
        assert looked == [1]

    def test_a_shard_that_has_changed(self, tmp_path: Path, looked: list[int]) -> None:
        images = span_set(tmp_path / "set", self.contents)
        look_over(images)
        looked.clear()
        touch(tmp_path / "set/1.tar")
        look_over(images)
        assert sorted(looked) == [1, 3]

    def test_images_that_came_and_went(self, tmp_path: Path, looked: list[int]) -> None:
        look_over(image_set(tmp_path / "set", self.contents))
        looked.clear()
        names = ["003.jpg", "new.jpg", "000.jpg", "002.jpg"]
        files = tuple(tmp_path / "set" / name for name in names)
        files[1].write_bytes(PNG)
        images = ImageSet(str(tmp_path / "set"), ("a",), np.zeros(4, np.int64), files)
        found = look_over(images)
        assert looked == [1]
        assert found.manifest.plain.tolist() == [False, True, True, False]
        assert list(found.manifest.bad) == [3]
        assert found.formats == {"GIF": 1, "PNG": 1, "JPEG": 1}

    def test_a_full_look_serves_a_quick_one(self, tmp_path: Path, looked: list[int]) -> None:
        flipped = PNG[:-60] + bytes([PNG[-60] ^ 1]) + PNG[-59:]
        images = image_set(tmp_path / "set", [flipped, JPEG, b""])
        assert list(look_over(images).manifest.bad) == [2]
        looked.clear()
        assert list(look_over(images, full=True).manifest.bad) == [0, 2]
        assert sorted(looked) == [0, 1]  # what is bad stays so
        looked.clear()
        assert list(look_over(images).manifest.bad) == [0, 2]
        assert looked == []

    def test_relative_paths_are_the_same_images(
        self, tmp_path: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = image_set(tmp_path / "set", self.contents)
        look_over(images)
        looked.clear()
        monkeypatch.chdir(tmp_path)
        files = tuple(file.relative_to(tmp_path) for file in images.files)
        look_over(ImageSet("set", images.classes, images.labels, files))
        assert looked == []

    @pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no zip", None])
    def test_a_damaged_memory(
        self, damage: bytes | None, tmp_path: Path, cache: Path, looked: list[int]
    ) -> None:
        images = image_set(tmp_path / "set", self.contents)
        look_over(images)
        (file,) = cache.glob("*.npz")
        file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
        looked.clear()
        assert list(look_over(images).manifest.bad) == [2]
        assert len(looked) == 5

    @pytest.mark.parametrize("what", ["rows", "reasons"])
    def test_another_layout_of_the_memory(self, what: str, tmp_path: Path, cache: Path) -> None:
        images = image_set(tmp_path / "set", self.contents)
        look_over(images)
        (file,) = cache.glob("*.npz")
        with np.load(file) as stored:
            arrays = dict(stored)
        for wrong in (np.zeros(3), arrays[what][:0], np.zeros((5, 5), arrays[what].dtype)):
            np.savez(file, **(arrays | {what: wrong}))
            assert list(look_over(images).manifest.bad) == [2]

    def test_a_cache_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path / "file"))
        images = image_set(tmp_path / "set", self.contents)
        with caplog.at_level(logging.WARNING, "fastaug"):
            assert list(survey(images, max_bad=0.5).bad) == [2]
            mark_bad(images, 0, "broke")
        assert "all of them" not in caplog.messages[0]
        assert "cannot be written" in caplog.messages[1]

    def test_a_failure_of_the_storage_is_not_remembered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = image_set(tmp_path / "set", [JPEG, PNG])

        def broken(*_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", broken)
            assert look_over(images).manifest.bad == {
                0: "cannot be read (Input/output error)",
                1: "cannot be read (Input/output error)",
            }
        assert look_over(images).manifest.bad == {}
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", broken)
            bad = look_over(images, full=True).manifest.bad
            assert bad[0] == "cannot be read (Input/output error)"
        assert look_over(images, full=True).manifest.bad == {}

    def test_ctrl_c_keeps_what_was_seen(
        self, tmp_path: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = image_set(tmp_path / "set", [JPEG] * 100)
        noted = manifest.look

        def interrupted(images: ImageSet, index: int, **options: object) -> look.Look:
            if index == 70:
                raise KeyboardInterrupt
            return noted(images, index, **options)

        with monkeypatch.context() as patched:
            patched.setattr(manifest, "look", interrupted)
            with pytest.raises(KeyboardInterrupt):
                look_over(images, workers=1)
        looked.clear()
        look_over(images, workers=1)
        assert looked == list(range(64, 100))


class TestSpans:
    def test_sizes_and_bad_ones(self, tmp_path: Path) -> None:
        whole = list(whole_images(RNG).values())
        images = span_set(tmp_path, [*whole, JPEG[:900], b""])
        found = look_over(images).manifest
        assert list(found.bad) == [len(whole), len(whole) + 1]
        expected = [Image.open(io.BytesIO(content)).size[::-1] for content in whole]
        assert found.sizes[: len(whole)].tolist() == [list(size) for size in expected]

    def test_a_shard_that_was_cut(self, tmp_path: Path) -> None:
        images = span_set(tmp_path, [encode(RGB, "BMP")] * 4)
        os.truncate(tmp_path / "1.tar", 15_000)
        assert look_over(images).manifest.bad == {3: "its shard ends before it does"}

    def test_an_image_in_two_parts(self, tmp_path: Path) -> None:
        joint = b"\x0a\x23\xd7\xce"
        parts = (JPEG[:200], JPEG[200 + len(joint) :])
        images = span_set(tmp_path, list(parts), glue=JPEG[200 : 200 + len(joint)])
        (tmp_path / "0.tar").write_bytes(b"".join(parts))
        continued = {0: ((200, len(parts[1])),)}
        spans = Spans(images.spans.shards, np.zeros(1, np.int32), np.zeros(1, np.int64),
                      np.array([200]), continued, images.spans.glue)  # fmt: skip
        images = ImageSet("x", ("a",), np.zeros(1, np.int64), spans=spans)
        found = look_over(images, full=True).manifest
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
            out = survey(images, max_bad=0.02)
        assert out.bad == {7: "it is empty", 90: "not an image of a known format"}
        assert len(out) == len(out.manifest.plain) == 100
        assert out.files == images.files
        assert not out.manifest.plain[[7, 90]].any()
        assert out.manifest.sizes[[7, 90]].tolist() == [[0, 0], [0, 0]]
        (line,) = caplog.messages
        (listed,) = cache.glob("*.txt")
        expected = f"{images.name}: 2 of 100 images are bad and left out: "
        assert line.startswith(f"{expected}{images.files[7]} (it is empty)")
        assert line.endswith(str(listed))
        assert listed.read_text().splitlines() == [
            f"{images.files[7]}: it is empty",
            f"{images.files[90]}: not an image of a known format",
        ]
        for index in (7, 90):
            images.files[index].write_bytes(JPEG)
        assert survey(images).bad == {}
        assert not listed.exists()

    def test_more_than_the_allowed_share(self, images: ImageSet) -> None:
        with pytest.raises(
            DataError, match=r"2 of 100 images are bad \(2%\), --max-bad allows 1\.9%; .*007\.jpg"
        ) as raised:
            survey(images, max_bad=0.019)
        assert "python -m fastaug.scan DATA" in str(raised.value)
        assert "\n" not in str(raised.value)

    def test_the_share_itself_is_allowed(self, images: ImageSet) -> None:
        images.files[7].write_bytes(JPEG)
        assert list(survey(images, max_bad=0.01).bad) == [90]

    def test_none_allowed(self, images: ImageSet) -> None:
        with pytest.raises(DataError, match="allows 0%"):
            survey(images, max_bad=0)

    def test_none_left(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", [b"", b""])
        with pytest.raises(DataError, match=r"2 of 2 images are bad \(100%\), none is left"):
            survey(images, max_bad=1)

    def test_an_array_is_sound(self, tmp_path: Path, cache: Path) -> None:
        array = np.zeros((4, 8, 9, 3), np.uint8)
        out = survey(ImageSet("x", ("a",), np.zeros(4, np.int64), array=array))
        assert out.manifest.sizes.tolist() == [[8, 9]] * 4
        assert out.manifest.sizes.dtype == np.int32
        assert out.manifest.plain.all()
        assert out.bad == {}
        mark_bad(out, 0, "cannot be")
        assert not cache.exists()


class TestMarkBad:
    @pytest.mark.parametrize("stored", [image_set, span_set])
    @pytest.mark.parametrize("surveyed", [True, False])
    def test_the_next_survey_leaves_it_out(
        self, stored: Callable, surveyed: bool, tmp_path: Path
    ) -> None:
        images = stored(tmp_path / "set", [JPEG, b"", JPEG, JPEG])
        if surveyed:
            look_over(images)
        mark_bad(images, 2, "DALI: failed\nin two lines")
        for full in (False, True):
            found = look_over(images, full=full).manifest
            assert found.bad == {1: "it is empty", 2: "DALI: failed in two lines"}
            assert not found.plain[2]
            assert found.sizes[2].tolist() == [0, 0]
            assert found.plain[[0, 3]].all()

    def test_until_it_is_mended(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", [JPEG] * 3)
        mark_bad(images, 1, "failed")
        assert list(look_over(images).manifest.bad) == [1]
        touch(images.files[1])
        assert look_over(images).manifest.bad == {}

    def test_the_newest_reason_stays(self, tmp_path: Path) -> None:
        images = image_set(tmp_path / "set", [JPEG] * 3)
        mark_bad(images, 0, "first")
        mark_bad(images, 0, "second")
        assert look_over(images).manifest.bad == {0: "second"}


class TestBudget:
    def test_it_is_never_exceeded(self) -> None:
        budget, held, most = Budget(100), [], []

        def work(count: int) -> None:
            with budget.hold(count):
                held.append(count)
                most.append(sum(held))
                time.sleep(0.002)
                held.remove(count)

        threads = [threading.Thread(target=work, args=(30 + i % 3,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(most) == 20
        assert 60 < max(most) <= 100

    def test_one_that_needs_more_goes_alone(self) -> None:
        budget = Budget(100)
        with budget.hold(500):
            other = threading.Thread(target=lambda: budget.hold(1).__enter__(), daemon=True)
            other.start()
            other.join(0.05)
            assert other.is_alive()
        other.join(5)
        assert not other.is_alive()

    def test_an_error_gives_it_back(self) -> None:
        budget = Budget(100)
        with pytest.raises(ValueError, match="x"), budget.hold(100):
            raise ValueError("x")
        with budget.hold(100):
            pass


class TestBar:
    def test_a_log_gets_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
    ) -> None:
        clock = iter(range(0, 1000, 2))
        monkeypatch.setattr(manifest, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        look_over(image_set(tmp_path / "set", [JPEG] * 40))
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
        monkeypatch.setattr(manifest, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        look_over(image_set(tmp_path / "set", [JPEG] * 40))
        out, err = capfd.readouterr()
        assert out == ""
        assert ("looking at images" in err) == (seconds > 0)


def test_pillow_does_not_warn_of_large_images(tmp_path: Path) -> None:
    images = image_set(tmp_path / "set", [png((10_000, 9_000), bytes(99))])
    with warnings.catch_warnings(action="error"):
        assert look_over(images).manifest.sizes.tolist() == [[9_000, 10_000]]
