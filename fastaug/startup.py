"""Commands outside their main function: Ctrl-C and errors while Python imports what they need, and
Ctrl-C while it shuts down.

Standard library only, and as little of it as possible: it is imported before everything else.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def guard_command() -> None:
    """If this process runs a command of fastaug: one line instead of a traceback for Ctrl-C and for
    errors of the machine. Other programs that import fastaug are left alone."""
    if _is_command():
        sys.excepthook = _report
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored: nohup
            signal.signal(signal.SIGINT, _exit)


class KeyboardInterrupts:
    """Within the context, Ctrl-C is a KeyboardInterrupt also in a command of fastaug."""

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is _exit:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_error: object) -> None:
        if self._before is _exit:
            signal.signal(signal.SIGINT, _exit)


def _is_command() -> bool:
    """True for python -m fastaug.NAME, fastaug NAME, and none of their child processes."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # until Python has imported the package of the module
        return any(word.removeprefix("-m").split(".")[0] == "fastaug" for word in sys.orig_argv)
    name = os.path.splitext(os.path.basename(program))[0]
    return name == "fastaug" and program in sys.orig_argv


def _exit(_signum: int, _frame: Any) -> None:
    # Not KeyboardInterrupt: packages that are being imported may catch it.
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _report(kind: Any, error: Any, trace: Any) -> None:
    """sys.excepthook: errors of imports come before cli.run."""
    from fastaug.errors import machine_error, printable

    found = None if "--debug" in sys.argv else machine_error(error)
    if found is None:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {printable(found.message)}", file=sys.stderr, flush=True)
    os._exit(found.exit_code)
