"""Range reads from an object store, with retries.

Errors hold nothing of what the server or obstore said: their texts contain URLs and headers.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from fastaug.urls import RemoteUrl

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

RETRIES = 8
"""Retries of a request; their pauses double from 0.1 s, 25 s in total."""
_FIRST_PAUSE = 0.1
_CONNECT_TIMEOUT = timedelta(seconds=5)
_READ_TIMEOUT = timedelta(seconds=15)
"""Longest wait for the next byte from the server."""
_TIMEOUT = timedelta(seconds=90)
"""For a whole request: one image, or one part of an object."""
_PART = 8 << 20
"""Bytes of one request for a large object."""


class Client:
    """Reads objects below a URL. Threads may share it; it can be pickled.

    The connections belong to a process. A process that was forked from one that has read cannot
    read at all: obstore's threads do not exist there, and its calls would wait forever.
    """

    def __init__(self, url: RemoteUrl) -> None:
        self.url = url
        self._store: Any = None
        self._is_down = False

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_store": None, "_is_down": False}

    def size(self, name: str) -> int:
        """Size of an object in bytes."""
        import obstore

        return int(self._retrying(name, lambda store: obstore.head(store, name)["size"]))

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of an object.

        Raises FileNotFoundError if there is no such object, and OSError with an errno if the bytes
        cannot be read: the object is shorter, access is denied, or all retries failed.
        """
        import obstore

        def attempt(store: Any) -> bytes:
            content = bytes(obstore.get_range(store, name, start=offset, length=size))
            if len(content) != size:
                raise _ShortBodyError
            return content

        return self._retrying(name, attempt)

    def read_object(self, name: str, limit: int) -> bytes:
        """All bytes of an object; an OSError if they are more than the limit."""
        size = self.size(name)
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than {limit:,}", self.where(name))
        parts = range(0, size, _PART)
        return b"".join(self.read(name, start, min(_PART, size - start)) for start in parts)

    def where(self, name: str) -> str:
        """The place of an object, for messages."""
        return f"{self.url}/{name}"

    def _retrying(self, name: str, attempt: Any) -> Any:
        """The result of attempt(store), after retries of what may pass.

        After a failure with all retries, further calls have a single attempt until one succeeds: a
        whole batch during an outage would otherwise wait for the retries of each image in turn.
        """
        store = self._connected()
        for retry in range(RETRIES + 1):
            try:
                result = attempt(store)
                self._is_down = False
                return result
            except Exception as error:
                failure, may_pass = _classified(error, self.where(name))
            if not may_pass:
                raise failure
            if self._is_down or retry == RETRIES:
                break
            time.sleep(_FIRST_PAUSE * 2**retry * random.uniform(0.5, 1.5))
        self._is_down = True
        raise failure

    def _connected(self) -> Any:
        if _Runtime.is_inherited:
            _raise_inherited()
        if self._store is None:
            _Runtime.is_started = True
            self._store = _open_store(self.url)
        return self._store


class _Runtime:
    """Whether obstore's threads were started, and whether that was before a fork."""

    is_started = False
    is_inherited = False

    @classmethod
    def note_fork(cls) -> None:
        cls.is_inherited = cls.is_started


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_Runtime.note_fork)


def _raise_inherited() -> NoReturn:
    raise RuntimeError(
        "remote data cannot be read in a process that was forked from one that has read remote "
        "data; start worker processes with multiprocessing's 'forkserver' or 'spawn'"
    )


class _ShortBodyError(Exception):
    """The server has sent all that there is, and it is less than the range."""


def _open_store(url: RemoteUrl) -> Any:
    """obstore finds credentials itself: in the environment, or from the machine's role."""
    from obstore.store import GCSStore, HTTPStore, S3Store

    options: ClientConfig = {
        "connect_timeout": _CONNECT_TIMEOUT,
        "read_timeout": _READ_TIMEOUT,
        "timeout": _TIMEOUT,
        # A bucket's endpoint is https unless the user sets another one, such as a local server.
        "allow_http": url.scheme != "https",
    }
    # Its own retries leave out answers that break off.
    retries: RetryConfig = {"max_retries": 0}
    prefix = url.prefix or None
    if url.scheme == "s3":
        return S3Store(url.host, prefix=prefix, client_options=options, retry_config=retries)
    if url.scheme == "gs":
        return GCSStore(url.host, prefix=prefix, client_options=options, retry_config=retries)
    return HTTPStore(str(url), client_options=options, retry_config=retries)


def _classified(error: Exception, where: str) -> tuple[OSError, bool]:
    """An error of obstore as an OSError in our own words, and whether a retry may help."""
    from obstore import exceptions

    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = int(status[1]) if status else 0
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such object", where), False
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        reason = "found no credentials in the environment, and this machine has no role"
        return PermissionError(errno.EACCES, reason, where), False
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        reason = f"access denied, HTTP status {code}: check the credentials"
        return PermissionError(errno.EACCES, reason, where), False
    if isinstance(error, exceptions.NotSupportedError) or "non-partial response" in text:
        return OSError(errno.ENOTSUP, "the server does not support range requests", where), False
    if "region" in text and not code:
        return OSError(
            errno.EINVAL, "the bucket is in another region: set AWS_REGION", where
        ), False
    if code == 416 or isinstance(error, _ShortBodyError):
        return OSError(errno.EIO, "the object ends before the range does", where), False
    if code:
        return OSError(errno.EIO, f"HTTP status {code}", where), code >= 500 or code in (408, 429)
    if not isinstance(error, exceptions.BaseError | OSError):
        raise error  # not of the storage
    return OSError(errno.EIO, "the connection failed", where), True
