"""Sweeps: flags and plans, what is chosen, and what happens to runs that fail. No training runs."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from color_folders import write_folder
from expect import raises
from optuna.trial import TrialState
from tiny_sweep import TINY, trials_of, write_colors

from fastaug import report, sweep
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, FastaugError
from fastaug.experiments import sweep_worker as worker
from fastaug.experiments.grids import EXPERIMENTS, Experiment, Grid
from fastaug.experiments.sweep_config import SweepConfig, split_flags
from fastaug.experiments.training_process import (
    RunDivergedError,
    RunFailedError,
    RunRejectedError,
    train_flags,
)
from fastaug.recipes import RECIPES, get_recipe
from fastaug.runtime.signals import TrainingInterruptedError
from fastaug.sweep import configure
from fastaug.train import configure as configure_training


class FakeSweep:
    """A sweep whose trainings only write what a run of their settings would."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.out = folder / "sweep"
        self._flags = ["shapes", "--data", str(data), *TINY, "--out", str(self.out)]
        self.top1: Callable[[TrainConfig], float] = lambda config: 0.5
        self.runs = Counter[str]()
        self.errors: list[Exception] = []
        self.ctrl_c = False

    def flags(self, more: str = "") -> list[str]:
        return [*self._flags, "--heartbeat", "1", *more.split()]

    def main(self, more: str = "") -> int:
        return sweep.main(self.flags(more))

    def settings(self) -> list[dict]:
        (family,) = json.loads((self.out / "selection.json").read_text())["families"]
        return family["settings"]

    def train(
        self, config: TrainConfig, folder: Path, *, signum: Callable[[], int], **_: object
    ) -> dict:
        self.runs[folder.name] += 1
        if self.ctrl_c:
            signal.raise_signal(signal.SIGINT)
            while not signum():
                time.sleep(0.01)
            raise TrainingInterruptedError(signum())
        if self.errors:
            raise self.errors.pop(0)
        folder.mkdir(parents=True, exist_ok=True)
        top1 = self.top1(config)
        measures = {"top1": top1 / 2, "tta_top1": top1 / 2, "invariance": 0.1}
        summary = {"finished": True, "measures": measures, "validation": {"top1": top1}}
        (folder / "config.json").write_text(json.dumps(config.to_flat()))
        (folder / "summary.json").write_text(json.dumps(summary))
        return summary


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_colors(tmp_path_factory.mktemp("data") / "colors.npz")


@pytest.fixture
def fake(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSweep:
    made = FakeSweep(tmp_path, data)
    monkeypatch.setattr(worker, "run_training", made.train)
    monkeypatch.setattr(worker, "_POLL_SECONDS", 0.02)
    return made


# --- flags ---


def test_flags_of_the_training_may_stand_anywhere() -> None:
    words = "--normalize 0.5 0.5 shapes --data D --lr 1 2 --crop-area 0.1 1 --dali --out=o"
    own, training = split_flags(words.split())
    assert own == ["shapes", "--lr", "1", "2", "--out=o"]
    assert training == [
        "--normalize",
        "0.5",
        "0.5",
        "--data",
        "D",
        "--crop-area",
        "0.1",
        "1",
        "--dali",
    ]
    words = "--normalize cifar shapes --no-nesterov"
    assert split_flags(words.split()) == (["shapes"], ["--normalize", "cifar", "--no-nesterov"])


def test_flags_apply_to_every_run(fake: FakeSweep) -> None:
    plan = configure(fake.flags("--views 1 4 --compile --seeds 3 --dry-run"))
    configs = list(plan.tuning.values())
    varied = [(c.view.views, c.run.seed) for c in configs]
    assert varied == [(k, s) for k in (1, 4) for s in range(3)]
    shared = {"batch_size": 8, "compile": "default", "size": 12, "validation": 0.1}
    assert all({name: c.get(name) for name in shared} == shared for c in configs)
    assert plan.images == 54
    # 54 // 8 and 54 // 2 steps an epoch, 8 epochs, 3 seeds, 8 views a step.
    assert plan.views(configs) == 3 * 8 * (6 + 27) * 8


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--views 3", "6 or 9"),
        ("--lr 0.1 0.1", "--lr has 0.1"),
        ("--lerning-rate 1", "--lerning-rate"),
        ("--average mean", "mean"),
        ("--jobs -1", "--jobs .* -1"),
        ("--validation 0", "--select-on validation .* --validation"),
        ("--seed 3", "--seed .* --seeds N"),
        ("--recipe shapes", "--recipe .* EXPERIMENT"),
        ("--lr --dry-run", "--lr "),
        ("--validation 0.99 --batch-size 16", "3 training images .*--batch-size 16"),
        ("--train-images 99", "--train-images .* 54"),
    ],
)
def test_a_mistake_is_one_line(fake: FakeSweep, more: str, named: str) -> None:
    with pytest.raises(FastaugError, match=named) as error:
        configure(fake.flags(more))
    assert "\n" not in str(error.value)


def test_held_out_images_cannot_both_choose_and_measure(fake: FakeSweep, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", {"train": 20})
    with raises(ConfigError, "--select-on validation", str(root)):
        configure(fake.flags(f"--data {root}"))
    assert configure(fake.flags(f"--data {root} --select-on test")).images == 54


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "EXPERIMENT"),
        (["--dry-run"], "EXPERIMENT"),
        (["cifar100-lambda"], "--data PATH"),
        (["cifar100-lamda"], "cifar100-lambda"),
        (["mini-shape"], "mini-shapes or shapes"),
    ],
)
def test_an_experiment_and_its_data_are_needed(args: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        configure(args)
    assert "\n" not in str(error.value)


def test_a_dry_run_needs_no_data(capsys: pytest.CaptureFixture) -> None:
    assert sweep.main(["cifar100-lambda", "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "180 runs" in printed  # 6 weights, 6 rates, 5 seeds
    assert "45,000 training images" in printed


def test_the_paper_s_own_practice_holds_nothing_out(fake: FakeSweep) -> None:
    plan = configure(fake.flags("--select-on test"))
    assert plan.images == 60
    assert {config.data.validation for config in plan.tuning.values()} == {0.0}


@pytest.mark.parametrize("name", RECIPES)
def test_the_flags_of_a_run_give_its_config(name: str, tmp_path: Path) -> None:
    wanted = get_recipe(name).replace(
        data=str(tmp_path),
        lr=2**-9.5,
        seed=3,
        crop_area=(0.1, 0.75),
        normalize=(0.5, (0.25, 2**-9.5, 1)),
        compile="default",
        nesterov=not get_recipe(name).optim.nesterov,
    )
    config, checkpoint = configure_training(train_flags(wanted, tmp_path / "run"))
    assert checkpoint is None
    assert config.replace(out="", resume="") == wanted


def test_a_plan_trains_nothing(fake: FakeSweep, capsys: pytest.CaptureFixture) -> None:
    assert fake.main("--views 1 2 --lr 0.1 0.2 --seeds 3 --tune-seeds 1 --dry-run") == 0
    printed = " ".join(capsys.readouterr().out.split())
    # K=1: 6 steps x 8 views x 8 epochs, K=2: 13 x 8 x 8, two rates each.
    assert f"4 runs, {2 * 8 * 8 * (6 + 13):,} views to choose" in printed
    assert f"then 4 runs, at most {2 * 8 * 8 * (6 + 13):,} views" in printed
    assert not fake.runs
    assert not fake.out.exists()


def test_experiments_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert sweep.main(["--list-experiments"]) == 0
    assert "imagenet-nfnet-f0" in capsys.readouterr().out


# --- choosing ---


def test_rate_and_epochs_are_chosen_for_each_setting_and_rerun(
    fake: FakeSweep, capsys: pytest.CaptureFixture
) -> None:
    best = {(1, 0.0): (0.1, 2), (2, 0.0): (0.2, 2), (2, 1.0): (0.1, 1)}

    def top1(config: TrainConfig) -> float:
        wanted = best[config.view.views, config.loss.kl_weight]
        return 0.8 if (config.optim.lr, config.optim.epochs) == wanted else 0.6

    fake.top1 = top1
    grid = "--views 1 2 --kl-weight 0 1 --lr 0.1 0.2 --epochs 1 2"
    assert fake.main(f"{grid} --seeds 3 --tune-seeds 1") == 0
    # 3 settings of 4 points with one seed, and the best of each with two more.
    assert len(fake.runs) == 3 * 4 + 3 * 2
    assert set(fake.runs.values()) == {1}
    settings = fake.settings()
    assert {(s["views"], s["kl_weight"]): (s["lr"], s["epochs"]) for s in settings} == best
    assert {tuple(s["runs"]) for s in settings} == {("0", "1", "2")}
    printed = " ".join(capsys.readouterr().out.split())
    assert "10% of the training images" in printed
    assert "1 of 3 settings are best with the largest lr tried (K=2, average" in printed
    assert "2 of 3 settings are best with the smallest lr tried (K=1; K=2" in printed
    assert "1 of 3 settings are best with the fewest epochs tried" in printed


def test_a_grid_may_have_fewer_seeds(fake: FakeSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.top1 = lambda config: config.optim.lr
    grids = (
        Grid("shapes", (1,), (), (0.0,), (0.1, 0.2), (1,)),
        Grid("shapes", (2,), (), (0.0,), (0.1, 0.2), (1,), most_seeds=3),
        Grid("shapes", (4,), (), (0.0,), (0.1, 0.2), (1,), most_seeds=1),
    )
    experiment = Experiment("fewer", "", grids, seeds=5, tune_seeds=2)
    monkeypatch.setitem(EXPERIMENTS, "fewer", experiment)
    assert sweep.main(["fewer", *fake.flags()[1:]]) == 0
    assert {s["views"]: len(s["runs"]) for s in fake.settings()} == {1: 5, 2: 3, 4: 1}
    assert len(fake.runs) == (4 + 3) + (4 + 1) + 2


def test_a_choice_on_the_test_images_is_reported(
    fake: FakeSweep, capsys: pytest.CaptureFixture
) -> None:
    assert fake.main("--select-on test --lr 0.1 0.2") == 0
    assert "by top-1 on the test images" in " ".join(capsys.readouterr().out.split())


def test_a_finished_sweep_and_a_larger_grid_train_nothing_twice(fake: FakeSweep) -> None:
    for more in ("--lr 0.1 0.2", "--lr 0.1 0.2", "--lr 0.1 0.2 0.3 --seeds 2"):
        assert fake.main(more) == 0
    assert len(fake.runs) == 6
    assert set(fake.runs.values()) == {1}


@pytest.mark.parametrize("finished", [True, False])
def test_runs_of_other_settings_are_not_taken(
    fake: FakeSweep, data: Path, tmp_path: Path, finished: bool
) -> None:
    assert fake.main() == 0
    if not finished:
        next(fake.out.glob("runs/*/summary.json")).unlink()
    with pytest.raises(ConfigError, match="--model wrn-10-1"):
        fake.main("--model wrn-16-1")
    other = shutil.copy(data, tmp_path / "others.npz")
    with pytest.raises(ConfigError, match=r"--data .*colors.npz \(here: .*others.npz\)"):
        fake.main(f"--data={other}")


def test_a_storage_does_not_mix_other_settings(fake: FakeSweep, tmp_path: Path) -> None:
    """Two sweeps in one storage, in different folders, whose runs have the same names."""
    storage = f"--storage sqlite:///{tmp_path / 'shared.db'}"
    assert fake.main(storage) == 0
    assert fake.main(f"{storage} --out={tmp_path / 'other'} --model wrn-16-1") == 0
    assert sum(fake.runs.values()) == 2
    (config,) = (tmp_path / "other/runs").glob("*/config.json")
    assert json.loads(config.read_text())["model"] == "wrn-16-1"


def test_runs_of_another_machine_are_fetched_from_the_storage(
    fake: FakeSweep, tmp_path: Path
) -> None:
    there = f"--lr 0.1 0.2 --storage sqlite:///{tmp_path / 'shared.db'}"
    assert fake.main(there) == 0
    assert fake.main(f"{there} --out={tmp_path / 'elsewhere'}") == 0
    assert sum(fake.runs.values()) == 2
    assert len(list((tmp_path / "elsewhere/runs").glob("*/summary.json"))) == 2


def test_where_epochs_are_compared_none_is_chosen(fake: FakeSweep) -> None:
    best = {1: 0.1, 2: 0.2}  # epochs -> lr
    fake.top1 = lambda config: 0.8 if config.optim.lr == best[config.optim.epochs] else 0.6
    sweep.main(
        [
            "small-compute",
            *fake.flags("--train-images 0 --views 1 --lr 0.1 0.2 --epochs 1 2 --seeds 3")[1:],
        ]
    )
    # Two lengths of two rates with the two seeds of the experiment, and the best with one more.
    assert len(fake.runs) == 2 * 2 * 2 + 2
    assert {s["epochs"]: (s["lr"], len(s["runs"])) for s in fake.settings()} == {
        1: (0.1, 3),
        2: (0.2, 3),
    }


# --- earlier runs ---


def test_earlier_runs_are_reused(
    fake: FakeSweep, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert fake.main("--lr 0.1 0.2") == 0
    first = fake.out
    record = tmp_path / "record"
    assert (
        report.main([str(first), "--out", str(tmp_path / "p.html"), "--record", str(record)]) == 0
    )
    for number, source in enumerate((first, record)):
        fake.runs.clear()
        out = tmp_path / f"again-{number}"
        assert fake.main(f"--lr 0.2 0.3 --out={out} --reuse {source}") == 0
        assert sum(fake.runs.values()) == 1, "only lr 0.3 is new"
        assert "1 run of 2 taken from --reuse" in capsys.readouterr().out
        (summary,) = out.glob("runs/*lr0.2*/summary.json")
        assert json.loads(summary.read_text())["measures"]["top1"] == 0.25


@pytest.mark.parametrize("changed", ["--model wrn-16-1", "--tta 4", "--validation 0.3"])
def test_runs_of_other_settings_or_measures_are_not_reused(
    fake: FakeSweep, tmp_path: Path, changed: str
) -> None:
    assert fake.main() == 0
    fake.runs.clear()
    assert fake.main(f"{changed} --out={tmp_path / 'other'} --reuse {fake.out}") == 0
    assert sum(fake.runs.values()) == 1


def test_a_begun_run_is_continued_rather_than_reused(fake: FakeSweep, tmp_path: Path) -> None:
    assert fake.main() == 0
    earlier = shutil.copytree(fake.out, tmp_path / "earlier")
    (summary,) = fake.out.glob("runs/*/summary.json")
    summary.unlink()
    (fake.out / "sweep.db").unlink()
    assert fake.main(f"--reuse {earlier}") == 0
    assert set(fake.runs.values()) == {2}


def test_a_folder_to_reuse_must_exist(fake: FakeSweep, tmp_path: Path) -> None:
    with pytest.raises(FastaugError, match="no such folder"):
        fake.main(f"--reuse {tmp_path / 'none'}")


# --- what goes wrong ---


def test_a_failed_run_is_tried_again_and_then_given_up(
    fake: FakeSweep, capsys: pytest.CaptureFixture
) -> None:
    fake.errors = [RunFailedError("it broke")]
    assert fake.main("--lr 0.1 --retries 1 --jobs 1") == 0
    assert list(fake.runs.values()) == [2]
    fake.errors = [RunFailedError("it broke"), RunFailedError("again")]
    assert fake.main("--lr 0.2 --retries 1 --jobs 1") == 1
    printed = capsys.readouterr().out
    assert "after 2 tries" in printed
    assert "failed: shapes-k4-losses-kl1-lr0.2-e8-s0" in printed
    # The same command tries again.
    assert fake.main("--lr 0.2 --retries 1 --jobs 1") == 0
    assert fake.runs["shapes-k4-losses-kl1-lr0.2-e8-s0"] == 3


def test_a_run_that_diverges_is_not_tried_again_and_never_chosen(fake: FakeSweep) -> None:
    fake.errors = [RunDivergedError("rate too high")]
    assert fake.main("--lr 0.1 0.2 --jobs 1") == 0
    assert list(fake.runs.values()) == [1, 1]
    diverged = next(iter(fake.runs))
    (setting,) = fake.settings()
    assert setting["lr"] == (0.2 if "lr0.1" in diverged else 0.1)


def test_a_mistake_that_all_runs_share_ends_the_sweep(fake: FakeSweep) -> None:
    fake.errors = [RunRejectedError("no such kernel")]
    with pytest.raises(RunRejectedError, match="no such kernel"):
        fake.main("--lr 0.1 0.2 0.3 --jobs 1")
    assert sum(fake.runs.values()) == 1


def test_ctrl_c_ends_a_sweep_and_the_same_command_continues_it(
    fake: FakeSweep, capsys: pytest.CaptureFixture
) -> None:
    fake.ctrl_c = True
    assert fake.main("--jobs 1") == 130
    assert str(fake.out) in capsys.readouterr().err
    fake.ctrl_c = False
    assert fake.main("--jobs 1") == 0
    assert list(fake.runs.values()) == [2]
    (ended, done) = sorted(trials_of(fake.out / "sweep.db"), key=lambda trial: trial.number)
    assert (ended.state, done.state) == (TrialState.FAIL, TrialState.COMPLETE)


def test_a_folder_that_cannot_be_made(fake: FakeSweep, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file: .*File exists"):
        fake.main(f"--out {tmp_path / 'file'}")


# --- the share of the machine ---


@pytest.mark.parametrize(
    ("gpus", "jobs", "ranks", "expected"),
    [
        (0, 2, 1, ["1", "1"]),
        (0, 1, 1, ["2"]),
        (4, 0, 1, ["0", "1", "2", "3"]),
        (4, 0, 2, ["0,1", "2,3"]),
        (4, 1, 3, ["0,1,2"]),
        (4, 3, 2, ConfigError),
    ],
)
def test_each_run_has_its_share_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, jobs: int, ranks: int, expected: object
) -> None:
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(worker, "core_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = SweepConfig("shapes", jobs=jobs, ranks=ranks)
    if expected is ConfigError:
        with pytest.raises(ConfigError, match=r"--jobs 3 .*--ranks 2 .* 6 .* 4\b"):
            worker.machine_slots(config, "auto")
        return
    name = "CUDA_VISIBLE_DEVICES" if gpus else "OMP_NUM_THREADS"
    slots = worker.machine_slots(config, "auto")
    assert [slot.environment[name] for slot in slots] == expected
