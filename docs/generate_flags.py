"""Write docs/reference/flags.md from the config dataclasses: one table for each component.

    python docs/generate_flags.py

make docs runs it; tests/unit/test_docs.py fails if the committed page is not what it writes.
"""

from __future__ import annotations

import inspect
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastaug.config import TrainConfig
from fastaug.normalization import NORMALIZATION, Normalization
from fastaug.settings import field_help, flag, typed

PAGE = Path(__file__).parent / "reference" / "flags.md"
TITLES = {
    "data": "Data",
    "view": "Views",
    "model": "Model",
    "loss": "Loss",
    "optim": "Optimizer and schedule",
    "eval": "Evaluation",
    "run": "Run",
}
HEAD = """\
# Flags

    python -m fastaug.train --help                       # every flag with its default
    python -m fastaug.train --recipe NAME --help         # with the values of a recipe

All flags of `fastaug.train`, one table for each component. `fastaug.preview` takes the same flags,
and `fastaug.sweep` passes them on to each of its runs. `python docs/generate_flags.py` writes this
page from the config dataclasses (`fastaug/*/config.py`).

"Resume" says whether `--resume` may be given another value. A setting marked "no" decides what is
computed: a resumed run keeps it, and another value is an error. The exception is `--epochs`, where
the schedule allows it ([extending a run](../guide/training.md#extending-a-run)).

Defaults are those of a run on your own data without `--recipe`, and of `TrainConfig()` in Python. A
recipe may change them; on the built-in data set the default recipe is `shapes`.
A switch (default: off) takes no value. `fastaug.train` has five more flags:

- `--dali` is short for `--loader dali`.
- `--config FILE` reads the defaults of all other flags from a run's `config.json` or a YAML file
  ([config files](../guide/training.md#config-files)).
- `--print-config` prints all settings as YAML and exits.
- `--dry-run` takes two steps, writes no run folder, and exits.
- `--list-recipes` lists the recipes and exits.
"""


def page() -> str:
    """The whole page as Markdown."""
    hints = get_type_hints(TrainConfig)
    parts = [HEAD]
    for component in fields(TrainConfig):
        kind = hints[component.name]
        parts.append(f"\n## {TITLES[component.name]}\n\n{inspect.getdoc(kind)}\n")
        parts.append("\n| flag | default | values | resume | meaning |\n|---|---|---|---|---|\n")
        parts += table_rows(kind)
    return "".join(parts)


def table_rows(kind: type) -> list[str]:
    hints, helps = get_type_hints(kind), field_help(kind)
    rows = []
    for own in fields(kind):
        cells = (
            f"`{flag(own.name)}`",
            default_of(own),
            values_of(hints[own.name], own.metadata.get("bounds", {})),
            "yes" if own.metadata.get("free_on_resume") else "no",
            helps[own.name].replace("|", "\\|"),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return rows


def default_of(own: Field[Any]) -> str:
    if isinstance(own.default, bool):
        return "on" if own.default else "off"
    return f"`{typed(own.default)}`" if own.default not in ("", ()) else "empty"


def values_of(hint: Any, bounds: dict[str, float]) -> str:
    """Choices of a Literal, or the type and its bounds."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if hint == Normalization:
        return f"{', '.join(f'`{name}`' for name in NORMALIZATION)}, or `MEAN STD`"
    if get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis:
        return "names" if get_args(hint)[0] is str else "numbers"
    if get_origin(hint) is tuple:
        return f"{len(get_args(hint))} numbers"
    names = {bool: "switch", int: "integer", float: "number", str: "text"}
    limits = " and ".join(f"{rule} {_number(bound)}" for rule, bound in bounds.items())
    return f"{names[hint]}, {limits}" if limits else names[hint]


def _number(bound: float) -> str:
    if bound == 2**32:
        return "2^32"
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
