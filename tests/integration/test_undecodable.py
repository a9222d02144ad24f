"""Images that pass the quick scan but cannot be decoded: they are not retried like a storage."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mutants import encode
from PIL import Image

import fastaug
from fastaug.config import TrainConfig
from fastaug.data import retry
from fastaug.data.image_set import ImageSet

Tiny = Callable[..., TrainConfig]

LOADERS: dict[str, dict[str, Any]] = {
    "torch": {"loader": "torch", "workers": 0},
    "torch workers": {"loader": "torch", "workers": 1},
    "dali": {"loader": "dali", "workers": 1},
}
every_loader = pytest.mark.parametrize("kind", LOADERS)


@pytest.fixture
def data(folder: Path, tmp_path: Path, compiled_cache: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "data"))


@pytest.fixture
def make(tiny: Tiny, data: Path) -> Tiny:
    shared = {"data": str(data), "batch_size": 8, "max_bad": 0.2}
    return lambda kind, **changes: tiny(**{**shared, **LOADERS[kind], **changes})


def undecodable(file: Path) -> None:
    """A PNG whose header and end are in order, and whose pixels are not. Oracle: Pillow."""
    content = bytearray(encode(Image.open(file), "PNG"))
    place = content.index(b"IDAT") + 10
    content[place : place + 20] = b"\xff" * 20
    with pytest.raises((OSError, SyntaxError)):
        Image.open(io.BytesIO(content)).load()
    file.write_bytes(content)


@every_loader
def test_unchanged_ones_are_not_retried(
    make: Tiny,
    data: Path,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = sorted(data.glob("train/*/*.jpg"))[::12]
    for file in files:
        undecodable(file)
    slept: list[float] = []
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=slept.append))
    loader = fastaug.build_loader(make(kind))
    assert loader.images.bad == {}  # the scan has not found them
    used = {index for batch in loader for index in batch.indices.tolist()}
    bad = {Path(loader.images.where(index)) for index in loader.images.bad}
    assert bad == set(files)
    assert not used & set(loader.images.bad)
    assert slept == []
    assert [line for line in caplog.messages if "retrying" in line] == []
    again = fastaug.build_loader(make(kind))
    assert again.images.bad.keys() == loader.images.bad.keys()  # the next run knows them


def test_one_that_was_rewritten_after_the_scan_is_retried(
    make: Tiny, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it has the same bytes twice: its writer may not have finished."""
    images = fastaug.build_loader(make("torch")).images
    file = Path(images.where(3))
    content = file.read_bytes()
    undecodable(file)
    first = retry.try_read(images.image, 3)
    assert isinstance(first, retry.ReadFailure)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        file.write_bytes(content)

    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=sleep))
    found = retry.read_with_retries(images, {3: first}, images.image)
    assert found[3].shape == (20, 20, 3)
    assert len(slept) == 1


@pytest.mark.parametrize("kind", ["torch", "dali"])
def test_other_bytes_at_every_read_are_a_storage_s_fault(
    make: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that returns wrong bytes for a while, without an error or a changed time."""
    config = make(kind)
    whole = [batch.indices.tolist() for batch in fastaug.build_loader(config)]
    loader, encoded, reads = fastaug.build_loader(config), ImageSet.encoded, []

    def flaky(self: ImageSet, index: int) -> bytes:
        content = bytes(encoded(self, index))
        if index == 5 and len(reads) < 4:
            reads.append(index)
            return content[: 40 * len(reads)]
        return content

    monkeypatch.setattr(ImageSet, "encoded", flaky)
    monkeypatch.setattr(retry, "RETRY_PAUSES", (0.0, 0.0, 0.0, 0.0))
    assert [batch.indices.tolist() for batch in loader] == whole
    assert len(reads) == 4
    assert loader.images.bad == {}
    assert [line for line in caplog.messages if "can be read again" in line]


def test_an_item_that_pillow_cannot_decode_is_not_retried(
    tiny: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Dataset that decodes its images itself."""
    failing: dict[int, Exception] = {}

    class Decoded:
        def __len__(self) -> int:
            return 36

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            if index in failing:
                raise failing[index]
            return Image.new("RGB", (20, 20), (index, 0, 0)), index % 2

    slept: list[float] = []
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=slept.append))
    for error, pauses in (
        (OSError("image file is truncated"), 0),
        (ConnectionError("the server is gone"), len(retry.RETRY_PAUSES)),
    ):
        loader = fastaug.build_loader(tiny(max_bad=0.1, batch_size=8), Decoded())
        failing[5], slept[:] = error, []
        list(loader)
        list(loader)
        assert list(loader.images.bad) == [5]
        assert len(slept) == pauses
        failing.clear()
