"""Loader speed from a web server on loopback that answers with a delay, against local shards.

    python -m fastaug.pack FOLDER PACKED
    python benchmarks/remote.py --data PACKED

Prints images per second of one epoch: from the folder; from the server without a cache, with an
empty cache, and with a filled one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.engine.loaders import build_loader
from fastaug.errors import ConfigError
from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class Options(Settings):
    """Measure the loader with packed shards behind a slow server."""

    data: str = ""
    """A folder that fastaug.pack has written."""
    latency: float = setting(50.0, at_least=0)
    """Milliseconds before the server answers."""
    views: int = setting(1, at_least=1)
    """Views per image."""
    images: int = setting(64, at_least=1)
    """Images per batch."""
    prefetch: int = setting(2, at_least=1)
    """Batches that the loader prepares ahead."""
    loader: str = "dali"
    """dali or torch."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/remote.py")
    if not (Path(options.data) / "train.index").is_file():
        raise ConfigError(f"--data {options.data}: give a folder that fastaug.pack has written")
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=serve, args=(options.data, options.latency, theirs), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FASTAUG_CACHE"] = cache
        report("local folder", options, options.data, 0)
        report("remote, no cache", options, url, 0)
        report("remote, empty cache", options, url, 100)
        report("remote, filled cache", options, url, 100)
    server.terminate()
    server.join()
    return 0


def report(name: str, options: Options, data: str, cache_size: float) -> None:
    config = TrainConfig.from_flat(
        data=data,
        cache_size=cache_size,
        loader=options.loader,
        views=options.views,
        batch_size=options.images * options.views,
        prefetch=options.prefetch,
        size=224,
        device="cpu",
    )
    loader = build_loader(config)
    next(iter(loader))  # compiles the view kernel, connects
    begin, cpu_begin = time.perf_counter(), _cpu_time()
    images = sum(len(batch.indices) for batch in loader)
    seconds, cpu = time.perf_counter() - begin, _cpu_time() - cpu_begin
    print(f"{name:22} {images / seconds:6.0f} images/s {1e3 * cpu / images:6.2f} ms CPU per image")


def _cpu_time() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def serve(folder: str, latency: float, started: Connection) -> None:
    """A web server that answers HEAD, and GET with one range, after a delay."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await asyncio.sleep(latency / 1e3)
                verb, path, _ = head.split(" ", 2)
                file = Path(folder) / path.lstrip("/")
                status, size = ("200 OK", file.stat().st_size) if file.is_file() else ("404 No", 0)
                first, length = 0, size
                if status == "200 OK" and (asked := re.search(r"bytes=(\d+)-(\d+)", head)):
                    first = int(asked[1])
                    length = min(int(asked[2]) + 1, size) - first
                    status = "206 Partial Content"
                fields = {
                    "Content-Length": length,
                    "Content-Range": f"bytes {first}-{first + length - 1}/{size}",
                    "Last-Modified": "Thu, 01 Jan 1970 00:00:00 GMT",
                }
                lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                writer.write(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode())
                if verb == "GET" and length:
                    with file.open("rb") as content:
                        writer.write(os.pread(content.fileno(), length, first))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
        started.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    sys.exit(cli.run(main))
