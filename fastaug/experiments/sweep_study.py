"""A stage of a sweep in Optuna's storage: which runs are done, running, waiting or failed.

Every point of the grid is one value of a single Optuna parameter, the run's name. At K=1 the
objectives coincide, so the runs are not a product of their settings.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastaug.errors import ConfigError, first_line
from fastaug.experiments.training_process import RunFailedError
from fastaug.runtime.signals import TrainingInterruptedError

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

MISSED_HEARTBEATS = 4
"""Heartbeats that a worker may miss before it counts as lost."""
MAX_LOST = 20
"""Times that a run may lose its worker. A preempted machine is not the run's fault, but a run that
crashes every machine must end."""
_OPEN_TRIES, _OPEN_PAUSE = 4, 0.5
_SQLITE_TIMEOUT = 60.0


def open_storage(url: str, heartbeat: int) -> RDBStorage:
    """The storage at a URL; ConfigError if it cannot be opened."""
    try:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise ConfigError(
            f"fastaug.sweep needs Optuna ({error}): pip install 'fastaug[paper]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Heartbeats have been "experimental" in Optuna since 2.9, years ago.
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        # Two workers that create the tables of a new database at the same time get errors, and
        # succeed a moment later.
        for _ in range(_OPEN_TRIES - 1):
            with suppress(SQLAlchemyError):
                return _rdb_storage(url, heartbeat)
            time.sleep(_OPEN_PAUSE)
        return _rdb_storage(url, heartbeat)
    except ImportError as error:
        raise ConfigError(
            f"--storage {without_password(url)}: the database driver is not installed; "
            "pip install 'psycopg[binary]' for postgresql://..., or PyMySQL for mysql+pymysql://..."
        ) from error
    except (ValueError, SQLAlchemyError) as error:
        reason = first_line(error).replace(url, without_password(url))
        raise ConfigError(
            f"--storage {without_password(url)}: cannot be opened ({reason}); check that "
            "the server runs or the folder exists; allowed: sqlite:///FILE, mysql+pymysql://..., "
            "postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from error


def _rdb_storage(url: str, heartbeat: int) -> RDBStorage:
    from optuna.storages import RDBStorage

    engine: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        engine = {"connect_args": {"timeout": _SQLITE_TIMEOUT}}
    return RDBStorage(
        url,
        engine_kwargs=engine,
        heartbeat_interval=heartbeat,
        grace_period=MISSED_HEARTBEATS * heartbeat,
        heartbeat_stale_trial_callback=_requeue_lost,
    )


def without_password(url: str) -> str:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "(no URL)" if "@" in url else url


@dataclass(frozen=True)
class StageStatus:
    """Progress of a stage, as names of runs."""

    done: frozenset[str]
    running: frozenset[str]
    failed: frozenset[str]
    """Runs without retries left."""
    can_start: bool
    """True if there is a run that no worker has started."""

    @property
    def settled(self) -> int:
        return len(self.done | self.failed)


class Stage:
    """The runs of a stage, shared by all workers through the storage. Each thread has its own."""

    def __init__(self, storage: RDBStorage, name: str, runs: Sequence[str], heartbeat: int) -> None:
        import optuna

        self._storage, self._runs = storage, sorted(runs)
        self._patience = MISSED_HEARTBEATS * heartbeat
        self._first_seen: dict[int, float] = {}
        self.study = optuna.create_study(
            study_name=name,
            storage=storage,
            # With the same seed all workers have the same order of runs.
            sampler=optuna.samplers.GridSampler({"run": self._runs}, seed=0),
            direction="maximize",
            load_if_exists=True,
        )

    def status(self) -> StageStatus:
        from optuna.trial import TrialState

        found: dict[TrialState, set[str]] = {state: set() for state in TrialState}
        for trial in self.study.get_trials(deepcopy=False):
            # A trial that was just started may not have its name yet.
            found[trial.state].add(trial.params.get("run", f"trial {trial.number}"))
        done = found[TrialState.COMPLETE]
        running, waiting = found[TrialState.RUNNING] - done, found[TrialState.WAITING] - done
        failed = found[TrialState.FAIL] & set(self._runs) - done - running - waiting
        untouched = len(set(self._runs) - done - failed - running)
        nameless = len(running - set(self._runs))
        return StageStatus(
            frozenset(done),
            frozenset(running),
            frozenset(failed),
            can_start=bool(waiting) or untouched > nameless,
        )

    def is_settled(self) -> bool:
        return self.status().settled == len(self._runs)

    def results(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, attributes) of the runs that have finished on any machine."""
        for trial in self.study.get_trials(deepcopy=False):
            if trial.params.get("run") in self._runs and "summary" in trial.user_attrs:
                yield trial.params["run"], trial.user_attrs

    def requeue_lost(self) -> None:
        """Queue runs of lost workers again."""
        import optuna
        from optuna.trial import TrialState

        optuna.storages.fail_stale_trials(self.study)
        # Optuna does not notice a worker that is lost before its first heartbeat.
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            since = self._first_seen.setdefault(trial.number, time.monotonic())
            if "worker" not in trial.user_attrs and time.monotonic() - since > self._patience:
                # study.tell would fail: GridSampler may try to stop an optimization that has ended.
                with suppress(
                    optuna.exceptions.UpdateFinishedTrialError
                ):  # another worker was first
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                    _requeue_lost(self.study, trial)

    def requeue_failed(self) -> None:
        """Queue failed runs again: the cause may have been fixed."""
        failed = self.status().failed
        for trial in self.study.get_trials(deepcopy=False):
            if trial.params.get("run") in failed:
                requeue(self.study, trial, "interrupted")
                failed -= {trial.params["run"]}

    def run_one(self, run: Callable[[str, optuna.Trial], float], retries: int) -> None:
        """Call `run` for a run that no worker has started. Errors are passed on; after a
        RunFailedError the run is queued for a retry."""
        import optuna

        taken: optuna.Trial | None = None

        def objective(trial: optuna.Trial) -> float:
            nonlocal taken
            taken = trial
            name = trial.suggest_categorical("run", self._runs)
            assert isinstance(name, str)
            if self._is_taken_twice(trial.number, name):
                raise optuna.TrialPruned
            return run(name, trial)

        try:
            self.study.optimize(objective, n_trials=1)
        except RunFailedError as failure:
            assert taken is not None
            if not requeue(self.study, self.study.trials[taken.number], "failed", retries):
                tries = f"{retries + 1} {'try' if retries == 0 else 'tries'}"
                raise RunFailedError(f"{failure}; giving up after {tries}") from failure
            raise
        except TrainingInterruptedError:
            assert taken is not None
            requeue(self.study, self.study.trials[taken.number], "interrupted")
            raise

    def _is_taken_twice(self, number: int, name: str) -> bool:
        """Two workers may draw the same point when few are left; the first one keeps it."""
        from optuna.trial import TrialState

        others = [t for t in self.study.get_trials(deepcopy=False) if t.params.get("run") == name]
        running = (t.number < number for t in others if t.state == TrialState.RUNNING)
        return any(running) or any(t.state == TrialState.COMPLETE for t in others)


def _requeue_lost(study: optuna.Study, trial: FrozenTrial) -> None:
    requeue(study, trial, "lost", most=MAX_LOST)


def requeue(study: optuna.Study, trial: FrozenTrial, why: str, most: int | None = None) -> bool:
    """Queue an ended trial again, as the same point of the grid; False if it was queued `most`
    times for this reason."""
    import optuna

    times = trial.user_attrs.get(why, 0) + 1
    if most is not None and times > most:
        return False
    kept = {reason: n for reason, n in trial.user_attrs.items() if reason in ("lost", "failed")}
    study.add_trial(
        optuna.create_trial(
            state=optuna.trial.TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={**kept, why: times},
            system_attrs=trial.system_attrs,  # holds the point of the grid
        )
    )
    return True
