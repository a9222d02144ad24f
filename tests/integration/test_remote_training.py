"""Training from an S3 server on loopback, against training from the same shards in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from color_folders import CLASSES, write_folder
from object_store import BUCKET, KEY_ID, SECRET, Faults, ObjectStore, object_store
from packed_sets import pack_folders
from ranks import run_ranks
from training import assert_same_weights, metrics, run, tiny_config

from fastaug import evaluate, pack, preview, scan
from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, is_storage_error
from fastaug.data.remote import client as client_module
from fastaug.data.scan import scan_set
from fastaug.data.sources import DataSource
from fastaug.engine.loaders import build_loader
from fastaug.engine.trainer import Trainer
from fastaug.errors import DataError
from fastaug.runtime.distributed import Group


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("folders"), {"train": 12, "val": 4})


@pytest.fixture(scope="module")
def packed(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_folders(folders, tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def other_packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with as many images, which are larger."""
    folders = write_folder(tmp_path_factory.mktemp("others"), {"train": 12, "val": 4}, size=24)
    return pack_folders(folders, tmp_path_factory.mktemp("other_packed"))


@pytest.fixture(scope="module")
def server(packed: Path) -> Iterator[ObjectStore]:
    with object_store() as running:
        running.upload(packed, "set")
        yield running


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> ObjectStore:
    """The server without faults, its credentials in the environment, and an empty cache."""
    vars(server.faults).update(vars(Faults()))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client_module, "_FIRST_PAUSE", 0.002)
    return server


URL = f"s3://{BUCKET}/set"


def shards_read(store: ObjectStore) -> int:
    return sum(path.endswith(".tar") for path, _ in store.faults.requests)


def open_train(data: str, **settings: object) -> ImageSet:
    return DataSource(DataConfig(data=data, **settings)).train


def test_same_images_as_in_the_folder(store: ObjectStore, packed: Path) -> None:
    remote, local = open_train(URL), open_train(str(packed))
    assert remote.classes == local.classes
    assert np.array_equal(remote.labels, local.labels)
    assert remote.fingerprint == local.fingerprint
    for index in range(len(local)):
        assert bytes(remote.encoded(index)) == bytes(local.encoded(index))


def test_reads_what_the_pack_command_writes(
    store: ObjectStore, folders: Path, tmp_path: Path
) -> None:
    assert pack.main([str(folders), str(tmp_path / "out")]) == 0
    url = store.upload(tmp_path / "out", "commands")
    remote, local = open_train(url), open_train(str(tmp_path / "out"))
    assert remote.classes == local.classes == CLASSES
    assert remote.fingerprint == local.fingerprint
    files = sorted((folders / "train").rglob("*.jpg"))
    assert {remote.encoded(i) for i in range(36)} == {file.read_bytes() for file in files}
    assert DataSource(DataConfig(data=url)).has_test


def test_web_server_without_listing(store: ObjectStore, packed: Path) -> None:
    remote, local = open_train(f"{store.http_url}/set"), open_train(str(packed))
    assert bytes(remote.encoded(5)) == bytes(local.encoded(5))


def test_quick_scan_reads_no_image(store: ObjectStore, packed: Path) -> None:
    remote, local = open_train(URL), open_train(str(packed))
    found, expected = scan_set(remote).manifest, scan_set(local).manifest
    assert shards_read(store) == 0
    assert np.array_equal(found.sizes, expected.sizes)
    assert np.array_equal(found.plain, expected.plain)
    assert scan_set(remote, full=True).manifest.bad == {}
    assert shards_read(store) == len(remote)


def test_cached_images_are_not_read_again(store: ObjectStore) -> None:
    images, opened_again = open_train(URL), open_train(URL)
    first = [images.encoded(index) for index in range(10)]
    assert shards_read(store) == 10
    assert [opened_again.encoded(index) for index in range(10)] == first
    assert shards_read(store) == 10
    uncached = open_train(URL, cache_size=0)
    assert uncached.encoded(0) == first[0]
    assert shards_read(store) == 11


def test_damaged_cache_is_fetched_again(store: ObjectStore, own_cache: Path) -> None:
    images = open_train(URL)
    content = bytes(images.encoded(3))
    for file in (own_cache / "remote").glob("*.ranges"):
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    assert bytes(images.encoded(3)) == content
    assert shards_read(store) == 2


def test_changed_shard_gets_other_cache_entries(
    store: ObjectStore, packed: Path, other_packed: Path, own_cache: Path
) -> None:
    url = store.upload(packed, "changing")
    before = bytes(open_train(url).encoded(0))
    store.upload(other_packed, "changing")
    after = bytes(open_train(url).encoded(0))
    assert before == bytes(open_train(str(packed)).encoded(0))
    assert after == bytes(open_train(str(other_packed)).encoded(0))
    assert len(list((own_cache / "remote").glob("*.ranges"))) == 2


# --- errors ---


def test_missing_index_names_the_pack_command(store: ObjectStore) -> None:
    with pytest.raises(DataError) as caught:
        open_train(f"s3://{BUCKET}/nothing")
    assert f"--data s3://{BUCKET}/nothing" in str(caught.value)
    assert "python -m fastaug.pack" in str(caught.value)


def test_index_of_other_shards(store: ObjectStore, packed: Path, other_packed: Path) -> None:
    store.upload(packed, "mixed")
    store.put("mixed/train.index", (other_packed / "train.index").read_bytes())
    with pytest.raises(DataError) as caught:
        open_train(f"s3://{BUCKET}/mixed").encoded(0)
    assert is_storage_error(caught.value)
    assert f"s3://{BUCKET}/mixed/train/00000.tar" in str(caught.value)


def test_damaged_index(store: ObjectStore, packed: Path) -> None:
    content = bytearray((packed / "train.index").read_bytes())
    content[len(content) // 2] ^= 1
    store.put("damaged/train.index", bytes(content))
    with pytest.raises(DataError) as caught:
        open_train(f"s3://{BUCKET}/damaged")
    assert f"s3://{BUCKET}/damaged/train.index" in str(caught.value)


def test_images_of_a_cut_shard_are_left_out(
    store: ObjectStore, packed: Path, tmp_path: Path
) -> None:
    store.upload(packed, "cut")
    with tarfile.open(packed / "train/00002.tar") as archive:  # images 14 to 20
        last = archive.getmember("00006.jpg").offset_data
    store.put("cut/train/00002.tar", (packed / "train/00002.tar").read_bytes()[: last + 5])
    url = f"s3://{BUCKET}/cut"
    config = tiny_config(Path(), tmp_path / "run", data=url, max_bad=0.1, last_batch="fill")
    loader = build_loader(config)
    seen = {index for batch in loader for index in batch.indices.tolist()}
    assert set(loader.images.bad) == {20}
    assert seen == set(range(36)) - {20}


def test_outage_ends_the_run(store: ObjectStore, tmp_path: Path) -> None:
    config = tiny_config(Path(), tmp_path / "run", data=URL, epochs=1)
    loader = build_loader(config)
    store.faults.down = True
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    assert URL in str(caught.value)
    assert "--resume" in str(caught.value)


# --- training ---


def train_all(group: Group, environment: dict[str, str], configs: list[TrainConfig]) -> None:
    """Several runs on one of their ranks, with the server's credentials in its environment."""
    os.environ.update(environment)
    client_module._FIRST_PAUSE = 0.002
    for config in configs:
        Trainer(config, group=group).fit()


def test_two_ranks_end_as_from_the_folder(
    store: ObjectStore, packed: Path, tmp_path: Path, own_cache: Path
) -> None:
    """With latency, 503s, 429s, dropped connections and answers that break off."""
    faults = {"latency": 0.01, "unavailable": 5, "throttled": 7, "dropped": 11, "cut": 13}
    vars(store.faults).update(faults)
    configs = [
        # Each loader reads all images from the server.
        tiny_config(
            Path(), tmp_path / f"{loader} {name}", data=data, loader=loader, tta=0, cache_size=0
        ).replace(epochs=1)
        for loader in ("torch", "dali")
        for name, data in (("remote", URL), ("local", str(packed)))
    ]
    environment = store.environment | {"FASTAUG_CACHE": str(own_cache)}
    run_ranks(2, train_all, environment, configs)
    for loader in ("torch", "dali"):
        remote, local = tmp_path / f"{loader} remote", tmp_path / f"{loader} local"
        assert_same_weights(remote, local)
        assert metrics(remote, "train") == metrics(local, "train")
    for kind in ("unavailable", "throttled", "dropped", "cut"):
        assert store.faults.injected[kind] > 0, kind


def test_resumed_run_ends_as_from_the_folder(
    store: ObjectStore, packed: Path, tmp_path: Path
) -> None:
    """From the bucket up to step 3, from the folder to step 5, then from the bucket again."""
    remote = tiny_config(Path(), tmp_path / "run", data=URL, tta=0)
    run(remote.replace(max_steps=3))
    moved = remote.replace(data=str(packed), max_steps=5)
    Trainer(moved, tmp_path / "run/last.pt").fit()
    Trainer(remote, tmp_path / "run/last.pt").fit()
    run(tiny_config(packed, tmp_path / "local", tta=0))
    assert_same_weights(tmp_path / "run", tmp_path / "local")


def test_commands_with_workers_and_without_secrets(
    store: ObjectStore, tmp_path: Path, own_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every command reads from the bucket; nothing that is written holds a credential."""
    out = tmp_path / "run"
    flags = "--model wrn-10-1 --size 16 --views 2 --batch-size 16 --max-steps 3 --workers 2"
    command = [sys.executable, "-m", "fastaug.train", "--data", URL, "--out", str(out)]
    store.faults.unavailable = 9
    subprocess.run([*command, *flags.split(), "--tta", "0"], check=True, timeout=120)
    assert evaluate.main([str(out), "--tta", "0", "--workers", "0"]) == 0
    assert preview.main(["--data", URL, "--workers", "0", "--out", str(tmp_path / "a.png")]) == 0
    assert scan.main([URL, "--out", str(tmp_path / "scan.json")]) == 0
    assert json.loads((out / "config.json").read_text())["data"] == URL
    printed = capfd.readouterr()
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    written += [printed.out.encode(), printed.err.encode()]
    assert len(written) > 12
    for secret in (KEY_ID, SECRET, store.environment["AWS_ENDPOINT_URL"]):
        assert not any(secret.encode() in content for content in written), secret
