"""Sweeps: grids that are run whole whatever happens to their workers, and what is chosen."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import optuna
import pytest
from color_folders import color_image
from optuna.trial import TrialState

from fastaug import sweep
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, FastaugError
from fastaug.experiments import sweep_worker as worker
from fastaug.experiments.sweep_options import SweepConfig
from fastaug.experiments.sweep_study import Stage, open_storage, put_back, shown
from fastaug.experiments.sweep_training import RunFailed, RunMistaken, train_flags
from fastaug.recipes import RECIPES, get_recipe
from fastaug.sweep import configure, split_flags
from fastaug.train import configure as configure_training

TINY = ("--size", "12", "--crop", "pad", "--batch-size", "8", "--workers", "0", "--tta", "2")
PYTHON = (sys.executable, "-m", "fastaug.sweep")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training and 12 test images of 12 px."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 60), ("test", 12)):
        labels = np.arange(count) % 3
        arrays[f"{split}_images"] = np.stack([color_image(label, rng, 12) for label in labels])
        arrays[f"{split}_labels"] = labels
    path = tmp_path_factory.mktemp("sweep") / "colors.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture
def flags(data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(*more: str) -> list[str]:
        out = ["--out", str(tmp_path / "sweep"), "--heartbeat", "1"]
        return ["shapes", "--data", str(data), *TINY, *out, *more]

    return make


def trials_of(database: Path) -> list[optuna.trial.FrozenTrial]:
    url = f"sqlite:///{database}"
    (name,) = optuna.get_all_study_names(url)
    return optuna.load_study(study_name=name, storage=url).get_trials()


class FakeTraining:
    """In the place of the training's process: writes what a run of these settings would."""

    def __init__(self, top1: Callable[[TrainConfig], float]) -> None:
        self.top1, self.runs = top1, Counter[str]()
        self.errors: list[Exception] = []

    def __call__(self, config: TrainConfig, folder: Path, **_: object) -> dict:
        self.runs[folder.name] += 1
        if self.errors:
            raise self.errors.pop(0)
        folder.mkdir(parents=True, exist_ok=True)
        top1 = self.top1(config)
        summary = {
            "finished": True,
            "measures": {"top1": top1 / 2, "tta_top1": top1 / 2, "invariance": 0.1},
            "validation": {"top1": top1},
        }
        (folder / "config.json").write_text(json.dumps(config.to_flat()))
        (folder / "summary.json").write_text(json.dumps(summary))
        return summary


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    training = FakeTraining(lambda config: 0.5)
    monkeypatch.setattr(worker, "run_training", training)
    return training


# --- flags ---


def test_flags_of_the_training_may_stand_anywhere() -> None:
    args = [
        "--data",
        "D",
        "shapes",
        "--lr",
        "1",
        "2",
        "--crop-area",
        "0.1",
        "1",
        "--dali",
        "--out=o",
    ]
    own, training = split_flags(args)
    assert own == ["shapes", "--lr", "1", "2", "--out=o"]
    assert training == ["--data", "D", "--crop-area", "0.1", "1", "--dali"]


def test_what_the_flags_say_is_said_to_every_run(flags: Callable[..., list[str]]) -> None:
    plan = configure(flags("--views", "1", "4", "--compile", "--seeds", "3", "--dry-run"))
    configs = list(plan.tuning.values())
    assert [(c.view.views, c.run.seed) for c in configs] == [
        (k, s) for k in (1, 4) for s in range(3)
    ]
    assert {
        (c.optim.batch_size, c.run.compile, c.view.size, c.data.validation) for c in configs
    } == {(8, True, 12, 0.1)}
    assert plan.images == 54
    # 54 // 8 and 54 // 2 steps an epoch, 12 epochs, 3 seeds, 8 views a step.
    assert plan.views(configs) == 3 * 12 * (6 + 27) * 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--views", "3"), "got 8, nearest: 6 or 9"),
        (("--lr", "0.1", "0.1"), "--lr has 0.1 more than once"),
        (("--lerning-rate", "1"), "--lerning-rate"),
        (("--average", "mean"), "mean"),
        (("--jobs", "-1"), "--jobs must be at least 0, got -1"),
        (("--validation", "0"), "--select-on validation needs a --validation above 0"),
        (("--seed", "3"), "--seed is not for a sweep: --seeds N runs the seeds 0 to N-1"),
        (("--recipe", "shapes"), "--recipe is not for a sweep: EXPERIMENT may be"),
        (("--lr", "--dry-run"), "--lr needs at least one value"),
        (("--validation", "0.99", "--batch-size", "16"), "3 training images are less than a step"),
        (("--train-images", "99"), "--train-images must be at most 54"),
    ],
)
def test_a_mistake_is_one_line(
    flags: Callable[..., list[str]], more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(FastaugError, match=message) as error:
        configure(flags(*more))
    assert "\n" not in str(error.value)


def test_no_experiment_is_one_line() -> None:
    for args in ([], ["--dry-run"]):
        with pytest.raises(ConfigError, match="no EXPERIMENT given; --list-experiments"):
            configure(args)


def test_a_sweep_without_data_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="cifar100-lambda: give --data PATH"):
        configure(["cifar100-lambda"])
    plan = configure(["cifar100-lambda", "--dry-run"])
    assert plan.images == 45_000
    with pytest.raises(ConfigError, match="no experiment or recipe 'cifar100-lamda'"):
        configure(["cifar100-lamda"])
    with pytest.raises(ConfigError, match="did you mean mini-shapes or shapes"):
        configure(["mini-shape"])


def test_the_paper_s_own_practice_holds_nothing_out(flags: Callable[..., list[str]]) -> None:
    plan = configure(flags("--select-on", "test"))
    assert plan.images == 60
    assert {config.data.validation for config in plan.tuning.values()} == {0.0}


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_is_told_its_settings(name: str, tmp_path: Path) -> None:
    """What train makes of the flags is the config that they came from."""
    wanted = get_recipe(name).replace(
        data=str(tmp_path),
        lr=2**-9.5,
        seed=3,
        crop_area=(0.1, 0.75),
        compile=True,
    )
    config, checkpoint = configure_training(train_flags(wanted, tmp_path / "run"))
    assert checkpoint is None
    assert config.replace(out="", resume="") == wanted


# --- what is chosen ---


def test_rate_and_epochs_are_chosen_for_each_setting_and_rerun(
    flags: Callable[..., list[str]], fake: FakeTraining, capsys: pytest.CaptureFixture
) -> None:
    best = {(1, 0.0): (0.1, 2), (2, 0.0): (0.2, 2), (2, 1.0): (0.1, 1)}

    def top1(config: TrainConfig) -> float:
        wanted = best[config.view.views, config.loss.kl_weight]
        return 0.8 if (config.optim.lr, config.optim.epochs) == wanted else 0.6

    fake.top1 = top1
    grid = (
        "--views",
        "1",
        "2",
        "--kl-weight",
        "0",
        "1",
        "--lr",
        "0.1",
        "0.2",
        "--epochs",
        "1",
        "2",
    )
    assert sweep.main(flags(*grid, "--seeds", "3", "--tune-seeds", "1")) == 0
    # 3 settings of 4 points with one seed, and the best of each with two more.
    assert len(fake.runs) == 3 * 4 + 3 * 2
    assert set(fake.runs.values()) == {1}
    out = Path(flags()[flags().index("--out") + 1])
    (family,) = json.loads((out / "selection.json").read_text())["families"]
    assert family["chosen_on"] == "validation"
    found = {(s["views"], s["kl_weight"]): (s["lr"], s["epochs"]) for s in family["settings"]}
    assert found == best
    assert {tuple(s["runs"]) for s in family["settings"]} == {("0", "1", "2")}
    said = " ".join(capsys.readouterr().out.split())
    assert "by top-1 on the 10% of the training images that were held out" in said
    assert "note: 1 of 3 settings have chosen the largest lr tried (K=2, average" in said
    assert "note: 2 of 3 settings have chosen the smallest lr tried (K=1; K=2" in said
    assert "note: 1 of 3 settings have chosen the fewest epochs tried" in said


def test_a_choice_on_the_test_images_is_said_to_be_one(
    flags: Callable[..., list[str]], fake: FakeTraining, capsys: pytest.CaptureFixture
) -> None:
    assert sweep.main(flags("--select-on", "test", "--lr", "0.1", "0.2")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "by top-1 on the test images themselves" in said
    assert "optimiztic" in said


def test_a_finished_sweep_and_a_larger_grid_train_nothing_twice(
    flags: Callable[..., list[str]], fake: FakeTraining
) -> None:
    assert sweep.main(flags("--lr", "0.1", "0.2")) == 0
    assert sweep.main(flags("--lr", "0.1", "0.2")) == 0
    assert sweep.main(flags("--lr", "0.1", "0.2", "0.3", "--seeds", "2")) == 0
    assert len(fake.runs) == 6
    assert set(fake.runs.values()) == {1}


def test_runs_of_other_settings_are_not_taken(
    flags: Callable[..., list[str]], fake: FakeTraining
) -> None:
    assert sweep.main(flags()) == 0
    with pytest.raises(ConfigError, match=r"was run with other settings, --model wrn-10-1"):
        sweep.main(flags("--model", "wrn-16-1"))
    other = Path(flags()[flags().index("--data") + 1]).with_name("others.npz")
    shutil.copy(other.with_name("colors.npz"), other)
    with pytest.raises(ConfigError, match=r"--data .*colors.npz \(here: .*others.npz\)"):
        sweep.main(flags(f"--data={other}"))


def test_a_storage_does_not_mix_other_settings(
    flags: Callable[..., list[str]], fake: FakeTraining, tmp_path: Path
) -> None:
    """Two sweeps in one storage, in folders of their own, whose runs have the same names."""
    storage = ("--storage", f"sqlite:///{tmp_path / 'shared.db'}")
    assert sweep.main(flags(*storage)) == 0
    assert sweep.main(flags(*storage, f"--out={tmp_path / 'other'}", "--model", "wrn-16-1")) == 0
    assert sum(fake.runs.values()) == 2
    (config,) = (tmp_path / "other/runs").glob("*/config.json")
    assert json.loads(config.read_text())["model"] == "wrn-16-1"


def test_an_unfinished_run_of_other_settings_is_refused(
    flags: Callable[..., list[str]], fake: FakeTraining, tmp_path: Path
) -> None:
    assert sweep.main(flags()) == 0
    (summary,) = (tmp_path / "sweep/runs").glob("*/summary.json")
    summary.unlink()
    with pytest.raises(ConfigError, match=r"was run with other settings, --model"):
        sweep.main(flags("--model", "wrn-16-1"))


def test_a_folder_that_cannot_be_made(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file: cannot be made \(File exists\)"):
        sweep.main(flags("--out", str(tmp_path / "file")))


def test_a_plan_trains_nothing(
    flags: Callable[..., list[str]],
    fake: FakeTraining,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:
    grid = ("--views", "1", "2", "--lr", "0.1", "0.2", "--seeds", "3", "--tune-seeds", "1")
    assert sweep.main(flags(*grid, "--dry-run")) == 0
    said = " ".join(capsys.readouterr().out.split())
    # K=1: 6 steps x 8 views x 12 epochs, K=2: 13 x 8 x 12, two rates each.
    assert f"4 runs, {2 * 12 * 8 * (6 + 13):,} views to choose rate and epochs" in said
    assert f"then 4 runs, at most {2 * 12 * 8 * (6 + 13):,} views" in said
    assert not fake.runs
    assert not (tmp_path / "sweep").exists()


def test_experiments_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert sweep.main(["--list-experiments"]) == 0
    assert "imagenet-nfnet-f0" in capsys.readouterr().out


# --- what goes wrong ---


def test_a_failed_run_is_tried_again_and_then_given_up(
    flags: Callable[..., list[str]], fake: FakeTraining, capsys: pytest.CaptureFixture
) -> None:
    fake.errors = [RunFailed("it broke")]
    assert sweep.main(flags("--lr", "0.1", "--retries", "1", "--jobs", "1")) == 0
    assert list(fake.runs.values()) == [2]
    fake.errors = [RunFailed("it broke"), RunFailed("again")]
    assert sweep.main(flags("--lr", "0.2", "--retries", "1", "--jobs", "1")) == 1
    said = capsys.readouterr().out
    assert "again; given up after 2 tries" in said
    assert "failed: shapes-k4-losses-kl1-lr0.2-e12-s0" in said
    # The same command gives it another chance.
    assert sweep.main(flags("--lr", "0.2", "--retries", "1", "--jobs", "1")) == 0
    assert fake.runs["shapes-k4-losses-kl1-lr0.2-e12-s0"] == 3


def test_a_run_that_diverges_is_not_tried_again_and_never_chosen(
    flags: Callable[..., list[str]], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """With the real training: at a rate of 1e9 the loss is no number after a step or two."""
    assert sweep.main(flags("--lr", "0.01", "1e9", "--epochs", "3", "--jobs", "1")) == 0
    said = capsys.readouterr().out
    assert "lr1e+09-e3-s0: diverged; its learning rate is too high" in said
    (family,) = json.loads((tmp_path / "sweep/selection.json").read_text())["families"]
    assert [setting["lr"] for setting in family["settings"]] == [0.01]
    output = (tmp_path / "sweep/runs/shapes-k4-losses-kl1-lr1e+09-e3-s0/output.txt").read_text()
    assert output.count("$ -m fastaug.train") == 1


def test_a_mistake_that_all_runs_share_ends_the_sweep(
    flags: Callable[..., list[str]], fake: FakeTraining
) -> None:
    fake.errors = [RunMistaken("no such kernel")]
    with pytest.raises(RunMistaken, match="no such kernel"):
        sweep.main(flags("--lr", "0.1", "0.2", "0.3", "--jobs", "1"))
    assert sum(fake.runs.values()) == 1


def test_what_the_training_said_is_the_error(data: Path, tmp_path: Path) -> None:
    """With the real training: an augmentation that the kernel does not know is refused at once."""
    flags = ["shapes", "--data", str(data), *TINY, "--out", str(tmp_path / "sweep")]
    with pytest.raises(RunMistaken, match="no kernel 'nativ'") as error:
        sweep.main([*flags, "--kernel", "nativ", "--jobs", "1"])
    assert "\n" not in str(error.value)
    (folder,) = (tmp_path / "sweep/runs").iterdir()
    assert (folder / "output.txt").read_text().startswith("$ -m fastaug.train --recipe shapes")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////nowhere/at/all.db", "cannot be opened"),
        ("what", "cannot be opened"),
        ("oracle7://a:secret@h/d", "cannot be opened"),
        ("mysql+pymysql://a:secret@h/d", "driver is not installed; pip install"),
    ],
)
def test_a_storage_that_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        open_storage(url, 1)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_workers_that_start_at_once_find_one_database(tmp_path: Path) -> None:
    """Each makes the tables if they are missing, in the middle of which the others come."""
    script = (
        "import sys, time\n"
        "from fastaug.experiments.sweep_study import Stage, open_storage\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "Stage(open_storage(sys.argv[1], 1), 's', ['a'], 1).standing()\n"
    )
    url = f"sqlite:///{tmp_path / 'x.db'}"
    command = [sys.executable, "-c", script, url, str(time.time() + 6)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()


def test_passwords_are_not_shown() -> None:
    assert shown("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"


class TestStage:
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
        url = f"sqlite:///{tmp_path / 'x.db'}"

        def make(heartbeat: int = 1) -> Stage:
            return Stage(open_storage(url, heartbeat), "s", ["a", "b", "c"], heartbeat)

        return make

    def test_every_run_is_done_once_by_any_number_of_workers(
        self, stage: Callable[..., Stage]
    ) -> None:
        done = Counter[str]()
        workers = [stage() for _ in range(3)]
        while workers[0].standing().can_start:
            for one in workers:
                if one.standing().can_start:
                    one.work_on_one(lambda name, trial: done.update([name]) or 0.5, retries=0)
        assert done == {"a": 1, "b": 1, "c": 1}
        assert workers[1].is_settled()

    def test_a_run_that_was_lost_without_a_heartbeat_is_noticed(
        self, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = stage()
        dead = stage().study.ask()  # a worker that died right after it took a run
        for _ in range(2):
            here.work_on_one(lambda name, trial: 0.5, retries=0)
        assert not here.standing().can_start
        here.notice_the_dead()
        assert not here.standing().can_start
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        here.notice_the_dead()
        assert here.standing().can_start
        names = []
        here.work_on_one(lambda name, trial: names.append(name) or 0.5, retries=0)
        assert here.is_settled()
        states = Counter(trial.state for trial in here.study.trials)
        assert states == {TrialState.COMPLETE: 3, TrialState.FAIL: 1}
        assert here.study.trials[dead.number].state == TrialState.FAIL

    def test_a_run_is_not_taken_twice(self, stage: Callable[..., Stage]) -> None:
        first, second = stage(), stage()
        ran = []

        def run(name: str, trial: optuna.Trial) -> float:
            if not ran:
                ran.append(name)
                # Meanwhile another worker is handed the same point of the grid.
                frozen = first.study.trials[trial.number]
                put_back(first.study, frozen, "interrupted")
                second.work_on_one(lambda other, _: ran.append(other) or 0.0, retries=0)
            return 0.5

        first.work_on_one(run, retries=0)
        assert len(ran) == 1
        states = Counter(trial.state for trial in first.study.trials)
        assert states == {TrialState.COMPLETE: 1, TrialState.PRUNED: 1}


# --- real processes ---


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.1)


def start(flags: list[str], log: Path) -> subprocess.Popen:
    with open(log, "wb") as out:
        return subprocess.Popen([*PYTHON, *flags], stdout=out, stderr=subprocess.STDOUT)


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    tasks = Path(f"/proc/{pid}/task")
    return [
        int(child)
        for task in (tasks.iterdir() if found.parent.exists() else ())
        for child in (task / "children").read_text().split()
    ]


def running_trainings(pid: int, out: Path) -> list[int]:
    """Trainings of a worker that have saved a step."""
    if not any(out.glob("runs/*/checkpoints/*.pt")):
        return []
    return children_of(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_loses_no_run(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    """Two workers on one storage, one of them killed in the middle of a run."""
    out = tmp_path / "sweep"
    grid = ("--views", "1", "2", "--lr", "0.01", "0.02", "--epochs", "40", "--kl-weight", "0")
    args = flags(*grid, "--jobs", "1", "--checkpoint-every", "5", "--eval-every", "40")
    first = start(args, tmp_path / "first.txt")
    wait_for(lambda: bool(running_trainings(first.pid, out)), 120, "a checkpoint")
    (training,) = children_of(first.pid)
    (begun,) = {file.parent.parent.name for file in out.glob("runs/*/checkpoints/*.pt")}
    second = start(args, tmp_path / "second.txt")
    first.send_signal(signal.SIGKILL)
    first.wait()
    # What it had started does not train on alone: it saves and ends.
    wait_for(lambda: not Path(f"/proc/{training}").exists(), 30, "the end of its training")
    assert second.wait(timeout=300) == 0, (tmp_path / "second.txt").read_text()
    assert len(list(out.glob("runs/*/summary.json"))) == 4
    trials = trials_of(out / "sweep.db")
    states = Counter(trial.state for trial in trials)
    assert states[TrialState.COMPLETE] == 4
    (lost,) = [trial for trial in trials if trial.state == TrialState.FAIL]
    assert lost.params["run"] == begun
    # The other one went on from its checkpoint, not from the beginning.
    output = (out / "runs" / begun / "output.txt").read_text()
    assert output.count("$ -m fastaug.train") == 2
    assert "resumed at step" in output
    assert json.loads((out / "selection.json").read_text())["failed"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_saves_and_the_same_command_goes_on(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    args = flags("--epochs", "40", "--views", "2", "--jobs", "1", "--eval-every", "40")
    args += ["--checkpoint-every", "5"]
    process = start(args, tmp_path / "first.txt")
    wait_for(lambda: bool(running_trainings(process.pid, out)), 120, "a checkpoint")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    said = (tmp_path / "first.txt").read_text()
    assert "the same command goes on with it" in said
    assert "Traceback" not in said
    (run,) = (out / "runs").iterdir()
    assert "is saved; continue with" in (run / "output.txt").read_text()
    process = start(args, tmp_path / "second.txt")
    assert process.wait(timeout=120) == 0
    assert "resumed at step" in (run / "output.txt").read_text()
    (ended, done) = sorted(trials_of(out / "sweep.db"), key=lambda trial: trial.number)
    assert (ended.state, done.state) == (TrialState.FAIL, TrialState.COMPLETE)


def test_runs_of_another_machine_are_fetched_from_the_storage(
    flags: Callable[..., list[str]], fake: FakeTraining, tmp_path: Path
) -> None:
    storage = ("--storage", f"sqlite:///{tmp_path / 'shared.db'}")
    there = flags("--lr", "0.1", "0.2", *storage)
    assert sweep.main(there) == 0
    here = [str(tmp_path / "elsewhere") if arg == str(tmp_path / "sweep") else arg for arg in there]
    assert sweep.main(here) == 0
    assert sum(fake.runs.values()) == 2
    assert len(list((tmp_path / "elsewhere/runs").glob("*/summary.json"))) == 2


def test_the_database_is_sqlite_in_the_folder(
    flags: Callable[..., list[str]], fake: FakeTraining, tmp_path: Path
) -> None:
    assert sweep.main(flags()) == 0
    with sqlite3.connect(tmp_path / "sweep/sweep.db") as connection:
        query = "select count(*) from trials where state = 'COMPLETE'"
        (count,) = connection.execute(query).fetchone()
    connection.close()
    assert count == 1


@pytest.mark.parametrize(
    ("gpus", "jobs", "ranks", "expected"),
    [
        (0, 2, 1, ["1", "1"]),
        (0, 1, 1, ["2"]),
        (4, 0, 1, ["0", "1", "2", "3"]),
        (4, 0, 2, ["0,1", "2,3"]),
        (4, 1, 3, ["0,1,2"]),
    ],
)
def test_each_run_has_its_part_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, jobs: int, ranks: int, expected: list[str]
) -> None:
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(worker, "core_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = SweepConfig("shapes", jobs=jobs, ranks=ranks)
    name = "CUDA_VISIBLE_DEVICES" if gpus else "OMP_NUM_THREADS"
    assert [slot.environment[name] for slot in worker.slots(options, "auto")] == expected


def test_more_runs_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="--jobs 3 x --ranks 2 are more than the 4 GPUs here"):
        worker.slots(SweepConfig("shapes", jobs=3, ranks=2), "auto")
