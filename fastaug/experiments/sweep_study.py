"""A stage of a sweep in Optuna's storage: which runs are done, running, waiting or failed.

Every point of the grid is one value of a single parameter, the run's name: at K=1 the objectives
coincide, so the runs are no product of their settings.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastaug.errors import ConfigError, first_line
from fastaug.experiments.sweep_training import RunFailed
from fastaug.runtime.signals import TrainingInterruptedError

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

GRACE = 4
"""Heartbeats that a worker may miss before it is taken for dead."""
LOST = 20
"""Times that a run may lose its worker. Machines that are taken away are no fault of the run, but
one that brings down every machine must end too."""
_TRIES, _PAUSE = 4, 0.5
_SQLITE_PATIENCE = 60.0
"""Seconds that a worker waits for others that write."""


def open_storage(url: str, heartbeat: int) -> RDBStorage:
    """The storage of an URL, or a ConfigError that says what is wrong with it."""
    try:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise ConfigError(
            f"fastaug.sweep needs Optuna ({error}): pip install 'fastaug[paper]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Heartbeats are "experimental" in Optuna since 2.9, years ago.
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    engine: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        engine = {"connect_args": {"timeout": _SQLITE_PATIENCE}}
    try:
        # Two workers that make the tables of a new database at once get in each other's way: what
        # the second one finds missing is there a moment later.
        for _ in range(_TRIES - 1):
            with suppress(SQLAlchemyError):
                return _storage(url, engine, heartbeat)
            time.sleep(_PAUSE)
        return _storage(url, engine, heartbeat)
    except ImportError as error:
        raise ConfigError(
            f"--storage {shown(url)}: the database's driver is not installed; pip install "
            "'psycopg[binary]' for postgresql://..., or PyMySQL for mysql+pymysql://..."
        ) from error
    except (ValueError, SQLAlchemyError) as error:
        raise ConfigError(
            f"--storage {shown(url)}: cannot be opened ({_hide(first_line(error), url)}); is the "
            "server running, or the folder there? It takes postgresql://USER:PASSWORD@HOST/"
            "DATABASE, mysql+pymysql://..., or sqlite:///FILE"
        ) from error


def _storage(url: str, engine: dict[str, Any], heartbeat: int) -> RDBStorage:
    from optuna.storages import RDBStorage

    return RDBStorage(
        url,
        engine_kwargs=engine,
        heartbeat_interval=heartbeat,
        grace_period=GRACE * heartbeat,
        heartbeat_stale_trial_callback=_put_back_lost,
    )


def shown(url: str) -> str:
    """An URL without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "(no URL)" if "@" in url else url


def _hide(text: str, url: str) -> str:
    return text.replace(url, shown(url))


@dataclass(frozen=True)
class Standing:
    """How far a stage is, in names of runs."""

    done: frozenset[str]
    running: frozenset[str]
    failed: frozenset[str]
    """For good: tried as often as is allowed."""
    can_start: bool
    """Whether there is one that nobody works on."""

    @property
    def settled(self) -> int:
        return len(self.done | self.failed)


class Stage:
    """The runs of some names, shared by all workers of the storage. One object for each thread."""

    def __init__(self, storage: RDBStorage, name: str, runs: Sequence[str], heartbeat: int) -> None:
        import optuna

        self._storage, self._runs = storage, sorted(runs)
        self._patience = GRACE * heartbeat
        self._first_seen: dict[int, float] = {}
        self.study = optuna.create_study(
            study_name=name,
            storage=storage,
            # The seed is the order of the runs, which all workers must agree on.
            sampler=optuna.samplers.GridSampler({"run": self._runs}, seed=0),
            direction="maximize",
            load_if_exists=True,
        )

    def standing(self) -> Standing:
        from optuna.trial import TrialState

        found: dict[TrialState, set[str]] = {state: set() for state in TrialState}
        for trial in self.study.get_trials(deepcopy=False):
            # One that was just taken may not have its name yet.
            found[trial.state].add(trial.params.get("run", f"trial {trial.number}"))
        done = found[TrialState.COMPLETE]
        running, waiting = found[TrialState.RUNNING] - done, found[TrialState.WAITING] - done
        failed = found[TrialState.FAIL] & set(self._runs) - done - running - waiting
        untouched = len(set(self._runs) - done - failed - running)
        nameless = len(running - set(self._runs))
        return Standing(
            frozenset(done),
            frozenset(running),
            frozenset(failed),
            can_start=bool(waiting) or untouched > nameless,
        )

    def is_settled(self) -> bool:
        return self.standing().settled == len(self._runs)

    def notice_the_dead(self) -> None:
        """Runs whose worker gives no sign of life any more wait for another one."""
        import optuna
        from optuna.trial import TrialState

        optuna.storages.fail_stale_trials(self.study)
        # A worker that dies before its first heartbeat is never stale to Optuna.
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            since = self._first_seen.setdefault(trial.number, time.monotonic())
            if "worker" not in trial.user_attrs and time.monotonic() - since > self._patience:
                # Not study.tell: GridSampler may want to stop an optimization that is none.
                with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another was first
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                    put_back(self.study, trial, "lost", most=LOST)

    def give_failed_another_chance(self) -> None:
        """What failed for good in an earlier call of the command may have been mended since."""
        failed = self.standing().failed
        for trial in self.study.get_trials(deepcopy=False):
            if trial.params.get("run") in failed:
                put_back(self.study, trial, "interrupted")
                failed -= {trial.params["run"]}

    def work_on_one(self, run: Callable[[str, optuna.Trial], float], retries: int) -> None:
        """Take a run that nobody works on. What `run` raises is raised again, unless it is a
        failure of this run alone."""
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
        except RunFailed as failure:
            assert taken is not None
            if not self._put_back(taken, "failed", retries):
                raise RunFailed(f"{failure}; given up after {retries + 1} tries") from failure
            raise
        except TrainingInterruptedError:
            assert taken is not None
            self._put_back(taken, "interrupted", None)
            raise

    def _put_back(self, trial: optuna.Trial, why: str, most: int | None) -> bool:
        return put_back(self.study, self.study.trials[trial.number], why, most)

    def _is_taken_twice(self, number: int, name: str) -> bool:
        """Two workers may draw the same point when it is among the last: the first one has it, or
        is done by now."""
        from optuna.trial import TrialState

        others = [t for t in self.study.get_trials(deepcopy=False) if t.params.get("run") == name]
        running = (t.number < number for t in others if t.state == TrialState.RUNNING)
        return any(running) or any(t.state == TrialState.COMPLETE for t in others)


def _put_back_lost(study: optuna.Study, trial: FrozenTrial) -> None:
    put_back(study, trial, "lost", most=LOST)


def put_back(study: optuna.Study, trial: FrozenTrial, why: str, most: int | None = None) -> bool:
    """A trial that has ended without a result waits anew, as the same point of the grid; False if
    that has been done too often for this reason."""
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
            system_attrs=trial.system_attrs,  # which point of the grid it is
        )
    )
    return True
