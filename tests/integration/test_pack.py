"""python -m fastaug.pack: the shards as tarfile, hashlib and Pillow see them, and training on them.

Interrupted packs and damaged folders: test_pack_damage.py.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from color_folders import CLASSES, color_image, write_folder
from expect import missing
from hugging_face_sets import table, write_parquet
from image_sets import files_of, open_both, open_data
from PIL import Image
from pyarrow.parquet import ParquetFile
from shard_writers import photos
from training import assert_same_weights, run

from fastaug import cli, pack
from fastaug.config import TrainConfig
from fastaug.data import progress, scan
from fastaug.data.packing.config import PackConfig
from fastaug.data.packing.packer import pack as pack_sets
from fastaug.data.readers.packed import open_index
from fastaug.data.scan import mark_bad, scan_set
from fastaug.data.storage import Files
from fastaug.engine.trainer import Trainer

pytestmark = pytest.mark.usefixtures("own_cache")


def packed(source: Path | str, out: Path, *flags: str) -> Path:
    assert cli.run(pack.main, [str(source), str(out), *flags]) == 0
    return out


def members(shard: Path) -> dict[str, bytes]:
    with tarfile.open(shard) as archive:
        return {i.name: archive.extractfile(i).read() for i in archive}  # type: ignore[union-attr]


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colors under noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int64)
    noisy = pixels + rng.integers(-9, 10, (height, width, 1))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def opened(file: Path) -> Image.Image:
    return Image.open(io.BytesIO(file.read_bytes()))


def test_the_shards_are_webdataset(folder: Path, tmp_path: Path) -> None:
    out = packed(folder, tmp_path / "out")
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert names == {"classes.txt", "train.index", "train/00000.tar", "val.index", "val/00000.tar"}
    assert (out / "classes.txt").read_text().split() == list(CLASSES)
    for split, shard in (("train", "train/00000.tar"), ("test", "val/00000.tar")):
        files = sorted((folder / split).rglob("*.jpg"))
        expected = {}
        for i, file in enumerate(files):
            expected[f"{i:08}.jpg"] = file.read_bytes()
            expected[f"{i:08}.cls"] = b"%d" % CLASSES.index(file.parent.name)
        assert members(out / shard) == expected


def test_the_index_has_offsets_sizes_and_checksums(folder: Path, tmp_path: Path) -> None:
    index = open_index(packed(folder, tmp_path / "out"), "train")
    (shard,) = index.shards
    content = (tmp_path / "out" / shard.name).read_bytes()
    assert (shard.bytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    files = sorted((folder / "train").rglob("*.jpg"))
    assert len(index) == shard.images == len(files)
    for row, file in zip(index.rows, files, strict=True):
        image = content[int(row["offset"]) : int(row["offset"]) + int(row["size"])]
        assert image == file.read_bytes()
        assert row["crc32"] == zlib.crc32(image)
        assert (row["width"], row["height"]) == opened(file).size


def test_shards_of_a_size(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "colors", {"train": 40}, size=200)
    out = packed(source, tmp_path / "out", "--shard-size", "1")
    shards = sorted((out / "train").iterdir())
    assert [s.name for s in shards] == [f"{i:05}.tar" for i in range(len(shards))]
    assert len(shards) > 1
    sizes = [s.stat().st_size for s in shards]
    assert max(sizes) <= 10**6
    assert min(sizes[:-1]) > 0.95 * 10**6
    keys = [name for shard in shards for name in members(shard)]
    assert len(set(keys)) == len(keys) == 240
    assert not (out / "val.index").exists()


def test_equal_bytes_whatever_the_threads(folder: Path, tmp_path: Path) -> None:
    one = packed(folder, tmp_path / "one", "--workers", "1", "--max-side", "16")
    many = packed(folder, tmp_path / "many", "--workers", "7", "--max-side", "16")
    for file in one.rglob("*"):
        if file.is_file():
            assert file.read_bytes() == (many / file.relative_to(one)).read_bytes(), file


def test_equal_bytes_without_memory_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = packed(folder, tmp_path / "first", "--max-side", "16")
    monkeypatch.delattr("os.memfd_create")
    second = packed(folder, tmp_path / "second", "--max-side", "16")
    shards = [(out / "train/00000.tar").read_bytes() for out in (first, second)]
    assert shards[0] == shards[1]


def test_read_with_and_without_the_index(folder: Path, tmp_path: Path) -> None:
    out = packed(folder, tmp_path / "out")
    plain = tmp_path / "plain"
    for shard in out.rglob("*.tar"):
        (plain / shard.parent.name).mkdir(parents=True)
        (plain / shard.parent.name / shard.name).write_bytes(shard.read_bytes())
    (plain / "classes.txt").write_bytes((out / "classes.txt").read_bytes())
    for root in (out, plain):
        for images, original in zip(open_both(root), open_both(folder), strict=True):
            assert images.classes == original.classes
            assert images.labels.tolist() == original.labels.tolist()
            for i, file in enumerate(files_of(original)):
                assert images.encoded(i) == file.read_bytes()


def test_no_scan_is_needed_and_a_scan_finds_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = packed(folder, tmp_path / "out")
    images = open_data(out, "train")
    assert images.manifest is not None
    with monkeypatch.context() as patch:
        patch.delattr(scan, "scan_image")
        known = scan_set(images).manifest
    scanned = scan_set(replace(images, manifest=None)).manifest
    assert np.array_equal(known.sizes, scanned.sizes)
    assert np.array_equal(known.plain, scanned.plain)
    assert np.array_equal(images.manifest.sizes, scanned.sizes)
    assert np.array_equal(images.manifest.plain, scanned.plain)
    part = images.subset(np.array([3, 5]), "part")
    assert part.manifest is not None
    assert np.array_equal(part.manifest.sizes, scanned.sizes[[3, 5]])


def test_an_image_marked_as_bad_by_a_run_stays_bad(folder: Path, tmp_path: Path) -> None:
    images = open_data(packed(folder, tmp_path / "out"), "train")
    mark_bad(images, 4, "noise")
    found = scan_set(images).manifest
    assert dict(found.bad) == {4: "noise"}
    assert (found.sizes[[3, 5]] == 20).all()


@pytest.mark.parametrize("loader", ["torch", "dali"])
def test_training_equals_training_on_the_source(
    loader: str, folder: Path, tmp_path: Path, tiny: Callable[..., TrainConfig]
) -> None:
    out = packed(folder, tmp_path / "out")
    config = tiny(loader=loader, max_steps=4)
    assert_same_weights(run(config, "-source"), run(config.replace(data=str(out)), "-packed"))


def test_a_damaged_image_is_left_out_of_the_training(
    folder: Path, tmp_path: Path, tiny: Callable[..., TrainConfig], caplog: pytest.LogCaptureFixture
) -> None:
    out = packed(folder, tmp_path / "out")
    index = open_index(out, "train")
    shard = out / index.shards[0].name
    content = bytearray(shard.read_bytes())
    content[int(index.rows["offset"][7]) + 300] ^= 1
    shard.write_bytes(content)
    Trainer(tiny(data=str(out), max_bad=0.2)).fit()
    assert any(f"byte {index.rows['offset'][7]}:" in message for message in caplog.messages)


class TestMaxSide:
    def pixels(self, out: Path) -> list[np.ndarray]:
        images = open_data(out, "train")
        return [images.image(i).astype(np.int64) for i in range(len(images))]

    def source(self, root: Path, **images: Image.Image | bytes) -> Path:
        for name, image in images.items():
            file = root / "train" / name / "0.img.png"
            file.parent.mkdir(parents=True)
            if isinstance(image, bytes):
                file.write_bytes(image)
            else:
                image.save(file, "PNG")
        return root

    def jpeg(self, image: Image.Image, **options: object) -> bytes:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=95, **options)
        return file.getvalue()

    def test_sizes_and_pixels(self, tmp_path: Path) -> None:
        wide, tall, huge = photo(500, 375), photo(300, 431, 1), photo(2000, 1600, 2)
        source = self.source(
            tmp_path / "source",
            a=self.jpeg(wide),
            b=self.jpeg(tall),
            c=self.jpeg(huge),
            d=wide,
        )
        out = packed(source, tmp_path / "out", "--max-side", "256", "--quality", "95")
        found = self.pixels(out)
        expected = [wide.resize((341, 256), Image.Resampling.LANCZOS)]
        expected += [tall.resize((256, 368), Image.Resampling.LANCZOS)]
        expected += [huge.resize((320, 256), Image.Resampling.LANCZOS), expected[0]]
        for ours, theirs in zip(found, expected, strict=True):
            reference = np.asarray(theirs, np.int64)
            assert ours.shape == reference.shape
            assert np.abs(ours - reference).mean() < 2.5
            # A shift by one pixel, another filter or a turned image would be further away.
            assert np.abs(ours - np.roll(reference, 1, 1)).mean() > np.abs(ours - reference).mean()
        assert {name[8:] for name in members(out / "train/00000.tar")} == {".jpg", ".cls"}

    def test_small_images_are_copied(self, folder: Path, tmp_path: Path) -> None:
        outs = [packed(folder, tmp_path / n, "--max-side", n) for n in ("0", "20", "19")]
        shards = [(out / "train/00000.tar").read_bytes() for out in outs]
        assert shards[0] == shards[1] != shards[2]

    def test_quality(self, tmp_path: Path) -> None:
        source = self.source(tmp_path / "source", a=photo(400, 400), b=photo(400, 400, 1))
        low = packed(source, tmp_path / "low", "--max-side", "200", "--quality", "30")
        high = packed(source, tmp_path / "high", "--max-side", "200")
        sizes = [open_index(out, "train").rows["size"].astype(int) for out in (low, high)]
        assert (sizes[0] < sizes[1] / 2).all()
        content = members(high / "train/00000.tar")["00000000.jpg"]
        ours = Image.open(io.BytesIO(content)).quantization  # type: ignore[attr-defined]
        file = io.BytesIO()
        photo(9, 9).save(file, "JPEG", quality=90)
        assert ours == Image.open(file).quantization  # type: ignore[attr-defined]

    def test_what_training_would_see(self, tmp_path: Path) -> None:
        """Orientation and color profiles are ignored, 16 bits scaled, transparency dropped."""
        base = photo(120, 80)
        gray16 = Image.fromarray(np.asarray(base.convert("L")).astype(np.uint16) * 257)
        alpha = Image.linear_gradient("L").resize(base.size)
        exif = Image.Exif()
        exif[0x0112] = 6
        cases = {
            "cmyk": self.jpeg(base.convert("CMYK")),
            "exif": self.jpeg(base, exif=exif),
            "gray": self.jpeg(base.convert("L")),
            "gray16": gray16,
            "palette": base.quantize(256),
            "rgba": Image.merge("RGBA", (*base.split(), alpha)),
        }
        source = self.source(tmp_path / "source", **cases)
        seen = open_data(source, "train")
        out = packed(source, tmp_path / "out", "--max-side", "40", "--quality", "100")
        found = self.pixels(out)
        assert len(found) == len(cases)
        for i, ours in enumerate(found):
            size = (60, 40)
            full = Image.fromarray(seen.image(i))
            reference = np.asarray(full.resize(size, Image.Resampling.LANCZOS), np.int64)
            assert ours.shape == reference.shape, seen.classes[i]
            assert np.abs(ours - reference).mean() < 6, seen.classes[i]
        for name, content in members(tmp_path / "out/train/00000.tar").items():
            if name.endswith(".jpg"):
                assert b"Exif" not in content


def test_arrays_become_pngs_with_the_same_pixels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 10, 12, 3), np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(8) % 2, classes=["x", "y"])
    out = packed(tmp_path / "a.npz", tmp_path / "out")
    images = open_data(out, "train")
    assert images.classes == ("x", "y")
    shards = [members(path) for path in sorted(out.rglob("*.tar"))]
    stored = {n: c for shard in shards for n, c in shard.items() if n.endswith(".png")}
    found = [np.asarray(Image.open(io.BytesIO(content))) for content in stored.values()]
    assert sorted(map(bytes, found)) == sorted(map(bytes, pixels[: len(found)]))


def test_formats_keep_their_suffix(tmp_path: Path) -> None:
    for label, kind in enumerate(["png", "bmp", "webp", "ppm", "tiff", "gif", "ico"]):
        file = tmp_path / "source/train" / f"{label}{kind}" / "0.jpg"  # named wrongly
        file.parent.mkdir(parents=True)
        photo(16, 16, label).save(file, kind)
    out = packed(tmp_path / "source", tmp_path / "out")
    stored = members(out / "train/00000.tar")
    suffixes = [name[8:] for name in stored if not name.endswith(".cls")]
    assert suffixes == [".png", ".bmp", ".webp", ".ppm", ".tif", ".gif", ".png"]
    images = open_data(out, "train")
    for i, file in enumerate(sorted((tmp_path / "source/train").rglob("*.jpg"))):
        assert np.array_equal(images.image(i), np.asarray(opened(file).convert("RGB")))


def test_a_class_without_images(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", {"train": 3, "val": 1})
    (source / "train/empty").mkdir()
    images, tests = open_both(packed(source, tmp_path / "out"))
    assert images.classes == tests.classes == ("blue", "empty", "green", "red")
    assert images.labels.tolist() == [0] * 3 + [2] * 3 + [3] * 3
    assert tests.labels.tolist() == [0, 2, 3]


def test_a_log_gets_a_line_now_and_then(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 10_000, 5))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level("INFO")
    packed(folder, tmp_path / "out")
    lines = [line for line in caplog.messages if "eta" in line]
    assert len(lines) == 3  # every 60 s of 5 s per image: of 36 images two lines, of 15 one
    assert missing(lines[0], "13 36 eta 0:01:55") == []


class InOrder(Files):
    """Files that can only be read in order, each once."""

    position = 0

    def read(self, index: int) -> bytes:
        assert index == self.position
        self.position += 1
        return super().read(index)

    def for_random_access(self) -> Files:
        raise AssertionError


def test_a_storage_that_is_only_read_in_order(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastaug.data.packing import packer
    from fastaug.data.storage import Spans

    monkeypatch.setattr(packer, "ANY_ORDER", Spans)
    images = open_data(folder, "train")
    files = files_of(images)
    sets = {"train": replace(images, storage=InOrder.of(files))}
    pack_sets(sets, tmp_path / "out", PackConfig(workers=5))  # type: ignore[arg-type]
    stored = members(tmp_path / "out/train/00000.tar")
    assert [stored[f"{i:08}.jpg"] for i in range(len(files))] == [f.read_bytes() for f in files]


def test_row_groups_of_parquet_files_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = photos(37)
    for number in range(2):
        part = table(samples[20 * number : 20 * (number + 1)])
        write_parquet(tmp_path / f"source/train-0000{number}-of-00002.parquet", part)
    groups: list[int] = []
    read = ParquetFile.read_row_groups

    def noted(self: ParquetFile, wanted: list[int], *args: Any, **options: Any) -> Any:
        if "image" in str(options.get("columns", args)):
            groups.extend(wanted)
        return read(self, wanted, *args, **options)

    monkeypatch.setattr(ParquetFile, "read_row_groups", noted)
    out = packed(tmp_path / "source", tmp_path / "out", "--workers", "5")
    assert sorted(groups) == sorted([0, 1, 2, 3, 4] * 2)
    stored = members(out / "train/00000.tar")
    assert [stored[f"{i:08}.jpg"] for i in range(37)] == [image for image, _ in samples]
    assert [stored[f"{i:08}.cls"] for i in range(37)] == [b"%d" % label for _, label in samples]


class TestBadImages:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        """36 training images, of which 2 are bad, one with an intact header and end."""
        root = write_folder(tmp_path / "source", {"train": 12, "val": 2}, size=64)
        (root / "train/green/03.jpg").write_bytes(b"")
        file = root / "train/red/04.jpg"
        Image.fromarray(color_image(2, np.random.default_rng(0), 64)).save(file, "PNG")
        content = file.read_bytes()
        file.write_bytes(content[:2000] + bytes([content[2000] ^ 4]) + content[2001:])
        return root

    def test_they_are_left_out_and_listed(self, source: Path, tmp_path: Path) -> None:
        out = packed(source, tmp_path / "out", "--max-bad", "0.1", "--full")
        lines = (out / "bad-images.txt").read_text().splitlines()
        assert [line.partition(":")[0] for line in lines] == [
            str(source / "train/green/03.jpg"),
            str(source / "train/red/04.jpg"),
        ]
        images, original = open_data(out, "train"), open_data(source, "train")
        good = [i for i in range(36) if i not in (15, 28)]
        assert images.labels.tolist() == original.labels[good].tolist()
        assert images.encoded(15) == original.encoded(16)

    def test_a_quick_check_finds_what_is_decoded(self, source: Path, tmp_path: Path) -> None:
        quick = packed(source, tmp_path / "quick", "--max-bad", "0.1")
        assert len((quick / "bad-images.txt").read_text().splitlines()) == 1
        shrunk = packed(source, tmp_path / "shrunk", "--max-bad", "0.1", "--max-side", "32")
        assert len((shrunk / "bad-images.txt").read_text().splitlines()) == 2

    def test_too_many(self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        args = [str(source), str(tmp_path / "out")]
        assert cli.run(pack.main, args) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
        assert missing(line, "--max-bad 1% 36", str(source / "train/green/03.jpg")) == []
        assert cli.run(pack.main, [*args, "--max-bad", "0.1"]) == 0
