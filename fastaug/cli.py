"""What the commands share: flags from a dataclass, and errors as one line."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import itertools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, FastaugError, machine_error, printable
from fastaug.normalization import Normalization, parse_normalization
from fastaug.settings import Settings, field_help, flag, switch, typed
from fastaug.startup import INTERRUPTED, KeyboardInterrupts

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

log = logging.getLogger("fastaug")
Config = TypeVar("Config")
Training = TypeVar("Training", bound=TrainConfig)

# tyro's and Python's wording of a mistake, and ours.
_REWORDED = {
    r"Error parsing --size: invalid literal for int\(\) with base 10: (.*)": (
        r"--size takes PIXELS, or FIRST:LAST such as 128:224, got \1"
    ),
    r"Error parsing (--\S+): invalid literal for int\(\) with base 10: (.*)": (
        r"\1 must be a whole number, got \2"
    ),
    r"Error parsing (--\S+): could not convert string to float: (.*)": (
        r"\1 must be a number, got \2"
    ),
    r"Missing value for argument '(\S+)'. Expected 1 values": r"\1 needs a value",
    r"Missing value for argument '(\S+)'. Expected (\d+) values": r"\1 needs \2 values",
    r"invalid choice 'warmup-cosine' for argument '--schedule'.*": (
        "--schedule warmup-cosine is now --schedule cosine --warmup-epochs N; N was 5 unless given"
    ),
    r"invalid choice ('.*') for argument '(\S+)'. Expected one of \((.*)\)": (
        r"\2 cannot be \1: one of \3"
    ),
    r"Error parsing (--\S+): Could not parse arguments \[(.*)\] into tuple type .*": (
        r"\1 takes numbers, got \2"
    ),
    r"Unrecognized options: (.*)": r"unexpected argument \1",
    r"Missing from .*?: ([A-Z]+) (.*) \(required\)": r"no \1 given: \2",
}
_OTHER_NAMES = {"--learning-rate": "--lr", "--output": "--out", "--output-dir": "--out"}
"""Flags of other programs, and what they are called here."""


def peek(args: Sequence[str], *names: str) -> dict[str, str]:
    """Values of the flags that the defaults of the others depend on; "" if absent."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        first.add_argument(f"--{name}", default="", nargs="?")
    found, _ = first.parse_known_args(list(args))
    return {name: getattr(found, name) or "" for name in names}


def with_value(args: Sequence[str], flag: str, value: str) -> list[str]:
    """The arguments with this value after the flag, if it is given without one."""
    words = list(args)
    for place, word in enumerate(args):
        is_last = place + 1 == len(args) or args[place + 1].startswith("--")
        if word.replace("_", "-") == flag and is_last:
            words.insert(place + 1, value)
    return words


def parse(
    kind: type[Config], args: Sequence[str], *, prog: str, default: Config | None = None
) -> Config:
    """Parse the flags of a dataclass. A wrong flag is a ConfigError like any other mistake."""
    import tyro
    from tyro.constructors import ConstructorRegistry

    registry = ConstructorRegistry()
    registry.primitive_rule(_normalization_rule)
    _check_flags(args, _flags(kind), prog)
    if {"-h", "--help"} & set(args):
        _set_help(kind, default)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), registry:
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


def _normalization_rule(field_type: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How tyro reads --normalize, which takes a name or two words."""
    from tyro.constructors import PrimitiveConstructorSpec

    if field_type.type != Normalization:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME or MEAN STD",
        instance_from_str=partial(parse_normalization, "--normalize"),
        is_instance=lambda value: isinstance(value, (str, tuple)),
        str_from_instance=lambda value: typed(value).split(),
    )


def parse_training(
    kind: type[Training],
    args: Sequence[str],
    *,
    prog: str,
    default: Training,
    switches: Mapping[str, str] | None = None,
    values: Mapping[str, str] | None = None,
    follow_weights: bool = False,
    fixed: Collection[str] = (),
) -> Training:
    """Parse the flags of fastaug.train, grouped by component, and --dali.

    switches, values: flag -> help of further flags, without and with a value, that the command
    handles before it parses.
    follow_weights: the settings with which --weights or --pretrained were trained are defaults,
    except for those whose names are in `fixed`.
    """
    from fastaug.runs.initial_weights import settings_of_weights

    if peek(args, "weights")["weights"]:  # a recipe's --pretrained gives way to --weights
        default = default.replace(pretrained=False)
    parse_with = partial(
        _parse_training, kind, args, prog=prog, switches=switches or {}, values=values or {}
    )
    config = parse_with(default=default)
    found = settings_of_weights(config) if follow_weights else {}
    found = {name: value for name, value in found.items() if name not in fixed}
    if not found:
        return config
    config = parse_with(default=default.replace(**found))
    given = {word.partition("=")[0].replace("_", "-") for word in args}
    followed = {
        name: value
        for name, value in found.items()
        if given.isdisjoint((flag(name), switch(name, False)))
    }
    if followed:
        log.info("from the weights: %s", " ".join(_as_typed(*item) for item in followed.items()))
    return config


def _as_typed(name: str, value: Any) -> str:
    return switch(name, value) if isinstance(value, bool) else f"{flag(name)} {typed(value)}"


def _parse_training(
    kind: type[Training],
    args: Sequence[str],
    *,
    prog: str,
    default: Training,
    switches: Mapping[str, str],
    values: Mapping[str, str],
) -> Training:
    from tyro.conf import arg

    first = {"dali": "short for --loader dali", **switches}
    flags = make_dataclass(
        kind.__name__,
        [
            *(
                (n, Annotated[bool, arg(help=text)], field(default=False))
                for n, text in first.items()
            ),
            *((n, Annotated[str, arg(help=text)], field(default="")) for n, text in values.items()),
            ("settings", Annotated[kind, arg(name="")], field(default=default)),
        ],
        frozen=True,
    )
    flags.__doc__ = f"{kind.__doc__}\n\n{_about_defaults(args, prog, default)}"
    words = list(without_short_forms(args))
    given = {word.partition("=")[0] for word in words}
    if default.view.initial_size and "--size" in given and "--initial-size" not in given:
        words += ["--initial-size", "0"]  # one size is meant, also where the default has two
    # tyro only has the form of a switch that changes the default.
    as_default = {switch(n, on) for n, on in default.to_flat().items() if isinstance(on, bool)}
    words = [word for word in words if word.replace("_", "-") not in as_default]
    parsed: Any = parse(flags, words, prog=prog)
    return parsed.settings


def _about_defaults(args: Sequence[str], prog: str, default: TrainConfig) -> str:
    """Where the defaults that --help shows come from, and an example."""
    source = f"recipe {default.run.recipe}" if default.run.recipe else "a run without a recipe"
    source += "; add --data DIR or --recipe NAME to see others"
    for name, given in peek(args, "config", "resume").items():
        source = f"--{name} {given}" if given else source
    return (
        f"Defaults shown are those of {source}.\n\n"
        f"Example: {prog} --dali --data DIR --model nf_resnet26 --size 128"
    )


def without_short_forms(args: Sequence[str]) -> Iterator[str]:
    """--dali, --compile without a value, --no-compile and --size FIRST:LAST in full. Replaced
    before parsing: a config is checked as a whole when it is made."""
    forms = {"--dali": ("--loader", "dali"), "--no-compile": ("--compile", "off")}
    pairs = itertools.zip_longest(args, args[1:], fillvalue="--")
    for word, following in pairs:
        name, equals, value = word.partition("=")
        size = value if equals else following
        if name == "--size" and ":" in size:
            yield from _two_sizes(size)
            if not equals:
                next(pairs)
            continue
        yield from forms.get(word, (word,))
        if word == "--compile" and following.startswith("-"):
            yield "default"


def _two_sizes(value: str) -> tuple[str, ...]:
    """128:224 -> the flags that it is short for."""
    if not (sizes := re.fullmatch(r"([0-9]+):([0-9]+)", value)):
        raise ConfigError(f"--size takes PIXELS, or FIRST:LAST such as 128:224, got {value}")
    return "--initial-size", sizes[1], "--size", sizes[2]


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
    # A crash of native code, such as an allocation that fails in a thread of DALI, has a message.
    with contextlib.suppress(OSError, AttributeError, ValueError):  # stderr without a file
        faulthandler.enable(all_threads=False)
    handler = logging.StreamHandler(sys.stderr)
    rank = int(os.environ.get("RANK", 0))  # set by torchrun
    who = f"rank {rank}: " if rank else ""
    handler.setFormatter(_Printable(f"{who}%(message)s"))
    # Only rank 0 logs what all ranks have in common.
    logging.basicConfig(level=logging.WARNING if rank else logging.INFO, handlers=[handler])
    try:
        with KeyboardInterrupts():
            code = main(args)
            sys.stdout.flush()
            return code
    except FastaugError as error:
        if "--debug" in args:
            print(_each_line(traceback.format_exc()), file=sys.stderr)
        if not error.reported:
            print(f"{who}error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if "--debug" in args or (found := machine_error(error)) is None:
            raise
        print(f"{who}error: {printable(found.message)}", file=sys.stderr)
        return found.exit_code


class _Printable(logging.Formatter):
    """One line per message, whatever the names in it contain; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, *args: Any) -> str:
        return _each_line(super().formatException(*args))


def _each_line(text: str) -> str:
    return "\n".join(printable(line) for line in text.rstrip("\n").split("\n"))


def _flags(kind: type) -> list[str]:
    """The flags of a dataclass and of those inside it."""
    flags = []
    for name, hint in get_type_hints(kind).items():
        flags += _flags(hint) if isinstance(hint, type) and is_dataclass(hint) else [flag(name)]
    return flags


def _set_help(kind: Any, default: Any = None) -> None:
    """Give tyro each help text on one line: it keeps the line breaks of a docstring. A switch that
    is on says that its flag, --no-NAME, turns it off."""
    helps = field_help(kind) if issubclass(kind, Settings) else {}
    for own in fields(kind):
        value = getattr(default, own.name, own.default)
        if is_dataclass(value):
            _set_help(type(value), value)
        elif own.name in helps:
            text = f"Turn off (it is on): {helps[own.name]}" if value is True else helps[own.name]
            own.metadata = MappingProxyType({**own.metadata, "help": text})


def _check_flags(args: Sequence[str], known: list[str], prog: str) -> None:
    """Refuse an unknown flag before tyro, which may first report that another argument is missing,
    and whose suggestions share as little as a word with what was typed."""
    accepted = {"--help", *known, *(f.replace("--", "--no-", 1) for f in known)}
    for word in args:
        name = word.partition("=")[0].replace("_", "-")
        if not re.fullmatch("--[a-zA-Z].*", name) or name in accepted:
            continue
        words = get_close_matches(name[2:], [f[2:] for f in known], cutoff=0.8)
        near = [f"--{word}" for word in words] or [
            f for f in known if f.startswith(f"{name}-") or name.endswith(f[1:])
        ]
        near = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in known else near
        hint = f": did you mean {' or '.join(near)}?" if near else f"; see {prog} --help"
        raise ConfigError(f"unknown flag {word.partition('=')[0]}{hint}")


def _one_line(box: str) -> str:
    """Text of tyro's box up to its first rule, in our words."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    title, *body = [line for line in lines if line]
    if body and _is_rule(body[0]):  # the rule below the title, where boxes cannot be drawn
        body.pop(0)
    text = " ".join(itertools.takewhile(lambda line: not _is_rule(line), body)).rstrip(".")
    for theirs, ours in _REWORDED.items():
        text = re.sub(theirs, ours, text)
    return text or title


def _is_rule(line: str) -> bool:
    return set(line) <= {"─", "-"}
