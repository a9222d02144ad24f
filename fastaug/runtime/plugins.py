"""Checks of objects that users plug in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any


def accepts_call(method: Any, positional: Sequence[str], keywords: Sequence[str] = ()) -> bool:
    """True if the method can be called with these arguments, as far as its signature tells."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    except ValueError:  # a compiled function without a signature
        return True
    return True
