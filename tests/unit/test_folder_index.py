"""The cached index of class folders, and the scan that relies on it."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from image_sets import JPEG, PNG, files_of, open_data, touch

from fastaug.data import scan
from fastaug.data.image_set import ImageSet
from fastaug.data.readers import folder_index
from fastaug.data.retry import BadImage, BadImagesError, quarantine
from fastaug.data.scan import mark_bad, scan_set, stamp_of
from fastaug.data.split import split_training
from fastaug.data.storage import Files, Spans

FILES = ("a/1.jpg", "a/z.jpg", "a/deep/er/2.jpg", "a/deep/3.png", "b/1.jpg", "b/2.JPG", "c/x.jpg")
LONG_AGO = time.time_ns() - 3600 * 10**9


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "train"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(PNG if name.endswith("png") else JPEG)
    (root / "a" / "notes.txt").touch()
    (root / "a" / ".hidden").mkdir()
    (root / "a" / ".hidden" / "4.jpg").write_bytes(JPEG)
    (root / ".git").mkdir()
    settle(root)
    return root


def settle(root: Path) -> None:
    """Give all folders that have just changed a modification time of their own, an hour ago."""
    for folder, _, _ in os.walk(root, followlinks=True):
        if os.stat(folder).st_mtime_ns > LONG_AGO + 10**12:
            settle.age += 1
            os.utime(folder, ns=(LONG_AGO + settle.age, LONG_AGO + settle.age))


settle.age = 0  # type: ignore[attr-defined]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders that are listed, below the root."""
    seen: list[str] = []
    real = folder_index._images_below

    def noted(root: Path, below: str, folders: list) -> Iterator[str]:
        seen.append(below)
        return real(root, below, folders)

    monkeypatch.setattr(folder_index, "_images_below", noted)
    return seen


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are scanned."""
    seen: list[str] = []
    real = scan.scan_image

    def noted(images: ImageSet, index: int, **options: object) -> object:
        seen.append(images.where(index).partition("train/")[2])
        return real(images, index, **options)

    monkeypatch.setattr(scan, "scan_image", noted)
    return seen


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose size and modification time are read."""
    seen: list[str] = []
    real = Files.stamps

    def noted(files: Files, indices: np.ndarray) -> np.ndarray:
        seen.extend(files.name(index) for index in indices.tolist())
        return real(files, indices)

    monkeypatch.setattr(Files, "stamps", noted)
    return seen


def names(images: ImageSet) -> list[str]:
    return [images.storage.name(index) for index in range(len(images))]


def expected(root: Path) -> list[str]:
    """Found in another way: by pathlib, class by class."""
    found: list[str] = []
    for label in sorted(root.glob("[!.]*/")):
        below = (file.relative_to(root) for file in label.rglob("*"))
        found += sorted(
            str(file)
            for file in below
            if file.suffix.lower() in (".jpg", ".png") and not any(p[0] == "." for p in file.parts)
        )
    return found


def open_train(root: Path) -> ImageSet:
    images = open_data(root.parent, "train")
    assert names(images) == expected(root)
    classes = [images.classes[label] for label in images.labels]
    assert classes == [name.split("/")[0] for name in names(images)]
    assert images.labels.dtype == np.int64
    return images


class TestIndex:
    def test_an_unchanged_set_is_not_listed_again(self, root: Path, listed: list[str]) -> None:
        first = open_train(root)
        assert sorted(listed) == ["a", "a/deep", "a/deep/er", "b", "c"]
        listed.clear()
        second = open_train(root)
        assert listed == []
        assert first.fingerprint == second.fingerprint
        assert first.storage.snapshot == second.storage.snapshot != ""

    @pytest.mark.parametrize(
        ("change", "again"),
        [
            (lambda root: (root / "b/3.jpg").write_bytes(JPEG), "b"),
            (lambda root: (root / "b/1.jpg").unlink(), "b"),
            (lambda root: (root / "a/deep/er/0.png").write_bytes(PNG), "a"),
            (lambda root: (root / "a/z.jpg").rename(root / "c/z.jpg"), "a c"),
            (lambda root: shutil.rmtree(root / "b"), ""),
            (lambda root: shutil.copytree(root / "b", root / "bb"), "bb"),
            (lambda root: shutil.rmtree(root / "a/deep"), "a"),
            (lambda root: (root / "a").rename(root / "d"), "d"),
        ],
    )
    def test_a_changed_folder_is_listed_again(
        self, change: object, again: str, root: Path, listed: list[str]
    ) -> None:
        before = open_train(root).storage.snapshot
        change(root)
        settle(root)
        listed.clear()
        after = open_train(root).storage.snapshot
        assert {name[0] if len(name) > 2 else name for name in listed} == set(again.split())
        assert after != before
        listed.clear()
        assert open_train(root).storage.snapshot == after
        assert listed == []

    def test_a_folder_that_has_just_changed_is_listed_again(
        self, root: Path, listed: list[str]
    ) -> None:
        """Another change may come with the same modification time."""
        now = time.time_ns()
        os.utime(root / "b", ns=(now, now))
        assert open_train(root).storage.snapshot == ""
        (root / "b/3.jpg").write_bytes(JPEG)
        os.utime(root / "b", ns=(now, now))
        listed.clear()
        assert open_train(root).storage.snapshot == ""
        assert listed == ["b"]
        os.utime(root / "b", ns=(LONG_AGO, LONG_AGO))
        assert open_train(root).storage.snapshot != ""

    def test_links(self, root: Path, tmp_path: Path, listed: list[str]) -> None:
        for version in ("v1", "v2"):
            (tmp_path / version).mkdir()
            (tmp_path / version / f"{version}.jpg").write_bytes(JPEG)
            os.utime(tmp_path / version, ns=(LONG_AGO, LONG_AGO))
        (root / "d").symlink_to(tmp_path / "v1")
        (root / "b/link.jpg").symlink_to(root / "a/1.jpg")
        (root / "b/folder").symlink_to(root / "c")  # within a class, links are not followed
        settle(root)
        first = open_data(root.parent, "train")
        assert names(first)[-2:] == ["c/x.jpg", "d/v1.jpg"]
        assert [name for name in names(first) if "link" in name or "folder" in name] == [
            "b/link.jpg"
        ]
        (root / "d").unlink()
        (root / "d").symlink_to(tmp_path / "v2")  # with the same modification time
        second = open_data(root.parent, "train")
        assert names(second)[-1] == "d/v2.jpg"
        assert second.storage.snapshot != first.storage.snapshot

    @pytest.mark.parametrize("damage", ["empty", "cut", "flip", "header", "foreign", "longer"])
    def test_a_damaged_index_is_made_again(
        self, damage: str, root: Path, cache: Path, listed: list[str]
    ) -> None:
        open_train(root)
        (file,) = (cache / "indexes").glob("*.files")
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[-200] ^= 1
        elif damage == "header":
            content[30] ^= 1
        elif damage == "foreign":
            other = root.parent.parent / "other" / "train"
            shutil.copytree(root, other)
            (other / "b/1.jpg").rename(other / "b/0.jpg")
            open_train(other)
            (content,) = {f.read_bytes() for f in file.parent.glob("*.files")} - {bytes(content)}
        else:
            changed = {"empty": b"", "cut": content[:-64], "longer": content + bytes(64)}
            content = changed[damage]
        file.write_bytes(content)
        listed.clear()
        open_train(root)
        assert len(listed) == 5
        listed.clear()
        open_train(root)
        assert listed == []

    def test_a_cache_that_cannot_be_written(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path / "file"))
        first = open_train(root)
        assert scan_set(first).manifest.bad == {}
        (root / "b/3.jpg").write_bytes(JPEG)
        assert len(open_train(root)) == len(first) + 1

    def test_an_old_index_in_a_cache_that_cannot_be_written(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = time.time_ns()
        os.utime(root / "b", ns=(now, now))
        first = open_train(root)
        (root / "b/3.jpg").write_bytes(JPEG)
        monkeypatch.setattr(folder_index, "store_mapped", lambda *_, **__: False)
        assert len(open_train(root)) == len(first) + 1

    def test_names_that_are_not_text(self, root: Path) -> None:
        names_ = (b"b/\xff\xfe.jpg", "b/ü ü.jpg".encode(), b"b/new\nline.jpg")
        for name in names_:
            with open(os.path.join(os.fsencode(root), name), "wb") as file:
                file.write(JPEG)
        settle(root)
        for _ in range(2):
            images = open_train(root)
            assert {os.fsencode(name) for name in names(images)} >= set(names_)
            assert [images.encoded(i)[:4] for i in range(len(images))].count(JPEG[:4]) == 9

    def test_the_index_is_shared_memory(self, root: Path) -> None:
        open_train(root)
        images = open_train(root)
        assert not images.labels.flags.writeable
        assert not images.labels.flags.owndata


class TestFingerprint:
    @pytest.mark.parametrize("block", [1, 2, 3, 1000])
    def test_it_is_that_of_the_last_two_parts(
        self, block: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fastaug.data.storage._FINGERPRINT_BLOCK", block)
        for paths in (
            ["a/1.jpg", "b/2.jpg"],
            ["x.jpg"],
            ["x.jpg", "some/where/else/a/1.jpg", "a/b", "/abs/olute/y.png", "q/ü.jpg", "a/b/c"],
        ):
            digest, by_hand = hashlib.sha256(), hashlib.sha256()
            Files.of(paths).update_fingerprint(digest)
            for path in paths:
                by_hand.update(("/".join(Path(path).parts[-2:]) + "\n").encode())
            assert digest.hexdigest() == by_hand.hexdigest()


class TestScan:
    def test_files_of_an_unchanged_set_are_not_looked_at(
        self, root: Path, scanned: list[str], looked_at: list[str]
    ) -> None:
        first = scan_set(open_train(root))
        assert sorted(scanned) == sorted(looked_at) == sorted(expected(root))
        scanned.clear()
        looked_at.clear()
        second = scan_set(open_train(root))
        assert scanned == looked_at == []
        np.testing.assert_array_equal(second.manifest.sizes, first.manifest.sizes)
        np.testing.assert_array_equal(second.manifest.plain, first.manifest.plain)
        assert first.manifest.sizes.dtype == second.manifest.sizes.dtype == np.int32
        assert second.formats == first.formats == {"JPEG": 6, "PNG": 1}
        assert not second.manifest.sizes.flags.owndata

    def test_only_new_files_of_a_changed_set_are_scanned(
        self, root: Path, scanned: list[str], looked_at: list[str]
    ) -> None:
        (root / "a/z.jpg").write_bytes(b"")
        scan_set(open_train(root))
        (root / "a/0.jpg").write_bytes(JPEG)
        (root / "b/1.jpg").unlink()
        settle(root)
        scanned.clear()
        looked_at.clear()
        images = open_train(root)
        found = scan_set(images)
        assert scanned == ["a/0.jpg"]
        assert sorted(looked_at) == sorted(expected(root))
        assert {images.storage.name(i): reason for i, reason in found.manifest.bad.items()} == {
            "a/z.jpg": "it is empty"
        }
        scanned.clear()
        looked_at.clear()
        scan_set(open_train(root))
        assert (scanned, looked_at) == ([], ["a/z.jpg"])

    def test_a_file_that_was_replaced(self, root: Path, scanned: list[str]) -> None:
        scan_set(open_train(root))
        (root / "new").write_bytes(JPEG[:900])
        (root / "new").rename(root / "b/1.jpg")
        settle(root)
        scanned.clear()
        images = open_train(root)
        assert list(scan_set(images).manifest.bad) == [names(images).index("b/1.jpg")]
        assert scanned == ["b/1.jpg"]

    @pytest.mark.parametrize("in_place", [True, False])
    def test_a_bad_file_that_was_repaired(
        self, in_place: bool, root: Path, scanned: list[str]
    ) -> None:
        (root / "b/1.jpg").write_bytes(b"")
        (root / "c/x.jpg").write_bytes(JPEG[:900])
        images = open_train(root)
        assert len(scan_set(images).manifest.bad) == 2
        if not in_place:
            (root / "b/1.jpg").unlink()
        (root / "b/1.jpg").write_bytes(JPEG)
        settle(root)
        scanned.clear()
        images = open_train(root)
        assert list(scan_set(images).manifest.bad) == [names(images).index("c/x.jpg")]
        assert scanned == ["b/1.jpg"]

    def test_a_good_file_that_was_rewritten_in_place(self, root: Path, scanned: list[str]) -> None:
        """A start does not notice it; reading it and the command scan do."""
        images = open_train(root)
        scan_set(images)
        place = names(images).index("b/1.jpg")
        (root / "b/1.jpg").write_bytes(JPEG[:900])
        scanned.clear()
        assert scan_set(open_train(root)).manifest.bad == {}
        assert scanned == []
        assert list(scan_set(open_train(root), look_at_all=True).manifest.bad) == [place]
        assert scanned == ["b/1.jpg"]
        assert list(scan_set(open_train(root)).manifest.bad) == [place]

    def test_an_image_that_was_found_changed_is_scanned_again(
        self, root: Path, scanned: list[str]
    ) -> None:
        images = open_train(root)
        scan_set(images)
        place = names(images).index("b/1.jpg")
        (root / "b/1.jpg").write_bytes(JPEG[:900])
        changed = BadImage("the file has changed", permanent=False, stamp=stamp_of(images, place))
        quarantine(images, BadImagesError({place: changed}, batch_size=2), max_bad=1.0)
        scanned.clear()
        assert list(scan_set(open_train(root)).manifest.bad) == [place]
        assert scanned == ["b/1.jpg"]

    def test_an_image_that_was_found_bad_stays_bad(self, root: Path, scanned: list[str]) -> None:
        images = open_train(root)
        scan_set(images)
        place = names(images).index("b/1.jpg")
        touch(root / "b/1.jpg")  # rewritten since the scan
        mark_bad(images, place, "no decoder takes it")
        scanned.clear()
        assert scan_set(open_train(root)).manifest.bad == {place: "no decoder takes it"}
        assert scanned == []
        touch(root / "b/1.jpg")
        assert scan_set(open_train(root)).manifest.bad == {}
        assert scanned == ["b/1.jpg"]

    def test_subsets_share_what_is_known(
        self, root: Path, scanned: list[str], looked_at: list[str]
    ) -> None:
        (root / "c/y.jpg").write_bytes(b"")
        settle(root)

        def scan_both() -> list[tuple[list[str], dict[str, str], list]]:
            train, out = split_training(open_train(root), validation=0.3, train_images=0)
            assert out is not None
            found = [(part, scan_set(part).manifest) for part in (train, out)]
            return [
                (
                    [Path(file).name for file in files_of(part)],
                    {part.where(index): reason for index, reason in manifest.bad.items()},
                    manifest.sizes.tolist(),
                )
                for part, manifest in found
            ]

        first = scan_both()
        assert sorted(scanned) == sorted(expected(root))  # each once
        assert [(root / "c/y.jpg").as_posix() in bad for _, bad, _ in first].count(True) == 1
        sizes = [size for _, _, part in first for size in part]
        assert sizes.count([0, 0]) == 1
        scanned.clear()
        looked_at.clear()
        assert scan_both() == first
        assert (scanned, looked_at) == ([], ["c/y.jpg"])
        scan_set(open_train(root))
        assert scanned == []
        # A change of the set: what is known of both is kept.
        (root / "b/0.jpg").write_bytes(JPEG)
        settle(root)
        scan_both()
        assert scanned == ["b/0.jpg"]

    def test_a_set_that_has_just_been_written(self, root: Path, looked_at: list[str]) -> None:
        """Its folders may change again with the same modification time: files are looked at."""
        now = time.time_ns()
        os.utime(root / "b", ns=(now, now))
        scan_set(open_train(root))
        for _ in range(2):
            looked_at.clear()
            scan_set(open_train(root))
            assert sorted(looked_at) == sorted(expected(root))
            settle(root)
        looked_at.clear()
        scan_set(open_train(root))
        assert looked_at == []

    def test_shards(
        self, tmp_path: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shards = (tmp_path / "0.tar", tmp_path / "1.tar")
        for shard in shards:
            shard.write_bytes(JPEG * 2)
            os.utime(shard, ns=(LONG_AGO, LONG_AGO))
        size = np.full(4, len(JPEG))
        shard, offset = np.array([0, 0, 1, 1], np.int32), np.array([0, 1, 0, 1]) * len(JPEG)
        images = ImageSet(
            "shards", ("a",), np.zeros(4, np.int64), storage=Spans(shards, shard, offset, size)
        )
        first = scan_set(images).manifest
        assert len(scanned) == 4
        with monkeypatch.context() as patched:
            patched.setattr(Spans, "stamps", lambda *_: pytest.fail("looked at"))
            np.testing.assert_array_equal(scan_set(images).manifest.sizes, first.sizes)
        os.utime(shards[1], ns=(LONG_AGO + 1, LONG_AGO + 1))
        scan_set(images)
        assert len(scanned) == 6
