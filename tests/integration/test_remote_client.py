"""Range reads from a real S3 server on loopback, with injected faults."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
from object_store import BUCKET, KEY_ID, SECRET, Faults, ObjectStore, object_store

from fastaug.data.remote import client as client_module
from fastaug.data.remote.client import Client
from fastaug.errors import ConfigError
from fastaug.urls import parse_url

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as running:
        running.put("set/train/00000.tar", CONTENT)
        yield running


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server without faults, and its credentials in the environment."""
    vars(server.faults).update(vars(Faults()))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client_module, "_FIRST_PAUSE", 0.002)
    return server


@pytest.fixture
def client(store: ObjectStore) -> Client:
    return Client(parse_url(f"s3://{BUCKET}/set"))


def storage_error(client: Client, name: str, offset: int, size: int) -> OSError:
    with pytest.raises(OSError) as caught:  # noqa: PT011 (its errno is what counts)
        client.read(name, offset, size)
    return caught.value


def test_ranges_are_the_bytes_of_the_object(client: Client) -> None:
    for offset, size in ((0, 1), (0, 300_000), (299_999, 1), (12_345, 100_000)):
        assert client.read("train/00000.tar", offset, size) == CONTENT[offset : offset + size]
    assert client.size("train/00000.tar") == 300_000
    assert client.read_object("train/00000.tar", 300_000) == CONTENT


def test_object_that_is_too_large(client: Client) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 (its errno is what counts)
        client.read_object("train/00000.tar", 299_999)
    assert caught.value.errno == errno.EFBIG


def test_large_objects_are_read_in_parts(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PART", 70_001)
    assert client.read_object("train/00000.tar", 300_000) == CONTENT


def test_many_requests_are_in_flight(store: ObjectStore, client: Client) -> None:
    store.faults.latency = 0.2
    client.read("train/00000.tar", 0, 1)  # connects
    begin = os.times().elapsed
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda i: client.read("train/00000.tar", i, 10), range(32)))
    assert found == [CONTENT[i : i + 10] for i in range(32)]
    assert os.times().elapsed - begin < 32 * 0.2 / 4  # one after the other: 6.4 s


@pytest.mark.parametrize("kind", ["unavailable", "throttled", "dropped", "cut"])
def test_retries_after_a_fault(store: ObjectStore, client: Client, kind: str) -> None:
    setattr(store.faults, kind, 2)
    for i in range(6):
        offset = 1000 * i
        assert client.read("train/00000.tar", offset, 5000) == CONTENT[offset : offset + 5000]
    assert store.faults.injected[kind] >= 5


def test_outage_is_an_error_of_the_storage(store: ObjectStore, client: Client) -> None:
    store.faults.down = True
    error = storage_error(client, "train/00000.tar", 0, 10)
    assert error.errno == errno.EIO
    assert error.filename == f"s3://{BUCKET}/set/train/00000.tar"
    assert len(store.faults.requests) == 1 + client_module.RETRIES
    # The next image of the batch is not waited for ...
    storage_error(client, "train/00000.tar", 0, 10)
    assert len(store.faults.requests) == 2 + client_module.RETRIES
    # ... and once the storage works again, retries do too.
    store.faults.down = False
    client.read("train/00000.tar", 0, 10)
    store.faults.unavailable = 2
    for _ in range(3):
        client.read("train/00000.tar", 0, 10)


def test_server_that_does_not_answer(
    store: ObjectStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_READ_TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setattr(client_module, "RETRIES", 1)
    store.faults.latency = 2.0
    begin = time.monotonic()
    assert storage_error(client, "train/00000.tar", 0, 10).errno == errno.EIO
    assert time.monotonic() - begin < 2


def test_missing_object_is_not_retried(store: ObjectStore, client: Client) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        client.read("train/00001.tar", 0, 10)
    assert caught.value.filename == f"s3://{BUCKET}/set/train/00001.tar"
    assert len(store.faults.requests) == 1


@pytest.mark.parametrize("offset", [299_995, 300_000])  # crosses the end, begins behind it
def test_cut_object_is_an_error(store: ObjectStore, client: Client, offset: int) -> None:
    error = storage_error(client, "train/00000.tar", offset, 10)
    assert error.errno == errno.EIO


def test_http_without_credentials(store: ObjectStore) -> None:
    client = Client(parse_url(f"{store.http_url}/set"))
    assert client.read("train/00000.tar", 5, 10) == CONTENT[5:15]
    assert client.read_object("train/00000.tar", 300_000) == CONTENT


def test_errors_and_pickles_hold_no_credentials(store: ObjectStore, client: Client) -> None:
    client.read("train/00000.tar", 0, 10)
    assert SECRET.encode() not in pickle.dumps(client)
    assert KEY_ID.encode() not in pickle.dumps(client)
    store.faults.down = True
    error = storage_error(client, "train/00000.tar", 0, 10)
    chain: BaseException | None = error
    while chain is not None:
        text = repr(chain) + str(chain)
        assert SECRET not in text
        assert KEY_ID not in text
        assert "injected" not in text
        chain = None if chain.__suppress_context__ else chain.__context__


def test_pickled_client_reads(client: Client) -> None:
    client.read("train/00000.tar", 0, 10)
    assert pickle.loads(pickle.dumps(client)).read("train/00000.tar", 0, 10) == CONTENT[:10]


def test_google_store_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no server for it here; only that the URL becomes a store of its bucket."""
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    store = client_module._open_store(parse_url("gs://bucket/a/b"))
    assert "bucket" in repr(store)
    assert "a/b" in repr(store)


def _read_in_fork(client: Client, results: multiprocessing.Queue) -> None:
    try:
        results.put(client.read("train/00000.tar", 0, 10))
    except RuntimeError as error:
        results.put(str(error))


def test_read_in_a_fork_is_an_error_and_does_not_hang(client: Client) -> None:
    client.read("train/00000.tar", 0, 10)
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    process = fork.Process(target=_read_in_fork, args=(client, results))
    process.start()
    try:
        assert "forkserver" in results.get(timeout=20)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    "url", ["https://user:hunter2@host/set", "s3://key:hunter2@bucket/set", "gs://hunter2@b/p"]
)
def test_credentials_in_a_url_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "--data" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "query", ["?X-Amz-Signature=hunter2", "?sv=1&sig=hunter2", "#hunter2", "?hunter2@x"]
)
def test_signed_urls_are_refused(query: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(f"https://host/set{query}")
    assert "--data" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/a/b/", ("s3", "bucket", "a/b")),
        ("gs://bucket", ("gs", "bucket", "")),
        ("https://host:8443/a", ("https", "host:8443", "a")),
        ("http://[::1]:80/a b", ("http", "[::1]:80", "a b")),
    ],
)
def test_parts_of_a_url(url: str, parts: tuple[str, str, str]) -> None:
    parsed = parse_url(url)
    assert parsed == parts
    assert str(parsed) == url.rstrip("/")


@pytest.mark.parametrize("url", ["az://container/set", "s3:///set", "https://", "ftp://host/set"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "--data" in str(caught.value)
