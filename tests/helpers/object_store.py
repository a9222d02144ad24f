"""An S3 server on loopback (moto's), and a proxy in front of it that injects faults."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

moto_server = pytest.importorskip("moto.server", reason="moto is not installed (the dev extra)")
boto3 = pytest.importorskip("boto3")

KEY_ID, SECRET = "AKIAFASTAUGTESTKEYID", "fastaug/test+secret+0123456789abcdefghij"
BUCKET = "photos"


@dataclass
class Faults:
    """What the proxy does to GET requests. Each number n: to every n-th one; 0: to none."""

    latency: float = 0.0
    """Seconds before an answer."""
    unavailable: int = 0
    """Answer 503."""
    throttled: int = 0
    """Answer 429."""
    dropped: int = 0
    """Close the connection without an answer."""
    cut: int = 0
    """Close the connection in the middle of the body."""
    down: bool = False
    """Answer 503 to everything."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(path, range) of each GET request."""
    injected: dict[str, int] = field(default_factory=dict)
    """How often each fault occurred."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self, path: str, byte_range: str) -> str:
        with self.lock:
            self.requests.append((path, byte_range))
            count = len(self.requests)
            kinds = ("unavailable", "throttled", "dropped", "cut")
            found = [kind for kind in kinds if (n := getattr(self, kind)) and count % n == 0]
            fault = "unavailable" if self.down else found[0] if found else ""
            self.injected[fault] = self.injected.get(fault, 0) + 1
            return fault


_STATUS = {"unavailable": 503, "throttled": 429}


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        faults: Faults = self.server.faults
        fault = faults.next_fault(self.path, self.headers.get("range", ""))
        time.sleep(faults.latency)
        if fault == "dropped":
            self.close_connection = True
        elif fault in _STATUS:
            self._answer(_STATUS[fault], {}, b"<Error>injected</Error>")
        else:
            self._answer(*self._upstream(), is_cut=fault == "cut")

    def do_HEAD(self) -> None:
        self._answer(*self._upstream())

    def _upstream(self) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=30)
        try:
            upstream.request(self.command, self.path, headers=dict(self.headers))
            answer = upstream.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            upstream.close()

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, *, is_cut: bool = False
    ) -> None:
        self.send_response_only(status)
        skipped = {"transfer-encoding", "connection", "content-length"}
        for name, value in headers.items():
            if name.lower() not in skipped:
                self.send_header(name, value)
        size = headers.get("Content-Length", headers.get("content-length", str(len(body))))
        self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection = self.close_connection or is_cut

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, upstream: tuple[str, int], faults: Faults) -> None:
        super().__init__(("127.0.0.1", 0), _Proxy)
        self.upstream, self.faults = upstream, faults

    def handle_error(self, *_: object) -> None:
        pass  # a client that went away


@dataclass
class ObjectStore:
    """A running S3 server with one bucket, behind a proxy."""

    faults: Faults
    environment: dict[str, str]
    """What a process needs to read from it."""
    http_url: str
    """The bucket as a plain web server shows it, without credentials."""
    _s3: Any

    def upload(self, folder: Path, prefix: str) -> str:
        """Upload a folder's files; returns its URL."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder).as_posix()}", file.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def put(self, key: str, content: bytes) -> None:
        self._s3.put_object(Bucket=BUCKET, Key=key, Body=content, ACL="public-read")


def _reset(host: str, port: int) -> None:
    """Remove what an earlier server of this process has left: moto's objects are global."""
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("POST", "/moto-api/reset")
    assert connection.getresponse().status == 200
    connection.close()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    faults = Faults()
    proxy = _Server((host, port), faults)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    environment = {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    s3 = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
    )
    try:
        _reset(host, port)
        s3.create_bucket(Bucket=BUCKET)
        yield ObjectStore(faults, environment, f"{endpoint}/{BUCKET}", s3)
    finally:
        s3.close()
        proxy.shutdown()
        proxy.server_close()
        moto.stop()
