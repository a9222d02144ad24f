"""Hundreds of damaged images: no crash, no hang, no memory explosion, and nothing left for DALI.

The scan and DALI run in processes of their own, so that a crash of either is seen and the peak of
memory is theirs alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutants import chunk, mutants, png

SECONDS = 60
"""Far more than the three that it takes: a hang, not slowness, is what fails."""
GROWTH = 900 << 20
"""Bytes: one image of 180 megapixels is 700 MB in Pillow."""
BOMBS = 6


def bombs() -> list[bytes]:
    """Sound PNGs of 81 megapixels in 1 MB: 324 MB each when they are decoded."""
    side = 9_000
    packer = zlib.compressobj(1)
    rows = [packer.compress(bytes(1 + 3 * side)) for _ in range(side)]
    pixels = chunk(b"IDAT", b"".join(rows) + packer.flush())
    none = chunk(b"IDAT", zlib.compress(b""))
    return [
        png((side, side), b"", extra=chunk(b"tEXt", b"n\0%d" % i)).replace(none, pixels)
        for i in range(BOMBS)
    ]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """File -> how it was made; in an order that mixes the kinds, with wrong suffixes."""
    made = [*mutants(seed=0, rounds=3), *(("bomb whole", content) for content in bombs())]
    folder = tmp_path_factory.mktemp("mutants")
    files = {}
    for place in np.random.default_rng(0).permutation(len(made)):
        kind, content = made[place]
        file = folder / f"{len(files):04}.{('jpg', 'png', 'bmp')[place % 3]}"
        file.write_bytes(content)
        files[file] = kind
    return files


@pytest.fixture(scope="module")
def scanned(kinds: dict[Path, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("child")
    (folder / "files.json").write_text(json.dumps([str(file) for file in kinds]))
    assert len(kinds) > 600
    return run_child("scan", folder)


def run_child(task: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, task, str(folder)],
        env=os.environ
        | {"FASTAUG_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},  # tests/helpers is on it
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / f"{task}.json").read_text())


def numbers(kinds: dict[Path, str], *wanted: str) -> set[str]:
    """The numbers of the files of these kinds, as the child writes them."""
    return {str(i) for i, kind in enumerate(kinds.values()) if kind in wanted}


def test_every_image_is_judged(kinds: dict[Path, str], scanned: dict[str, Any]) -> None:
    sound = numbers(kinds, *(kind for kind in kinds.values() if kind.endswith("whole")))
    never = numbers(kinds, *(kind for kind in kinds.values() if kind.startswith("none")))
    for mode in ("quick", "full"):
        bad = scanned[mode]["bad"]
        assert all(reason and "\n" not in reason for reason in bad.values())
        assert sound & set(bad) == set()
        assert never - set(bad) == set()
    assert set(scanned["quick"]["bad"]) <= set(scanned["full"]["bad"])


@pytest.mark.parametrize(
    "kind",
    [
        *("jpeg", "jpeg-444", "jpeg-progressive", "jpeg-grey", "jpeg-cmyk", "jpeg-thumbnail"),
        *("png", "png-alpha", "png-palette", "webp", "webp-alpha", "ppm"),
    ],
)
def test_a_quick_scan_finds_what_is_cut_off(
    kind: str, kinds: dict[Path, str], scanned: dict[str, Any]
) -> None:
    cut = numbers(kinds, f"{kind} cut", f"{kind} cut-end")
    assert len(cut) == 6
    assert cut - set(scanned["quick"]["bad"]) == set()


def test_time_and_memory_are_bounded(scanned: dict[str, Any]) -> None:
    assert scanned["seconds"] < SECONDS
    assert scanned["growth"] < GROWTH


@pytest.mark.skipif(not importlib.util.find_spec("nvidia.dali"), reason="DALI is not installed")
def test_dali_decodes_what_a_full_scan_lets_through(
    kinds: dict[Path, str], scanned: dict[str, Any], tmp_path: Path
) -> None:
    bad, plain = set(scanned["full"]["bad"]), scanned["full"]["plain"]
    left = [i for i in range(len(kinds)) if str(i) not in bad and plain[i]]
    left = [i for i in left if list(kinds.values())[i] != "bomb whole"]  # sound, and slow
    assert len(left) > 200
    (tmp_path / "files.json").write_text(json.dumps([str(list(kinds)[i]) for i in left]))
    failed = run_child("dali", tmp_path)["failed"]
    assert [f"{list(kinds.values())[left[i]]}: {said}" for i, said in failed] == []


def scan_files(folder: Path) -> dict[str, Any]:
    """In the child: both scans of the files of a list."""
    from fastaug.data.image_set import ImageSet
    from fastaug.data.scan import scan_set
    from fastaug.data.storage import Files

    files = tuple(Path(file) for file in json.loads((folder / "files.json").read_text()))
    images = ImageSet(str(folder), ("a",), np.zeros(len(files), np.int64), Files.of(files))
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    result: dict[str, Any] = {}
    for name, full in (("quick", False), ("full", True)):
        found = scan_set(images, full=full, workers=8).manifest
        result[name] = {"bad": dict(found.bad), "plain": found.plain.tolist()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result | {"seconds": time.monotonic() - begin, "growth": (peak - before) << 10}


def decode_files(folder: Path) -> dict[str, Any]:
    """In the child: DALI on each file of a list; an error takes a new pipeline."""
    from nvidia.dali import Pipeline, fn, types

    def build() -> Pipeline:
        pipe = Pipeline(1, num_threads=1, device_id=None, prefetch_queue_depth=1)
        with pipe:
            encoded = fn.external_source(name="encoded")
            pipe.set_outputs(
                fn.decoders.image(
                    encoded,
                    device="cpu",
                    output_type=types.RGB,
                    jpeg_fancy_upsampling=True,
                    adjust_orientation=False,
                )
            )
        pipe.build()
        return pipe

    def fails(file: str) -> str:
        nonlocal pipe
        try:
            pipe.feed_input("encoded", [np.fromfile(file, np.uint8)])
            pipe.run()
        except RuntimeError as error:
            pipe = build()
            return str(error)[-300:]
        return ""

    pipe = build()
    said = [fails(file) for file in json.loads((folder / "files.json").read_text())]
    return {"failed": [(number, words) for number, words in enumerate(said) if words]}


if __name__ == "__main__":
    task, folder = sys.argv[1], Path(sys.argv[2])
    result = {"scan": scan_files, "dali": decode_files}[task](folder)
    (folder / f"{task}.json").write_text(json.dumps(result))
