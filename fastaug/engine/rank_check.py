"""What all ranks of a run must have in common, compared when they start: code and settings.

Ranks that differ would train on without an error, because their gradients have the same shapes.
Each check raises the same ConfigError on every rank, and rank 0 prints it. The image sets are
compared in rank_data.py, the weights in rank_drift.py.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fastaug
from fastaug.config import TrainConfig, free_on_ranks, setting_owners
from fastaug.errors import few
from fastaug.kernels.contract import Kernel
from fastaug.runtime.arithmetic import arithmetic_in_force
from fastaug.runtime.distributed import Group
from fastaug.runtime.torchrun import join_process_group
from fastaug.settings import flag, typed
from fastaug.toolchain.build import digest, source_folder

_PACKAGES = ("torchvision", "timm", "numpy", "pillow", "nvidia-dali-cuda120")
"""Packages that decode images, define networks or compute, besides torch. Another version may
compute something else, so a difference is an error."""
_MISSING = "none"
"""Value of a fact that a rank does not have."""


def check_same(group: Group, facts: Mapping[str, str], advice: str) -> None:
    """Raise ConfigError on every rank if a fact differs between ranks. facts: name -> value."""
    if group.ranks == 1:
        return
    found = group.gather(dict(facts))
    differing = {
        name: values
        for name in dict.fromkeys(name for own in found for name in own)
        if len(set(values := [own.get(name, _MISSING) for own in found])) > 1
    }
    if not differing:
        return
    name, values = next(iter(differing.items()))
    more = f" (and {len(differing) - 1:,} more differences)" if len(differing) > 1 else ""
    text = f"{name} must be the same on all ranks: {describe_difference(values)}{more}; {advice}"
    raise group.common_error(text)


def describe_difference(values: Sequence[str]) -> str:
    """values: by rank -> 'rank 1 has x, rank 0 has y', the value of most ranks last."""
    usual = most_common(values)
    unusual = next(value for value in values if value != usual)
    return ", ".join(
        f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value in (unusual, usual)
        if (ranks := [rank for rank, own in enumerate(values) if own == value])
    )


def most_common(values: Sequence[Any]) -> Any:
    """The value that most ranks have; if there are several such values, that of the first rank."""
    return Counter(values).most_common(1)[0][0]


def name_ranks(ranks: Collection[int]) -> str:
    """'rank 1', 'ranks 1, 3'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {few(ranks, 8)}"


# --- code ---


@contextmanager
def join_ranks(args: Sequence[str]) -> Iterator[Group]:
    """join_process_group() for a command with these arguments; compares packages, the sources of
    fastaug and the arguments before anything else is exchanged, which depends on them."""
    with join_process_group() as group:
        if group.ranks > 1:
            check_same(group, _versions(), "install the same version on every machine")
            check_same(group, _source_digests(), "install the same fastaug on every machine")
            check_same(group, _flags(args), "give every rank the same command line")
        yield group


def _versions() -> dict[str, str]:
    # torch's own version has that of CUDA, too: 2.14.1+cu130.
    found = {"fastaug": fastaug.__version__, "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = _MISSING
    return found


def _source_digests() -> dict[str, str]:
    """Source file of fastaug, also those in cuda/ and pipelines/ -> digest."""
    package = Path(fastaug.__file__).parent
    files = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    # A link in a source tree, which rglob does not follow.
    files |= {f"pipelines/{file.name}": file for file in (package / "pipelines").glob("*.py")}
    kernels = (file for file in source_folder().iterdir() if file.suffix in (".h", ".cpp", ".cu"))
    files |= {f"cuda/{file.name}": file for file in kernels}
    return {
        f"fastaug/{name}": hashlib.blake2b(files[name].read_bytes(), digest_size=8).hexdigest()
        for name in sorted(files)
    }


def _flags(args: Sequence[str]) -> dict[str, str]:
    """Flag -> the words that follow it."""
    found: dict[str, list[str]] = {}
    words = found.setdefault("the command", [])
    for word in args:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            words = found.setdefault(name.replace("_", "-"), [])
            words += [value] if equals else []
        else:
            words.append(word)
    return {name: " ".join(words) or "no value" for name, words in found.items()}


# --- settings, and what follows from them on a machine ---


def check_settings(group: Group, config: TrainConfig) -> None:
    """Compare the settings: not every caller takes them from rank 0, as the commands do."""
    compared = [name for name in setting_owners() if name not in free_on_ranks()]
    settings = {flag(name): typed(config.get(name)) or "no value" for name in compared}
    check_same(group, settings, "give every rank the same settings")


def check_engines(
    group: Group, config: TrainConfig, kernel: Kernel, views_engine: str, device: torch.device
) -> None:
    """Compare what each rank has chosen on its machine."""
    if group.ranks > 1:
        facts = {
            "the precision": arithmetic_in_force(device, config.run.precision),
            "the loss kernel": _describe_kernel(kernel),
            "the views engine": views_engine,
        }
        advice = "name one that all machines have: --kernel, --views-engine"
        check_same(group, facts, advice)


def _describe_kernel(kernel: Kernel) -> str:
    """Its name, and a digest of the files that it is made from."""
    try:
        if hasattr(kernel, "sources"):
            return f"{kernel.name} ({digest(map(Path, kernel.sources()))})"
        return f"{kernel.name} ({digest([Path(inspect.getfile(type(kernel)))])})"
    except (OSError, TypeError):  # made from no file
        return kernel.name
