"""Hostile data: files of a few KB that claim gigabytes, lead elsewhere, or speak to the terminal.

docs/security.md has the table of threats. What could take all memory or never end is opened in one
child with little of either, so that a bomb that goes off is a failed test and not a dead machine.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from color_folders import write_folder
from expect import raises
from hostile_files import CASES, META, TWO, npy, zipped
from image_sets import open_data
from open_hostile import SECONDS
from rich.console import Console
from shard_writers import (
    photos,
    read_back,
    small_memory,
    tar,
    write_tar,
)

from fastaug import cli, evaluate
from fastaug.config import TrainConfig
from fastaug.data.readers import npz
from fastaug.data.readers.plain_pickle import read_plain_pickle
from fastaug.engine import evaluation
from fastaug.errors import DataError, printable
from fastaug.models.build import build_configured_model
from fastaug.runs import console

ROOT = Path(__file__).parents[2]
GROWTH = 300 << 20
"""Bytes that the child may really use."""
HOSTILE = "\x1b]0;owned\x07\x9b2J\u202egpj.\nerror: x"
"""Sets a terminal's title, clears it, turns the rest round and forges a line."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Case -> kind and text of the error, seconds, and bytes that the child has grown by."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = []
    for number, (make, _) in enumerate(CASES.values()):
        (folder / str(number)).mkdir()
        paths.append(str(make(folder / str(number))))
    (folder / "paths.json").write_text(json.dumps(paths))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/open_hostile.py"), str(folder)],
        env=os.environ | {"FASTAUG_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    begun = list(CASES)[len(found)] if len(found) < len(CASES) else "nothing"
    assert done.returncode == 0, f"{begun}: {done.returncode} {done.stderr[-2000:]}"
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_bomb_is_an_error_of_one_line(name: str, verdicts: dict[str, dict[str, Any]]) -> None:
    verdict = verdicts[name]
    assert verdict["kind"] == "DataError", verdict
    assert re.search(CASES[name][1], verdict["said"]), verdict["said"]
    assert "\n" not in verdict["said"]


def test_bombs_take_little_memory_and_time(verdicts: dict[str, dict[str, Any]]) -> None:
    assert max(verdict["growth"] for verdict in verdicts.values()) < GROWTH
    assert sum(verdict["seconds"] for verdict in verdicts.values()) < SECONDS / 2


# Archives that lead elsewhere.


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_a_member_of_cifar_that_is_no_file(kind: bytes, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(META)
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/cifar.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-py/batches.meta")
        link.type, link.linkname = kind, str(secret)
        archive.addfile(link)
    before = listing(tmp_path)
    with raises(DataError, "batches.meta"):
        open_data(str(path), "train")
    assert listing(tmp_path) == before


def test_a_member_of_cifar_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for _ in range(2):
            member = tarfile.TarInfo("./cifar-10-batches-py/batches.meta")
            member.size = len(META)
            archive.addfile(member, io.BytesIO(META))
    with raises(DataError, "batches.meta"):
        open_data(str(path), "train")


def test_paths_in_a_shard_are_only_names(tmp_path: Path, own_cache: Path) -> None:
    """An absolute path and one that climbs are images like others, and nothing is unpacked."""
    (first, _), (second, _) = photos(2)
    victim = tmp_path / "victim.jpg"
    members = [("../victim.jpg", first), ("../victim.cls", b"1")]
    members += [(str(victim), second), (str(victim.with_suffix(".cls")), b"2")]
    (tmp_path / "in").mkdir()
    tar(tmp_path / "in/train.tar", members)
    before = listing(tmp_path)
    assert read_back(tmp_path / "in") == [(first, 1), (second, 2)]
    new = set(listing(tmp_path)) - set(before)
    assert all(Path(path).is_relative_to(own_cache) for path in new)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_shard_are_not_followed(kind: bytes, tmp_path: Path) -> None:
    ((secret, _),) = photos(1)
    (tmp_path / "secret.jpg").write_bytes(secret)
    samples = photos(3, seed=1)
    path = write_tar(tmp_path / "train.tar", samples)
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("zz.jpg")
        link.type, link.linkname = kind, str(tmp_path / "secret.jpg")
        archive.addfile(link)
    assert read_back(tmp_path) == samples
    with tarfile.open(path, "a") as archive:  # and with a label it is a sample without an image
        label = tarfile.TarInfo("zz.cls")
        label.size = 1
        archive.addfile(label, io.BytesIO(b"1"))
    with raises(DataError, "zz.cls image"):
        open_data(str(tmp_path), "train")


def test_links_in_a_folder_are_the_user_s_own(tmp_path: Path) -> None:
    """Links to files and class folders are followed; one that leads round is not."""
    root = write_folder(tmp_path / "set", {"train": 2})
    elsewhere = tmp_path / "elsewhere"
    (root / "train/red").rename(elsewhere)
    (root / "train/red").symlink_to(elsewhere)
    (root / "train/green/link.jpg").symlink_to(elsewhere / "00.jpg")
    (root / "train/green/loop").symlink_to(root / "train")
    (root / "train/green/gone.jpg").symlink_to(tmp_path / "nowhere")
    images = open_data(str(root), "train")
    assert np.bincount(images.labels).tolist() == [2, 4, 2]


# What the .npz of a stranger may hold.


def test_members_that_inflate_are_held_to_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB of zeros in 70 KB; grey ones would become three times as many."""
    grey = npy("|u1", (2, 2**12, 2**13)) + bytes(2**26)
    path = zipped(tmp_path, images=grey, labels=TWO)
    assert path.stat().st_size < 2**17
    for bound, message in ((2**26, "over a third of the memory"), (3 * 2**26, "with labels of")):
        monkeypatch.setattr(npz, "memory_bound", lambda bound=bound: bound)
        with raises(DataError, message):
            open_data(str(path), "train")
    monkeypatch.setattr(npz, "memory_bound", lambda: 2**26)
    with small_memory(), pytest.raises(DataError):
        open_data(str(path), "train")


def test_an_npz_with_two_arrays_of_one_name(tmp_path: Path) -> None:
    path = zipped(tmp_path, images=npy("|u1", (2, 2, 2, 3)) + bytes(24), labels=TWO)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("labels.npy", TWO)
    with raises(DataError, path.name):
        open_data(str(path), "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda z: setattr(z.getinfo("images.npy"), "file_size", 153),
            "",
        ),
        (lambda z: setattr(z.getinfo("images.npy"), "CRC", 1), "CRC-32"),
        (lambda z: setattr(z.getinfo("images.npy"), "compress_type", 14), ""),
        (lambda z: setattr(z.getinfo("images.npy"), "flag_bits", 1), "encrypted"),
        (lambda z: setattr(z.getinfo("images.npy"), "header_offset", 5), ""),
    ],
)
def test_an_npz_whose_directory_lies(
    change: Callable[[zipfile.ZipFile], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "set.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", npy("|u1", (2, 2, 2, 3)) + bytes(24))
        archive.writestr("labels.npy", TWO)
        change(archive)
    with raises(DataError, message):
        open_data(str(path), "train")


@pytest.mark.parametrize("shape", [(2, 0, 5, 3), (2, 5, 0)])
def test_an_npz_of_images_without_pixels(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=np.zeros(shape, np.uint8), labels=np.arange(2))
    with raises(DataError, "uint8"):
        open_data(str(tmp_path / "set.npz"), "train")


# Pickles.


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_plain_pickles_are_read_as_python_reads_them(protocol: int, order: str) -> None:
    array = np.asarray(np.arange(24, dtype=np.uint8).reshape(4, 6), order=order)  # type: ignore[call-overload]
    value = {"data": array, b"n": [0, -1, 300, 70_000, 2**40, 1.5, True, None], "t": ("é", b"\xff")}
    found = read_plain_pickle(pickle.dumps(value, protocol))
    np.testing.assert_array_equal(found.pop("data"), array)
    assert found == {key: item for key, item in value.items() if key != "data"}


def test_a_pickle_of_python_2() -> None:
    """Strings without a type, as CIFAR's own files have them."""
    content = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x06K\x09eU\x05titleq\x04U\x02a\xe9u."
    assert read_plain_pickle(content) == {b"labels": [6, 9], b"title": b"a\xe9"}
    assert read_plain_pickle(content) == pickle.loads(content, encoding="bytes")


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "numpy.load", "numpy.memmap"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_names_anything_else(name: str, protocol: int) -> None:
    module, _, function = name.rpartition(".")
    if protocol == 4:
        text = b"".join(b"\x8c%c%s" % (len(t), t.encode()) for t in (module, function))
        content = b"\x80\x04" + text + b"\x93."
    else:
        content = b"c" + f"{module}\n{function}\n.".encode()
    with raises(DataError, name):
        read_plain_pickle(content)


def test_a_checkpoint_cannot_name_a_kernel_to_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of one's own is a module, and importing it runs it: only the user names one."""
    config = TrainConfig.from_flat(
        data=str(folder), model="wrn-10-1", kernel="owned:kernel", size=16
    )
    state = {
        "config": config.to_flat(),
        "classes": ["blue", "green", "red"],
        "ema": None,
        "step": 1,
    }
    safe = config.replace(kernel="auto")
    state["model"] = build_configured_model(safe.model, 3, safe.view.size).state_dict()

    class Reached(Exception):
        pass

    def reached(_images: object, config: TrainConfig, *args: object, **options: object) -> None:
        raise Reached(config.loss.kernel)

    monkeypatch.setattr(evaluate, "load_checkpoint", lambda _path: state)
    monkeypatch.setattr(evaluation, "Evaluation", reached)
    with pytest.raises(Reached, match=r"^auto$"):
        evaluate.main(["x.pt"])


# Names that speak to the terminal.


def obeyed(text: str) -> set[str]:
    """Characters that a terminal does not simply show, by their categories in Unicode."""
    import unicodedata

    return {
        c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }


def test_printable() -> None:
    assert printable("photos/Zoë 猫.jpg (50%)") == "photos/Zoë 猫.jpg (50%)"
    assert printable(HOSTILE) == r"\x1b]0;owned\x07\x9b2J\u202egpj.\nerror: x"
    every = printable("".join(map(chr, range(2**16))))
    assert obeyed(every) == set()
    assert "\n" not in every


def test_an_error_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture) -> None:
    def fails(_args: object) -> int:
        raise DataError(f"{HOSTILE}: cannot be decoded")

    line = f"error: {printable(HOSTILE)}: cannot be decoded"
    assert cli.run(fails, []) == 2
    assert capsys.readouterr().err == f"{line}\n"
    assert cli.run(fails, ["--debug"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1] == line
    assert obeyed(said) == set()


def test_lines_and_tables_are_shown_and_not_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    console.RunConsole(1, 0).line(f"{HOSTILE} is saved")
    console.show_table(HOSTILE, [(HOSTILE, HOSTILE)])
    out = io.StringIO()
    console.show_table("t", [("n", HOSTILE)], Console(file=out, width=200, color_system=None))
    said = capsys.readouterr().out + out.getvalue()
    assert obeyed(said) == set()
    assert said.count("owned") >= 4
    assert not any(line.startswith("error: ") for line in said.splitlines())


def test_names_of_files_in_a_shell(tmp_path: Path) -> None:
    """The commands themselves: tables, lists, warnings by logging and errors."""
    root = write_folder(tmp_path / HOSTILE.replace("/", ""), {"train": 3})
    (root / f"train/red/{HOSTILE}.jpg").write_bytes(b"")
    env = os.environ | {"FASTAUG_CACHE": str(tmp_path / "cache"), "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "fastaug.scan", str(root), "--max-bad", "0"]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 2, done.stderr
    assert obeyed(done.stdout + done.stderr) == set()
    assert r"\x1b]0;owned" in done.stdout
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert "1 of 10 images are bad" in error
    (listed,) = (tmp_path / "cache/manifests").glob("*.txt")
    (line,) = listed.read_text().splitlines()
    assert line.endswith(".jpg: it is empty")
    assert obeyed(line) == set()


def test_a_class_whose_name_is_no_text_has_a_fingerprint(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", {"train": 2})
    before = open_data(str(root), "train").fingerprint
    os.rename(root / "train/red", os.fsencode(root / "train") + b"/\xff")
    assert open_data(str(root), "train").fingerprint != before


# The documents.


@pytest.mark.parametrize(
    ("page", "heading"), [("security", "## Threats"), ("guide/reliability", "## What happens when")]
)
def test_every_promise_names_tests_that_exist(page: str, heading: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    section = re.split(r"^## ", text.partition(heading)[2], flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not re.match(r"\| (event|threat) |\|---", row)]
    assert len(rows) >= 30
    for row in rows:
        named = re.findall(r"`(test_\w+)\.py::((?:\w+::)?\w+)`", row)
        assert named, row
        for file, path in named:
            (test_file,) = ROOT.glob(f"tests/*/{file}.py")
            source = test_file.read_text()
            *kind, test = path.split("::")
            assert all(f"class {name}:" in source for name in kind), path
            assert re.search(rf"^ *def {test}\(", source, re.MULTILINE), f"{file}: {path}"


def test_every_bomb_is_in_the_table() -> None:
    text = (ROOT / "docs/security.md").read_text()
    assert [name for name in CASES if f"“{name}”" not in text] == []
