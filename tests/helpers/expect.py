"""Errors by their class and by the flags, values and files that they name, not by their wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastaug.errors import FastaugError


def missing(message: str, *names: str) -> list[str]:
    """The names, separated by spaces, that do not occur as words in a message."""
    words = [word for name in names for word in name.split()]
    return [w for w in words if not re.search(rf"(?<![\w-]){re.escape(w)}(?!\w)", message)]


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], *names: str
) -> Iterator[pytest.ExceptionInfo]:
    """An error of this class that names each of these; fastaug's own have one line."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert missing(message, *names) == [], message
    if isinstance(caught.value, FastaugError):
        assert message
        assert "\n" not in message
