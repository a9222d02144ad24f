"""Threads for work on many images, and a progress bar."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastaug.runtime.cores import core_count

log = logging.getLogger("fastaug")


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """workers: number of threads; -1: four per core, since most of them wait for the storage."""
    threads = min(32, 4 * core_count()) if workers < 0 else max(1, workers)
    pool = ThreadPoolExecutor(threads)
    try:
        # Pillow would warn about individual images (large ones, odd EXIF).
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def progress_bar(
    title: str, total: int, done: int = 0, log_seconds: float = math.inf
) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, only in a terminal and after the first second.

    done: how many of the total were finished before.
    log_seconds: without a terminal, log a line this often.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(
        *columns, TextColumn("eta"), TimeRemainingColumn(), console=console, transient=True
    )
    task = progress.add_task(title, total=total, completed=done)
    begin = logged = time.monotonic()
    now_done = done

    def advance(count: int) -> None:
        nonlocal logged, now_done
        progress.advance(task, count)
        now_done += count
        now = time.monotonic()
        if console.is_terminal and now - begin > 1:
            progress.start()
        elif not console.is_terminal and now - logged > log_seconds:
            logged = now
            left = timedelta(seconds=int((total - now_done) * (now - begin) / (now_done - done)))
            log.info("%s: %s of %s, eta %s", title, f"{now_done:,}", f"{total:,}", left)

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
