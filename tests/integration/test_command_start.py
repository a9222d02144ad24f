"""Commands before their main function: Ctrl-C, signals and errors while packages are imported.

The stand-in for torch is imported as the real one would be, and then waits or fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastaug.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
START = {f"-m fastaug.{name}": ["-m", f"fastaug.{name}", "--help"] for name in COMMANDS}
START["-m fastaug"] = ["-m", "fastaug", "train", "--help"]
START["fastaug"] = ["{scripts}/fastaug", "train", "--help"]

WAITS = """
import os, pathlib, time
pathlib.Path(os.environ["IMPORTED"]).touch()
time.sleep(60)
"""


class Command:
    """A command whose torch is a stand-in with this source."""

    def __init__(self, start: str, torch: str, folder: Path, **options: object) -> None:
        (folder / "torch").mkdir()
        (folder / "torch/__init__.py").write_text(torch)
        (folder / "fastaug").write_text("from fastaug.__main__ import script\nscript()\n")
        self.imported = folder / "imported"
        environment = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "IMPORTED": str(self.imported)}
        self.process = subprocess.Popen(
            [sys.executable, *(word.format(scripts=folder) for word in START[start])],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    def wait_for_import(self) -> None:
        deadline = time.monotonic() + 60
        while not self.imported.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.mark.parametrize("start", START)
def test_ctrl_c_while_torch_is_imported(start: str, tmp_path: Path) -> None:
    command = Command(start, WAITS, tmp_path)
    command.wait_for_import()
    command.process.send_signal(signal.SIGINT)
    assert command.end() == (130, "interrupted\n")


def test_sigterm_while_torch_is_imported(tmp_path: Path) -> None:
    command = Command("-m fastaug.train", WAITS, tmp_path)
    command.wait_for_import()
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == (-signal.SIGTERM, "")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """As with nohup, and in the background of a script."""

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    command = Command("-m fastaug.train", WAITS, tmp_path, preexec_fn=ignore)
    command.wait_for_import()
    command.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert command.process.poll() is None
    command.process.kill()
    command.end()


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("MemoryError()", 1),
        ("ImportError('libtorch_cpu.so: failed to map segment from shared object')", 1),
        ("ModuleNotFoundError('No module named sympy', name='sympy')", 2),
        ("OSError(28, 'No space left on device')", 1),
    ],
)
@pytest.mark.parametrize("start", ["-m fastaug.train", "-m fastaug"])
def test_errors_of_the_machine(start: str, raised: str, code: int, tmp_path: Path) -> None:
    found, errors = Command(start, f"raise {raised}", tmp_path).end()
    assert found == code, errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_a_bug_has_a_traceback(tmp_path: Path) -> None:
    found, errors = Command("-m fastaug.train", "raise KeyError('bug')", tmp_path).end()
    assert found == 1
    assert "Traceback" in errors


def python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stderr=subprocess.PIPE,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_a_program_that_imports_fastaug_keeps_its_handlers() -> None:
    script = """
        import signal, sys
        before = signal.getsignal(signal.SIGINT), sys.excepthook
        import fastaug
        assert (signal.getsignal(signal.SIGINT), sys.excepthook) == before
        assert "torch" not in sys.modules
        assert all(hasattr(fastaug, name) for name in fastaug.__all__)
    """
    found = python("-c", "\n".join(line.strip() for line in script.splitlines()))
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("flags", [["--help"], ["--version"]])
def test_a_reader_that_has_left(flags: list[str]) -> None:
    """fastaug --help | head -0"""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        found = python("-m", "fastaug", *flags, stdout=writing)
    finally:
        os.close(writing)
    assert (found.returncode, found.stderr) == (141, "")


def test_help_starts_without_torch(tmp_path: Path) -> None:
    command = Command("-m fastaug", "raise AssertionError", tmp_path)
    command.process.kill()
    command.end()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for flag in ("--help", "--version"):
        subprocess.run([sys.executable, "-m", "fastaug", flag], env=environment, check=True)
