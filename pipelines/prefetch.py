"""Working some items ahead of the one that is handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from fastaug.errors import DataError
from fastaug.runtime.trace import named

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
    """Each item started and finished, in order, with `depth` others started behind it.

    An error of one item is raised after all items before it were handed out. Those behind it, and
    those of a pass that is broken off, are dropped: finished for nothing, unless there is a
    quicker way. The name is of the ranges in a profile: what this thread does to start items, and
    its wait for them.
    """

    def finished() -> Done:
        with named(name):
            return finish(pending.popleft())

    pending: deque[Started] = deque()
    later: DataError | None = None
    source = iter(items)
    try:
        while later is None:
            try:
                item = next(source)
                with named(name):
                    pending.append(start(item))
            except StopIteration:
                break
            except DataError as error:
                later = error
            if len(pending) > depth:
                yield finished()
        while pending:
            yield finished()
    finally:  # broken off: a pipeline must hand out what it was told to make
        while pending:
            with suppress(Exception):
                (drop or finish)(pending.popleft())
    if later is not None:
        try:
            raise later
        finally:  # else the error and this frame hold each other, and DALI's pipelines, in memory
            later = None
