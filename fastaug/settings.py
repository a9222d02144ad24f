"""Settings as frozen dataclasses: each field carries its bounds and how it behaves on resume.

The help of a field is the docstring below it; the command line is generated from both (cli.py).
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastaug.errors import ConfigError, shown, suggest


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    free_on_resume: bool = False,
    free_on_ranks: bool = False,
) -> Any:
    """A field with bounds.

    free_on_resume: True if a resumed run may change it, because it decides where and how fast the
    training runs, not what it computes.
    free_on_ranks: True if the ranks of a run may differ in it, because it depends on the machine or
    decides what rank 0 shows.
    """
    bounds = {"at least": at_least, "at most": at_most, "below": below}
    given = {rule: bound for rule, bound in bounds.items() if bound is not None}
    free = {"free_on_resume": free_on_resume, "free_on_ranks": free_on_ranks}
    return field(default=default, metadata={"bounds": given, **free})


@dataclass(frozen=True)
class Settings:
    """Base of all configs: checks choices and bounds when an instance is made."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if get_origin(hint) is Literal:
                if not isinstance(value, str) or value not in get_args(hint):
                    choices = suggest(str(value) if isinstance(value, str) else "", get_args(hint))
                    raise ConfigError(f"{flag(name)} cannot be {shown(value)}: {choices}")
            elif rule := _wrong_kind(hint, value):
                raise ConfigError(f"{flag(name)} must be {rule}, got {shown(value)}")
        for own in fields(self):
            if bounds := own.metadata.get("bounds"):
                _check_bounds(own.name, getattr(self, own.name), bounds)


def _wrong_kind(hint: Any, value: Any) -> str:
    """The kind that a type hint asks for, if a value is not of it. Unions are their owners' to
    check."""
    if hint is bool:
        return "" if isinstance(value, bool) else "true or false"
    if hint is str:
        is_text = isinstance(value, str) and len(value) <= _LONGEST_TEXT and "\0" not in value
        return "" if is_text else f"text of at most {_LONGEST_TEXT:,} characters"
    if hint is int:
        return "" if _is_number(value, int) else "a whole number"
    if hint is float:
        return "" if _is_number(value, (int, float)) else "a number"
    if get_origin(hint) is tuple:
        if not isinstance(value, (tuple, list)) or len(value) > _LONGEST_TUPLE:
            return f"a list of at most {_LONGEST_TUPLE} values"
        rules = (_wrong_kind(get_args(hint)[0], own) for own in value)
        return next((f"a list, each {rule}" for rule in rules if rule), "")
    return ""


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Within 64 bits: larger integers overflow in torch, and as floats."""
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    return is_number and (isinstance(value, float) or -(2**63) <= value < 2**63)


_LONGEST_TUPLE = 1000
_LONGEST_TEXT = 4096  # the longest path that Linux opens


def _check_bounds(name: str, value: Any, bounds: Mapping[str, float]) -> None:
    if math.isfinite(value) and all(_RULES[rule](value, bound) for rule, bound in bounds.items()):
        return
    rules = ["finite"] if not math.isfinite(value) else []
    rules += [f"{rule} {bound}" for rule, bound in bounds.items()]
    raise ConfigError(f"{flag(name)} must be {' and '.join(rules)}, got {value}")


_RULES = {"at least": operator.ge, "at most": operator.le, "below": operator.lt}


def flag(name: str) -> str:
    """A field's name as it is typed: kl_weight -> --kl-weight."""
    return "--" + name.replace("_", "-")


def typed(value: Any) -> str:
    """A value as it is typed after its flag: (0.35, 1.0) -> 0.35 1.0."""
    if not isinstance(value, (list, tuple)):
        return str(value)
    return " ".join(
        ",".join(map(str, own)) if isinstance(own, (list, tuple)) else str(own) for own in value
    )


def plain(value: Any) -> Any:
    """A value with lists for its tuples, as JSON has it."""
    return [plain(own) for own in value] if isinstance(value, tuple) else value


def switch(name: str, on: bool) -> str:
    """The flag that turns a setting on or off: --nesterov, --no-nesterov."""
    return flag(name if on else f"no_{name}")


def fixed_settings(config: Settings) -> Iterator[tuple[str, Any]]:
    """(name, value) of the settings that a resumed run must keep."""
    for own in fields(config):
        if not own.metadata.get("free_on_resume"):
            yield own.name, getattr(config, own.name)


def field_help(kind: type) -> dict[str, str]:
    """The docstring below each field of a config class, on one line."""
    found: dict[str, str] = {}
    for own in reversed([own for own in kind.__mro__ if issubclass(own, Settings)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(own))).body
        assert isinstance(tree, ast.ClassDef)
        for field_node, text_node in pairwise(tree.body):
            if isinstance(field_node, ast.AnnAssign) and isinstance(text_node, ast.Expr):
                assert isinstance(field_node.target, ast.Name)
                found[field_node.target.id] = " ".join(ast.literal_eval(text_node.value).split())
    return found


@cache
def _hints(kind: type) -> tuple[tuple[str, Any], ...]:
    """The type hints of a config, looked up once: a sweep makes thousands of configs."""
    return tuple(get_type_hints(kind).items())
