"""The scan of an image: what is bad, and what DALI may decode. Oracles: Pillow and DALI."""

from __future__ import annotations

import io
import os
import re
import struct
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from expect import raises
from image_sets import JPEG, PNG, RGB, RNG, image_set
from mutants import chunk, encode, photo, png, whole_images, with_thumbnail
from PIL import Image

from fastaug.data import scan_image as image_scan
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import scan_set
from fastaug.data.scan_image import MemoryBudget
from fastaug.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")


def bad_of(content: bytes, tmp_path: Path, *, full: bool = False) -> str:
    """The reason why one image is bad, "" if it is not."""
    images = image_set(tmp_path / "one", [content])
    return scan_set(images, full=full).manifest.bad.get(0, "")


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
        assert scan_set(images, full=full).manifest.bad == {}

    def test_bytes_behind_an_image_are_not_its_end(self, tmp_path: Path) -> None:
        for content in (JPEG, PNG):
            assert bad_of(content + bytes(9000), tmp_path) == ""

    def test_only_full_sees_damaged_pixels(self, tmp_path: Path) -> None:
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
        with raises(DataError):
            image_scan._inflated_size(zlib.compress(bytes(999))[:-4] + b"abcd")

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        images = image_set(tmp_path, {"a.jpg": JPEG, "b.jpg": JPEG, "c.jpg": JPEG, "d.jpg": JPEG})
        for name in "abc":
            (tmp_path / f"{name}.jpg").unlink()
        (tmp_path / "b.jpg").mkdir()
        os.mkfifo(tmp_path / "c.jpg")  # whoever opens it to read waits for a writer
        bad = scan_set(images).manifest.bad
        assert bad == {0: "cannot be read (No such file or directory)", 1: bad[1], 2: "not a file"}
        assert bad[1] in ("not a file", "cannot be read (Is a directory)")

    def test_a_file_too_large_to_be_read(self, tmp_path: Path) -> None:
        images = image_set(tmp_path, [JPEG])
        os.truncate(Path(images.where(0)), 5 << 30)  # sparse
        assert scan_set(images).manifest.bad == {0: "5.0 GiB, too large for an image"}

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
            sizes = scan_set(images, full=full).manifest.sizes
            assert sizes.tolist() == [[height, width] for height, width, _ in expected]

    def test_a_quick_scan_does_not_read_the_pixels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[int] = []
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(n) or pread(fd, n, at))
        monkeypatch.setattr(ImageSet, "encoded", lambda *_: pytest.fail("read as a whole"))
        noise = Image.fromarray(RNG.integers(0, 256, (400, 400, 3), np.uint8))
        images = image_set(tmp_path, [encode(noise, "JPEG"), encode(noise, "PNG")])
        assert len(scan_set(images).manifest.bad) == 0
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
            found = scan_set(images, full=full).manifest
            bad = {Path(images.where(i)).name: reason for i, reason in found.bad.items()}
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


class TestMemoryBudget:
    def test_it_is_never_exceeded(self) -> None:
        budget, held, most = MemoryBudget(100), [], []

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
        budget = MemoryBudget(100)
        with budget.hold(500):
            other = threading.Thread(target=lambda: budget.hold(1).__enter__(), daemon=True)
            other.start()
            other.join(0.05)
            assert other.is_alive()
        other.join(5)
        assert not other.is_alive()

    def test_an_error_gives_it_back(self) -> None:
        budget = MemoryBudget(100)
        with pytest.raises(ValueError, match="x"), budget.hold(100):
            raise ValueError("x")
        with budget.hold(100):
            pass
