"""What the entry points share: flags from a dataclass, and errors as one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastaug.errors import ConfigError, FastaugError

Config = TypeVar("Config")

# Python's words for a value that is no number, and ours
_CONVERSIONS = {
    "Error parsing ": "",
    "invalid literal for int() with base 10: ": "must be a whole number, got ",
    "could not convert string to float: ": "must be a number, got ",
}


# Flags that are short for others.
_SHORT = {"--dali": ("--loader", "dali")}


def peek(args: Sequence[str], *names: str) -> dict[str, str]:
    """The values of some flags ahead of the others, whose defaults depend on them; "" if absent."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        first.add_argument(f"--{name}", default="", nargs="?")
    found, _ = first.parse_known_args(list(args))
    return {name: getattr(found, name) or "" for name in names}


def parse(
    kind: type[Config], args: Sequence[str], *, prog: str, default: Config | None = None
) -> Config:
    """The flags of a dataclass, by tyro. A wrong flag is a ConfigError like any other mistake."""
    import tyro

    args = [word for arg in args for word in _SHORT.get(arg, (arg,))]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                kind,
                prog=prog,
                args=args,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalRequiredArgs),
            )
    except SystemExit as error:
        if error.code != 2:
            raise
        raise ConfigError(f"{_one_line(said.getvalue())} (see {prog} --help)") from None


def run(main: Callable[[Sequence[str]], int], args: Sequence[str] | None = None) -> int:
    """Call an entry point; a user's mistake ends with one line and exit code 2."""
    args = sys.argv[1:] if args is None else args
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return main(args)
    except FastaugError as error:
        if "--debug" in args:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _one_line(box: str) -> str:
    """What tyro's box says up to its first rule, and the flags that it suggests further down."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    title, *body = [line for line in lines if line]
    if body and _is_rule(body[0]):  # the rule below the title, where boxes cannot be drawn
        body.pop(0)
    said = " ".join(itertools.takewhile(lambda line: not _is_rule(line), body)).rstrip(".")
    for theirs, ours in _CONVERSIONS.items():
        said = said.replace(theirs, ours)
    _, _, suggested = box.partition("Perhaps you meant:")
    if near := dict.fromkeys(
        re.findall(r"--[a-z][a-z-]*(?= )", suggested.partition("(default")[0])
    ):
        said += f"; did you mean {' or '.join(near)}?"
    return said or title


def _is_rule(line: str) -> bool:
    return set(line) <= {"─", "-"}
