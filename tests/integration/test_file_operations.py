"""The recorder of file operations, on a script whose operations are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from file_operations import kill_before, kill_points, record, why_no_strace

pytestmark = pytest.mark.skipif(bool(why_no_strace()), reason=why_no_strace())

SCRIPT = """
import os, sys, threading

def work():
    folder = sys.argv[1]
    with open(f"{folder}/a.tmp", "wb") as file:
        file.write(b"hello" * 10)
        file.seek(-2, os.SEEK_END)
        file.write(b'x"\\n,<y>')
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{folder}/a.tmp", f"{folder}/a")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.link("a", "b", src_dir_fd=descriptor, dst_dir_fd=descriptor)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, b"line")
    os.unlink(f"{folder}/a")
    open("/dev/null", "wb").write(b"elsewhere")

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def command(folder: Path) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(folder)]


def test_all_operations_in_their_order(tmp_path: Path) -> None:
    operations = record(command(tmp_path), tmp_path)
    assert [str(own) for own in operations] == [
        "create a.tmp",
        "truncate a.tmp",
        "write a.tmp 50 bytes at 0",
        "write a.tmp 7 bytes at 48",
        "fsync a.tmp",
        "rename a.tmp -> a",
        "fsync .",
        "link a -> b",
        "create log",
        "write log 4 bytes at -1",
        "unlink a",
    ]
    assert operations[3].data == b'x"\n,<y>'


def test_a_kill_before_an_operation(tmp_path: Path) -> None:
    """The call is not executed, and all those before it are."""
    (rename,) = (own for own in record(command(tmp_path), tmp_path) if own.kind == "rename")
    for file in tmp_path.iterdir():
        file.unlink()
    assert kill_points([rename]) == [rename]
    assert kill_before(command(tmp_path), rename)
    assert {file.name: len(file.read_bytes()) for file in tmp_path.iterdir()} == {"a.tmp": 55}
