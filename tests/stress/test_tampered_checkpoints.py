"""Checkpoints with one wrong field and a right checksum: a result or one line, in time and memory.

A sample of 3,600 cases for each command; all of them: python tests/helpers/tampered_checkpoints.py
"""

from __future__ import annotations

import pytest
from tampered_checkpoints import COMMANDS, Scene, Tampered, cases, outcome

EVERY = {"evaluate": 127, "resume": 101, "export": 131, "weights": 251}
"""Primes: the samples meet all fields and all values, in other combinations for each command."""
PRECISE = [
    Tampered(("config", "model"), "wrn-1000000-1", "wrn-1000000-1"),
    Tampered(("config", "model"), "wrn-9994-1", "wrn-9994-1"),
    Tampered(("config", "model"), "wrn-10-9999", "wrn-10-9999"),
    Tampered(("config", "model"), "nf_resnet101", "nf_resnet101"),
    Tampered(("config", "size"), "10**9", 10**9),
    Tampered(("config", "tta"), "10**9", 10**9),
    Tampered(("loader", "position"), "10**9", 10**9),
    Tampered(("step",), "10**9", 10**9),
    Tampered(("optimizer", "param_groups", 0, "momentum"), "0.5", 0.5),
    Tampered(("optimizer", "param_groups", 0, "fused"), "text", "x"),
    Tampered(("optimizer", "state", 0, "momentum_buffer"), "number", 1.0),
]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene.build(tmp_path_factory.mktemp("scene"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_or_one_line(scene: Scene, name: str) -> None:
    command = COMMANDS[name]
    assert outcome(command, scene.write(scene.state)).kind == "result"
    tried = [*PRECISE, *list(cases(scene.state))[:: EVERY[name]]]
    found = {str(c): outcome(command, scene.write(c.applied(scene.state))) for c in tried}
    assert {case: str(own) for case, own in found.items() if not own.is_good} == {}
    assert sum(own.kind == "error" for own in found.values()) > len(tried) / 8


def test_wrong_places_and_weights_are_not_resumed(scene: Scene) -> None:
    """None of these changes the kind of a value."""
    for case in PRECISE:
        if case.path != ("config", "tta"):  # a setting, which is bounded
            found = outcome(COMMANDS["resume"], scene.write(case.applied(scene.state)))
            assert found.kind == "error", f"{case}: {found}"
