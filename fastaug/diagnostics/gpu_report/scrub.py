"""Removes what names the machine or its user from the text of a report."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_NAME = r"[^\s/:,;'\"()<>\[\]{}|`]+"
_PATH = re.compile(rf"(?<![\w/.:~<-])(?:~/?|/)(?:{_NAME}/)*({_NAME})/?")
"""An absolute path, or one below a home folder; URLs have a colon or slash before theirs."""
_SHORTEST = 3
"""Letters of a name that is removed: "ci" is part of too many words."""
_COMMON = {"", "localhost", "127.0.0.1", "127.0.1.1", "root", "user"}
"""Names that tell nothing."""


def scrub(value: Any) -> Any:
    """The value with all texts in it scrubbed; the keys of dictionaries stay."""
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, dict):
        return {key: scrub(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(scrub(each) for each in value)
    return value


def scrub_text(text: str) -> str:
    """Paths become ".../NAME", the names of host and user HOST and USER."""
    text = _PATH.sub(lambda found: f".../{found[1]}", text)
    for name, label in _names():
        text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", label, text, flags=re.IGNORECASE)
    return text


def _names() -> Iterator[tuple[str, str]]:
    """Names of this machine and its user, the longest first, and what they are replaced by."""
    hosts = {socket.gethostname(), os.environ.get("HOSTNAME", "")}
    with suppress(OSError):
        hosts.add(socket.getfqdn())
        hosts.add(socket.gethostbyname(socket.gethostname()))
    hosts |= {host.partition(".")[0] for host in hosts if not host[:1].isdigit()}
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path.home().name}
    with suppress(OSError, KeyError):
        users.add(getpass.getuser())
    found = dict.fromkeys(users, "USER") | dict.fromkeys(hosts, "HOST")
    for name in sorted(found, key=len, reverse=True):
        if len(name) >= _SHORTEST and name.lower() not in _COMMON:
            yield name, found[name]
