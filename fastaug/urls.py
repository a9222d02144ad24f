"""URLs of remote data: which ones are allowed, and how they are shown.

A URL is stored in the run folder and in checkpoints, and appears in logs and error messages. So it
must not hold a secret: user names, passwords and signatures are refused when the config is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from fastaug.errors import ConfigError

SCHEMES = ("s3", "gs", "http", "https")


class RemoteUrl(NamedTuple):
    """A folder in an object store or on a web server."""

    scheme: str
    host: str
    """Bucket, or host and port."""
    prefix: str
    """Path below it, without slashes at its ends."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.prefix}" if self.prefix else "")


def is_url(data: str) -> bool:
    """Whether --data is a URL, not a path."""
    return "://" in data


def absolute_data(data: str) -> str:
    """--data as it is stored: a path is made absolute, so that a checkpoint finds its data from any
    folder."""
    if data in ("", "shapes") or is_url(data):
        return data
    return str(Path(data).expanduser().absolute())


def parse_url(data: str) -> RemoteUrl:
    """The URL in --data; the error for one that is not allowed does not repeat its secrets."""
    scheme, _, rest = data.partition("://")
    shown = f"--data {scheme}://..."
    if scheme not in SCHEMES:
        raise ConfigError(f"{shown}: unknown scheme; give {', '.join(f'{s}://' for s in SCHEMES)}")
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"{shown}: a user name or password in a URL would be stored with the run; remove it "
            "and give credentials through the environment (docs/guide/object-stores.md)"
        )
    if "?" in rest or "#" in rest:
        raise ConfigError(
            f"{shown}: a URL with a query, such as a signed one, would be stored with the run; "
            "remove everything from the '?' and give credentials through the environment "
            "(docs/guide/object-stores.md)"
        )
    try:
        host = urlsplit(data).netloc
    except ValueError:
        host = ""
    if not host:
        needed = "host" if scheme.startswith("http") else "bucket"
        raise ConfigError(
            f"--data {data}: has no {needed}; give {scheme}://{needed.upper()}/PREFIX"
        )
    return RemoteUrl(scheme, host, rest[len(host) :].strip("/"))
