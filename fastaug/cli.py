"""What the commands share: flags from a dataclass, and errors as one line."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, FastaugError, printable
from fastaug.settings import switch

Config = TypeVar("Config")
Training = TypeVar("Training", bound=TrainConfig)

# Python's wording for a value that is not a number, and ours.
_CONVERSIONS = {
    "Error parsing ": "",
    "invalid literal for int() with base 10: ": "must be a whole number, got ",
    "could not convert string to float: ": "must be a number, got ",
}


def peek(args: Sequence[str], *names: str) -> dict[str, str]:
    """Values of the flags that the defaults of the others depend on; "" if absent."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        first.add_argument(f"--{name}", default="", nargs="?")
    found, _ = first.parse_known_args(list(args))
    return {name: getattr(found, name) or "" for name in names}


def parse(
    kind: type[Config], args: Sequence[str], *, prog: str, default: Config | None = None
) -> Config:
    """Parse the flags of a dataclass. A wrong flag is a ConfigError like any other mistake."""
    import tyro

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                kind,
                prog=prog,
                args=list(args),
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.PositionalRequiredArgs,
                    tyro.conf.OmitArgPrefixes,
                ),
            )
    except SystemExit as error:
        if error.code != 2:
            raise
        raise ConfigError(f"{_one_line(box.getvalue())} (see {prog} --help)") from None


def parse_training(
    kind: type[Training],
    args: Sequence[str],
    *,
    prog: str,
    default: Training,
    switches: Mapping[str, str] | None = None,
) -> Training:
    """Parse the flags of fastaug.train, grouped by component, and --dali.

    switches: flag -> help of further flags that the command handles before it parses.
    """
    from tyro.conf import arg

    first = {"dali": "short for --loader dali", **(switches or {})}
    flags = make_dataclass(
        kind.__name__,
        [
            *(
                (n, Annotated[bool, arg(help=text)], field(default=False))
                for n, text in first.items()
            ),
            ("config", Annotated[kind, arg(name="")], field(default=default)),
        ],
        frozen=True,
    )
    flags.__doc__ = kind.__doc__
    # Replaced before parsing: a config is checked as a whole when it is made.
    words = [word for a in args for word in (("--loader", "dali") if a == "--dali" else (a,))]
    # tyro only has the form of a switch that changes the default.
    as_default = {switch(n, on) for n, on in default.to_flat().items() if isinstance(on, bool)}
    words = [word for word in words if word.replace("_", "-") not in as_default]
    parsed: Any = parse(flags, words, prog=prog)
    return parsed.config


def output_file(flag: str, named: str) -> Path:
    """Path of a file that a flag names, checked before the work starts."""
    path = Path(named).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{flag} {named}: must be a file in an existing folder")
    return path


def run(main: Callable[[Sequence[str]], int], args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user's mistake is one line and exit code 2."""
    code = _run(main, args)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # One of several ranks: gloo's threads may abort the process while Python shuts down, and
        # torchrun would report that as its exit code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(main: Callable[[Sequence[str]], int], args: Sequence[str] | None) -> int:
    args = sys.argv[1:] if args is None else args
    handler = logging.StreamHandler(sys.stderr)
    rank = int(os.environ.get("RANK", 0))  # set by torchrun
    who = f"rank {rank}: " if rank else ""
    handler.setFormatter(_Printable(f"{who}%(message)s"))
    # Only rank 0 logs what all ranks have in common.
    logging.basicConfig(level=logging.WARNING if rank else logging.INFO, handlers=[handler])
    try:
        return main(args)
    except FastaugError as error:
        if "--debug" in args:
            print(_each_line(traceback.format_exc()), file=sys.stderr)
        if not error.reported:
            print(f"{who}error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Printable(logging.Formatter):
    """One line per message, whatever the names in it contain; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, *args: Any) -> str:
        return _each_line(super().formatException(*args))


def _each_line(text: str) -> str:
    return "\n".join(printable(line) for line in text.rstrip("\n").split("\n"))


def _one_line(box: str) -> str:
    """Text of tyro's box up to its first rule, and the flags that it suggests below."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    title, *body = [line for line in lines if line]
    if body and _is_rule(body[0]):  # the rule below the title, where boxes cannot be drawn
        body.pop(0)
    text = " ".join(itertools.takewhile(lambda line: not _is_rule(line), body)).rstrip(".")
    for theirs, ours in _CONVERSIONS.items():
        text = text.replace(theirs, ours)
    _, _, suggested = box.partition("Perhaps you meant:")
    if near := dict.fromkeys(
        re.findall(r"--[a-z][a-z-]*(?= )", suggested.partition("(default")[0])
    ):
        text += f"; did you mean {' or '.join(near)}?"
    return text or title


def _is_rule(line: str) -> bool:
    return set(line) <= {"─", "-"}
