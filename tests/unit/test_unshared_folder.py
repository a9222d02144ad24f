"""The warning about a run folder that not all machines see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastaug.engine.preflight import warning_if_unshared
from fastaug.runtime.distributed import Group


class TwoMachines(Group):
    """Rank 0, and a rank on host-b."""

    other_sees_it = True

    def gather(self, value: Any) -> list[Any]:
        return [value, ("host-b", self.other_sees_it)]


@pytest.mark.parametrize(("seen", "nodes"), [(True, 2), (False, 2), (False, 1)])
def test_a_machine_that_does_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool, nodes: int
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setattr(TwoMachines, "other_sees_it", seen)
    (tmp_path / "config.json").touch()
    warning = warning_if_unshared(tmp_path, TwoMachines(rank=0, ranks=2))
    assert bool(warning) == (not seen and nodes == 2)
    if warning:
        assert "host-b" in warning
        assert str(tmp_path) in warning
