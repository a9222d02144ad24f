"""The quick scan of GIF, TIFF and WebP. Oracle: whether Pillow decodes the file.

`python tests/unit/test_image_structure.py 2000` counts what it misses among 2,000 damaged files of
each format.
"""

from __future__ import annotations

import struct
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from image_variants import variants
from mutants import damage

from fastaug.data import scan_image as image_scan
from fastaug.data.image_set import ImageSet, decode
from fastaug.data.scan_image import ImageInfo, MemoryBudget, scan_image
from fastaug.errors import DataError

KINDS = ("GIF", "TIFF", "WEBP")
UNUSUAL = {
    "GIF": {"no trailer"},
    "TIFF": {"group3", "group4", "tiff_ccitt", "lzma", "zstd", "webp"},
    "WEBP": {"bytes behind it"},
}
"""Sound files that are decoded to be sure."""
SHIFTED = {"cut", "cut-end", "hole", "inserted"}
"""Damages after which parts are not where the file says."""
MIN_SIZE = 700
"""Smaller files have no room for all kinds of damage."""

pytestmark = pytest.mark.filterwarnings("ignore")


class Content:
    """A storage of one image."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __len__(self) -> int:
        return 1

    def read(self, _index: int) -> bytes:
        return self.content

    def ends(self, _index: int, count: int) -> tuple[bytes, bytes, int]:
        return self.content[:count], self.content[-count:], len(self.content)

    def where(self, _index: int) -> str:
        return "image"


def quick_scan(content: bytes) -> ImageInfo:
    images = ImageSet("one", ("a",), np.zeros(1, np.int64), Content(content))  # type: ignore[arg-type]
    return scan_image(images, 0, full=False, budget=MemoryBudget(1 << 30))


def is_decodable(content: bytes) -> bool:
    try:
        decode(content, "image")
    except DataError:
        return False
    return True


def damaged(kind: str, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """(name of the variant, damage, content) without end."""
    rng = np.random.default_rng(seed)
    sound = variants(kind, rng)
    while True:
        for name, content in sound.items():
            if len(content) >= MIN_SIZE:
                yield from ((name, how, made) for how, made in damage(content, rng, 1) if made)


def count_missed(kind: str, count: int, seed: int = 0) -> tuple[Counter[str], Counter[str]]:
    """Files that Pillow cannot decode, and how many of them the quick scan lets through, by damage.
    Fails if it refuses a file that Pillow decodes."""
    undecodable, missed = Counter[str](), Counter[str]()
    for name, how, content in islice(damaged(kind, seed), count):
        reason = quick_scan(content).reason
        if is_decodable(content):
            assert reason == "", (name, how)
            continue
        undecodable[how] += 1
        missed[how] += not reason
    return undecodable, missed


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_pass_without_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_fully, decoded = image_scan._decode_fully, []

    def recording(content: bytes, info: ImageInfo) -> ImageInfo:
        decoded.append(content)
        return decode_fully(content, info)

    monkeypatch.setattr(image_scan, "_decode_fully", recording)
    sound = variants(kind, np.random.default_rng(0))
    assert len(sound) > 20
    for name, content in sound.items():
        assert is_decodable(content), name
        assert quick_scan(content).reason == "", name
    names = {name for name, content in sound.items() if content in decoded}
    assert names <= UNUSUAL[kind]


def test_odd_tags_of_a_tiff_are_left_to_the_decoder() -> None:
    """Any entry of the directory may have any type and count; the scan agrees with Pillow."""
    sound = variants("TIFF", np.random.default_rng(0))["plain"]
    entries = int.from_bytes(sound[8:10], "little")
    verdicts = Counter[bool]()
    for entry in range(entries):
        for kind, count in ((0, 1), (2, 3), (5, 1), (11, 1), (3, 0), (4, 2), (3, 2**31)):
            content = bytearray(sound)
            place = 10 + 12 * entry + 2
            content[place : place + 6] = struct.pack("<HI", kind, count)
            decodes = is_decodable(bytes(content))
            assert (quick_scan(bytes(content)).reason == "") == decodes, (entry, kind, count)
            verdicts[decodes] += 1
    assert min(verdicts[True], verdicts[False]) > 5


@pytest.mark.parametrize(("kind", "share"), [("GIF", 0.3), ("TIFF", 0.2), ("WEBP", 0.2)])
def test_what_a_quick_scan_misses(kind: str, share: float) -> None:
    """Only damage within the compressed pixels."""
    undecodable, missed = count_missed(kind, 250, seed=1)
    assert undecodable.total() > 80
    assert {how for how in missed if missed[how]} & SHIFTED == set()
    assert missed.total() < share * undecodable.total()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for kind in KINDS:
        undecodable, missed = count_missed(kind, int(sys.argv[1]))
        share = missed.total() / undecodable.total()
        print(f"{kind}: {undecodable.total()} of {sys.argv[1]} do not decode; {share:.1%} missed")
        print("   ", {how: f"{missed[how]} of {undecodable[how]}" for how in undecodable})
