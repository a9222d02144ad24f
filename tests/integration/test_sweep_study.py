"""A stage of a sweep in its storage, shared by several workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import optuna
import pytest
from optuna.trial import TrialState

from fastaug.errors import ConfigError
from fastaug.experiments.sweep_study import Stage, open_storage, requeue, without_password


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("sqlite:////nowhere/at/all.db", "unable to open"),
        ("what", "what"),
        ("oracle7://a:secret@h/d", "oracle7"),
        ("mysql+pymysql://a:secret@h/d", "pip install"),
    ],
)
def test_a_storage_that_cannot_be_opened(
    url: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(ConfigError, match=f"--storage .*{named}") as error:
        open_storage(url, 1)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_passwords_are_not_shown() -> None:
    assert without_password("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"


@pytest.fixture
def stage(tmp_path: Path) -> Callable[[], Stage]:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    return lambda: Stage(open_storage(url, 1), "s", ["a", "b", "c"], 1)


def test_workers_that_start_at_once_find_one_database(tmp_path: Path) -> None:
    """All make the tables at the same time. Without retries, five of six such databases fail."""
    for number in range(3):
        url, together = f"sqlite:///{tmp_path / f'{number}.db'}", Barrier(3)

        def start(_: int, url: str = url, together: Barrier = together) -> None:
            together.wait()
            Stage(open_storage(url, 1), "s", ["a"], 1).status()

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(start, range(3)))


def test_every_run_is_done_once_by_any_number_of_workers(stage: Callable[[], Stage]) -> None:
    done = Counter[str]()
    workers = [stage() for _ in range(3)]
    while workers[0].status().can_start:
        for one in workers:
            if one.status().can_start:
                one.run_one(lambda name, trial: done.update([name]) or 0.5, retries=0)
    assert done == {"a": 1, "b": 1, "c": 1}
    assert workers[1].is_settled()


def test_a_run_that_was_lost_without_a_heartbeat_is_requeued(
    stage: Callable[[], Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stage()
    dead = stage().study.ask()  # a worker that died right after it took a run
    for _ in range(2):
        here.run_one(lambda name, trial: 0.5, retries=0)
    assert not here.status().can_start
    here.requeue_lost()
    assert not here.status().can_start
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    here.requeue_lost()
    assert here.status().can_start
    here.run_one(lambda name, trial: 0.5, retries=0)
    assert here.is_settled()
    states = Counter(trial.state for trial in here.study.trials)
    assert states == {TrialState.COMPLETE: 3, TrialState.FAIL: 1}
    assert here.study.trials[dead.number].state == TrialState.FAIL


def test_a_run_is_not_taken_twice(stage: Callable[[], Stage]) -> None:
    first, second = stage(), stage()
    ran = []

    def run(name: str, trial: optuna.Trial) -> float:
        if not ran:
            ran.append(name)
            # Meanwhile another worker is handed the same point of the grid.
            requeue(first.study, first.study.trials[trial.number], "interrupted")
            second.run_one(lambda other, _: ran.append(other) or 0.0, retries=0)
        return 0.5

    first.run_one(run, retries=0)
    assert len(ran) == 1
    states = Counter(trial.state for trial in first.study.trials)
    assert states == {TrialState.COMPLETE: 1, TrialState.PRUNED: 1}
