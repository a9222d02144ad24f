"""Prefetching: work on the next items starts before the current one is returned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from fastaug.errors import DataError
from fastaug.runtime.trace import trace_range

Item = TypeVar("Item")
Started = TypeVar("Started")
Done = TypeVar("Done")


def prefetch(
    name: str,
    items: Iterable[Item],
    depth: int,
    start: Callable[[Item], Started],
    finish: Callable[[Started], Done],
    drop: Callable[[Started], object] | None = None,
) -> Iterator[Done]:
    """Start and finish each item, in order, with `depth` later ones already started.

    An error is raised after all items before it were returned. Items after it, and those of an
    aborted iteration, are dropped: by `drop`, or else by finishing them.
    name: of the profiler's range around starting an item and waiting for it.
    """

    def finished() -> Done:
        with trace_range(name):
            return finish(pending.popleft())

    pending: deque[Started] = deque()
    failure: DataError | None = None
    source = iter(items)
    try:
        while failure is None:
            try:
                item = next(source)
                with trace_range(name):
                    pending.append(start(item))
            except StopIteration:
                break
            except DataError as error:
                failure = error
            if len(pending) > depth:
                yield finished()
        while pending:
            yield finished()
    finally:  # aborted: a DALI pipeline must return what was scheduled
        while pending:
            with suppress(Exception):
                (drop or finish)(pending.popleft())
    if failure is not None:
        try:
            raise failure
        finally:  # breaks the cycle of the error and this frame, which would keep DALI's pipelines
            failure = None
