"""The order of writes of a run, checked at every crash point.

First as a model, then by the operations of the real code: each of its prefixes, with every
reordering that fsync allows, is written into a folder and resumed by the real code.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from checkpoint_model import (
    crash_states,
    protocol,
    violations_of_model,
    write_tree,
)
from file_operations import Operation, kill_before, kill_points, record, why_no_strace
from safetensors.torch import load_file
from saving_run import CONFIG, STEPS, records_until
from training import metrics

from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.folder import RunFolder
from fastaug.runs.resume import newest_checkpoint

needs_strace = pytest.mark.skipif(bool(why_no_strace()), reason=why_no_strace())


def violated(operations: Sequence[Operation]) -> set[str]:
    return {what for _, tree in crash_states(operations) for what in violations_of_model(tree)}


class TestTheModel:
    def test_nothing_is_lost_at_any_point(self) -> None:
        assert violated(protocol(4)) == set()

    def test_each_fsync_is_needed(self) -> None:
        """But for those of the reports, and of one of the two names of a checkpoint."""
        operations = protocol(4)
        first_save = operations.index(Operation("create", "reported-1"))
        spare = set[int]()
        for index, own in enumerate(operations):
            without = [*operations[:index], *operations[index + 1 :]]
            if own.kind == "fsync" and not violated(without):
                spare.add(index)
        named = {operations[index].path for index in spare}
        assert named == {".", "run", "run/kept", "run/last.tmp"}
        for index in spare:
            if operations[index].path in (".", "run"):
                assert index > first_save
                assert operations[index - 1].target in ("", "run/last")

    def test_one_of_the_two_names_is_needed(self) -> None:
        without = [o for o in protocol(4) if (o.kind, o.path) != ("fsync", "run/kept")]
        assert violated(without) == set()
        last = max(i for i, own in enumerate(without) if (own.kind, own.path) == ("fsync", "run"))
        assert violated([*without[:last], *without[last + 1 :]])

    @pytest.mark.parametrize("first", ["run/best", "run/metrics"])
    def test_the_order_is_needed(self, first: str) -> None:
        """best and the records come before the checkpoint that counts them."""
        operations = protocol(2)
        moved = [o for o in operations if first in (o.path.removesuffix(".tmp"), o.target)]
        moved = [o for o in moved if o.kind != "create" or first == "run/best"]
        rest = [o for o in operations if o not in moved]
        assert violated([*rest, *moved])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    folder = tmp_path_factory.mktemp("recorded")
    return record(saving(folder), folder)


def saving(folder: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).parents[1] / "helpers/saving_run.py"), str(folder)]


def check_resumes(folder: Path) -> int:
    """Resume a run in a folder as a crash has left it; returns the step that it continues from."""
    reported = max((int(p.name.partition("-")[2]) for p in folder.glob("reported-*")), default=0)
    run, said = folder / "run", list[str]()
    newest = newest_checkpoint(run, said.append) if run.is_dir() else None
    assert said == [], "a file under its final name was half-written"
    if newest is None:
        assert reported == 0
        return 0
    state = load_checkpoint(newest)
    assert state["step"] >= reported
    assert all((own == state["step"]).all() for own in state["model"].values())
    if state["best_top1"] >= 0:
        best = load_checkpoint(run / "best.pt")
        assert best["best_top1"] >= state["best_top1"]
    if (run / "best.safetensors").exists():
        load_file(run / "best.safetensors")
    config = CONFIG.replace(out=str(run))
    epochs = state["evaluated_epochs"]
    resumed = RunFolder(config, say=said.append, resume_step=state["step"], evaluated_epochs=epochs)
    resumed.open().close()
    found = [(own["kind"], own["step"]) for own in metrics(run)]
    assert found == records_until(state["step"])
    assert not list(run.rglob(".*.tmp*")), "left by the process that was killed"
    return state["step"]


def crashes(operations: Sequence[Operation], folder: Path) -> Iterator[tuple[str, int]]:
    """(what went wrong, or "", and the step to continue from) for each different state that a crash
    may leave."""
    known = set[frozenset[tuple[str, bytes | None]]]()
    for done, tree in crash_states(operations):
        if (content := frozenset(tree.items())) in known:
            continue
        known.add(content)
        left = folder / str(len(known))
        write_tree(tree, left)
        try:
            yield "", check_resumes(left)
        except Exception as error:
            before = operations[done - 1] if done else "the start"
            yield f"after {done} ({before}): {type(error).__name__}: {error}", -1
        shutil.rmtree(left)


@needs_strace
class TestTheRealOperations:
    @pytest.fixture(autouse=True)
    def without_waiting_for_disks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", lambda _descriptor: None)

    def test_every_prefix_and_reordering(self, recorded: list[Operation], tmp_path: Path) -> None:
        kinds = {own.kind for own in recorded}
        assert kinds >= {"create", "write", "fsync", "rename", "link", "unlink", "mkdir"}
        found = list(crashes(recorded, tmp_path))
        assert [failure for failure, _ in found if failure] == []
        assert {step for _, step in found} == set(range(STEPS + 1))
        assert len(found) > len(recorded)
        print(f"{len(recorded)} operations, {len(found)} different states after a crash")

    @pytest.mark.parametrize("path", ["run/metrics.jsonl", ".", "run/.best.pt"])
    def test_a_missing_fsync_is_found(
        self, recorded: list[Operation], tmp_path: Path, path: str
    ) -> None:
        without = [o for o in recorded if o.kind != "fsync" or not _is_of(o.path, path)]
        assert len(without) < len(recorded)
        assert any(failure for failure, _ in crashes(without, tmp_path))


def _is_of(path: str, named: str) -> bool:
    return path == named or path.startswith(f"{named}.")


@needs_strace
def test_killed_before_an_operation(recorded: list[Operation], tmp_path: Path) -> None:
    """For real; all of them: tests/stress/test_chaos.py."""
    renames = [own for own in kill_points(recorded) if own.kind == "rename"]
    for number in (1, len(renames) // 2, len(renames) - 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert kill_before(saving(folder), renames[number])
        check_resumes(folder)
