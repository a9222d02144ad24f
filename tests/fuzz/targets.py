"""All fuzz targets by name."""

from __future__ import annotations

from pathlib import Path

from data_targets import DATA_TARGETS
from run_targets import RUN_TARGETS
from target import Target, scratch_folder


def together(targets: list[Target]) -> Target:
    """Several targets as one, for a short run: the first byte of an input says which one it is."""

    def read(content: bytes, folder: Path) -> None:
        if content:
            targets[content[0] % len(targets)].read(content[1:], folder)

    def seeds(_: Path) -> list[bytes]:
        found = []
        for number, target in enumerate(targets):
            with scratch_folder() as folder:
                found += [bytes([number]) + seed for seed in target.seeds(folder)]
        return found

    return Target(read, seeds, 1 + max(target.max_len for target in targets))


TARGETS: dict[str, Target] = DATA_TARGETS | RUN_TARGETS
TOGETHER: dict[str, Target] = {
    "fast-together": together([target for target in TARGETS.values() if not target.slow]),
    "slow-together": together([target for target in TARGETS.values() if target.slow]),
}
"""Targets apart, so that the slow ones do not take the time of the others."""
