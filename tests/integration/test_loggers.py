"""Loggers: what the tools' own readers find, against metrics.jsonl; and loggers that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expect import missing, raises
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from training import run as train
from wandb_file import config as wandb_config
from wandb_file import history as wandb_history
from wandb_file import records as wandb_records

from fastaug.config import TrainConfig
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError
from fastaug.runs.folder import RunFolder
from fastaug.runs.loggers import open as opening
from fastaug.runs.loggers.background import BackgroundLogger
from fastaug.runs.loggers.base import ServiceRun
from fastaug.runs.loggers.open import make_loggers

Tiny = Callable[..., TrainConfig]


@pytest.fixture(autouse=True)
def nothing_leaves_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and credentials of whoever runs the tests are not used."""
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def numbers(folder: Path) -> dict[tuple[str, int], float]:
    """(kind/name, step) -> value of every number in metrics.jsonl."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kind, step = record.pop("kind"), record.pop("step")
        for name, value in (record | record.pop("timing")).items():
            if isinstance(value, (int, float)):
                found[f"{kind}/{name}", step] = value
    return found


def wandb_numbers(folder: Path) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for step, values in wandb_history(file):
            for name, value in values.items():
                if name.partition("/")[0] in ("train", "partial", "eval", "final"):
                    assert (name, step) not in found, "logged twice"
                    found[name, step] = value
    return found


def mlflow_run(folder: Path, store: str = "") -> tuple[Any, Any]:
    """MLflow's client, and the only run of its store."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store or f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    return client, run


def mlflow_numbers(folder: Path) -> dict[tuple[str, int], float]:
    client, run = mlflow_run(folder)
    found: dict[tuple[str, int], float] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert (name, metric.step) not in found, "logged twice"
            found[name, metric.step] = metric.value
    return found


class TestServices:
    def test_a_training_and_its_resume(self, tiny: Tiny) -> None:
        """Stopped after 7 of 8 steps and resumed from step 4, as after a kill: both log step 6."""
        config = tiny(log=("wandb", "mlflow"), checkpoint_every=4)
        folder = train(config.replace(max_steps=7))
        first = wandb_numbers(folder)
        assert first == numbers(folder) == mlflow_numbers(folder)
        assert ("partial/loss", 7) in first
        assert ("eval/top1", 4) in first
        (folder / "last.pt").unlink()
        Trainer(config.replace(eval_views=0, tta=0), folder / "checkpoints/step-000000004.pt").fit()
        again = numbers(folder)
        assert max(step for _, step in again) == 8
        assert {("train/loss", 6), ("train/views_per_s", 6)} <= first.keys() & again.keys()
        # What was logged stays, also the times and the records of the stop.
        expected = again | first
        assert wandb_numbers(folder) == expected == mlflow_numbers(folder)
        client, run = mlflow_run(folder)
        assert run.info.status == "FINISHED"
        settings = config.replace(max_steps=7).to_flat()
        assert run.data.params.keys() == settings.keys()
        assert (run.data.params["lr"], run.data.params["crop_area"]) == ("0.05", "0.35 1.0")
        assert run.data.tags["tta from step 4"] == "0"
        (picture,) = client.list_artifacts(run.info.run_id)
        assert picture.path == "views.png"
        assert list(folder.glob("mlflow/*/artifacts/views.png"))
        ids = set()
        for file in folder.glob("wandb/offline-run-*/*.wandb"):
            logged = wandb_config(file)
            assert {n: logged[n] for n in ("lr", "crop_area")} == {
                "lr": 0.05,
                "crop_area": [0.35, 1.0],
            }
            ids |= {r.run.run_id for r in wandb_records(file) if r.HasField("run")}
        assert ids == {json.loads((folder / "wandb.json").read_text())["id"]}
        assert not list(folder.glob("events.*"))  # only what --log names

    def test_a_new_run_in_the_same_folder_is_a_new_run_of_the_service(self, tiny: Tiny) -> None:
        for loss in (1.0, 2.0):
            folder = RunFolder(tiny(log=("wandb",)), say=print).open()
            folder.write("train", 2, {"loss": loss}, {})
            folder.close()
        files = list(folder.path.glob("wandb/offline-run-*/*.wandb"))
        assert len({file.name for file in files}) == 2
        assert sorted(wandb_history(file)[0][1]["train/loss"] for file in files) == [1, 2]

    def test_project_and_experiment_come_from_the_environment(
        self, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = f"sqlite:///{tmp_path / 'all.db'}"
        monkeypatch.setenv("WANDB_PROJECT", "birds")
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "wings")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
        said: list[str] = []
        folder = RunFolder(tiny(log=("wandb", "mlflow")), say=said.append).open()
        folder.write("train", 2, {"loss": 1.0}, {})
        folder.close()
        (file,) = folder.path.glob("wandb/offline-run-*/*.wandb")
        (project,) = {r.run.project for r in wandb_records(file) if r.HasField("run")}
        client, run = mlflow_run(folder.path, store)
        assert client.get_experiment(run.info.experiment_id).name == "wings"
        assert (project, run.info.run_name) == ("birds", "run")
        assert run.info.status == "KILLED"  # there is no summary
        assert not (folder.path / "mlflow.db").exists()
        assert run.info.artifact_uri.startswith((tmp_path / "all").as_uri())
        of_mlflow, of_wandb = sorted(said)
        assert missing(of_mlflow, f"mlflow {tmp_path / 'all.db'} --backend-store-uri {store}") == []
        assert missing(of_wandb, f"wandb {folder.path / 'wandb'} offline") == []

    @pytest.mark.parametrize("uri", ["file:runs/all", "runs/all"])
    def test_mlflow_refuses_plain_files(self, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with raises(ConfigError, f"--log mlflow {uri}"):
            make_loggers(["mlflow"])
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        make_loggers(["mlflow"])

    def test_a_server_that_cannot_be_reached(
        self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The training ends as usual, with a warning at the first failure and one at the end."""
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        said: list[str] = []
        folder = RunFolder(tiny(log=("mlflow",)), say=said.append).open()
        for step in (2, 4, 6):
            folder.write("train", step, {"loss": 1.0}, {})
        folder.close()
        assert [missing(line, "warning: --log mlflow") for line in said] == [[], []]
        assert missing(said[1], "3 metrics.jsonl") == []
        assert len(numbers(folder.path)) == 3

    def test_wandb_without_a_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a process of its own: wandb reads its settings once."""
        monkeypatch.delenv("WANDB_MODE")
        script = "from fastaug.runs.loggers.open import make_loggers; make_loggers(['wandb'])"
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        last = done.stderr.splitlines()[-1]
        assert missing(last, "ConfigError --log wandb WANDB_API_KEY WANDB_MODE") == []

    @pytest.mark.parametrize(
        "state",
        ["", "[]", '{"id": 3, "steps": {}}', '{"id": "../x", "steps": {}}', '{"id": "a"}', "\0"],
    )
    def test_a_damaged_state_means_a_new_run(self, tmp_path: Path, state: str) -> None:
        (tmp_path / "wandb.json").write_text(state)
        assert ServiceRun(tmp_path / "wandb.json", resumed=True).id == ""


class Recorder:
    """A logger of one's own that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        Recorder.last = self

    last: Recorder

    def start(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> str | None:
        self.calls.append(("start", folder.name, config["lr"], resume_step))
        return "the test"

    def log(self, step: int, values: dict[str, float]) -> None:
        self.calls.append(("log", step, values))

    def picture(self, name: str, picture: Image.Image) -> None:
        self.calls.append(("picture", name, picture.size))

    def close(self, summary: dict[str, Any] | None) -> None:
        self.calls.append(("close", summary))


def recorder() -> Recorder:
    return Recorder()


class NoPicture:
    def start(self, folder: Path, config: dict, resume_step: int | None) -> None: ...
    def log(self, step: int) -> None: ...
    def close(self, summary: dict | None) -> None: ...


def broken() -> None:
    raise RuntimeError("no\nkey")


class TestOnesOwn:
    @pytest.mark.parametrize("attribute", ["Recorder", "recorder"])
    def test_its_calls(self, tiny: Tiny, attribute: str) -> None:
        said: list[str] = []
        folder = RunFolder(
            tiny(log=(f"test_loggers:{attribute}",)), say=said.append, resume_step=2
        ).open()
        own = sys.modules["test_loggers"].Recorder.last
        folder.write_picture("views", Image.new("RGB", (24, 16)))
        folder.write("train", 4, {"loss": 1.5, "images": [1]}, {"views_per_s": 2.0})
        folder.write_summary({"finished": True})
        folder.close()
        assert own.calls == [
            ("start", "run", 0.05, 2),
            ("picture", "views", (24, 16)),
            ("log", 4, {"train/loss": 1.5, "train/views_per_s": 2.0}),
            ("close", {"finished": True}),
        ]
        assert [missing(line, f"test_loggers:{attribute} test") for line in said] == [[]]

    @pytest.mark.parametrize(
        ("attribute", "names"),
        [
            ("NoPicture", "NoPicture log picture"),
            ("broken", "RuntimeError no"),
            ("absent", "AttributeError absent"),
            ("__name__", "TypeError"),
        ],
    )
    def test_what_is_no_logger(self, attribute: str, names: str) -> None:
        with raises(ConfigError, f"--log test_loggers:{attribute} {names}"):
            make_loggers([f"test_loggers:{attribute}"])

    def test_a_module_that_is_not_there(self) -> None:
        with raises(ConfigError, "--log not.there:x PYTHONPATH"):
            make_loggers(["not.there:x"])

    @pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "tensorboard"])
    def test_a_package_that_is_not_installed(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(opening, "find_spec", lambda _name: None)
        with raises(ConfigError, f"--log {name} pip install"):
            make_loggers([name])

    @pytest.mark.parametrize(
        "names", [("wand",), ("wandb", "wandb"), ("none", "wandb"), "wandb", (3,)], ids=repr
    )
    def test_wrong_names(self, names: Any) -> None:
        with raises(ConfigError, "--log"):
            TrainConfig.from_flat(log=names)

    def test_none(self, tiny: Tiny) -> None:
        folder = RunFolder(tiny(log=("none",)), say=print).open()
        folder.write("train", 2, {"loss": 1.5}, {})
        folder.close()
        assert {f.name for f in folder.path.iterdir()} == {"config.json", "metrics.jsonl"}


class Slow(Recorder):
    """Its network answers when `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.answers.wait()
        super().log(step, values)


class Flaky(Recorder):
    """The first two calls of start() and the log of step 2 fail."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 2

    def start(self, *args: Any) -> str | None:
        self.left -= 1
        if self.left >= 0:
            raise OSError("network\nis gone")
        return super().start(*args)

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == 2:
            raise TimeoutError
        super().log(step, values)


class TestInTheBackground:
    def background(self, logger: Recorder, said: list[str]) -> BackgroundLogger:
        made = BackgroundLogger("own", logger, said.append)
        made.start(Path("run"), {"lr": 1}, None)
        return made

    def test_a_slow_network_does_not_hold_up_the_training(self) -> None:
        said: list[str] = []
        logger = Slow()
        background = self.background(logger, said)
        started = time.monotonic()
        for step in range(100):
            background.log(step, {})
        assert time.monotonic() - started < 5  # it would wait forever
        logger.answers.set()
        background.close({"finished": True})
        assert [call[1] for call in logger.calls[1:-1]] == list(range(100))
        assert logger.calls[-1] == ("close", {"finished": True})
        assert said == ["logging to own: the test"]

    def test_a_network_that_never_answers_does_not_hold_up_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(BackgroundLogger, "_CLOSING", 0.1)
        said: list[str] = []
        logger = Slow()
        background = self.background(logger, said)
        for step in range(3):
            background.log(step, {})
        background.close(None)
        assert missing(said[-1], "warning: --log own metrics.jsonl") == []
        logger.answers.set()

    def test_failures_are_reported_once_and_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(BackgroundLogger, "_PAUSE", 0.01)
        said: list[str] = []
        logger = Flaky()
        background = self.background(logger, said)
        for step in (1, 2, 3):
            background.log(step, {})
        # Not before it has worked: a failure while closing is final.
        while len(logger.calls) < 3:
            time.sleep(0.01)
        background.close(None)
        assert [call[:2] for call in logger.calls] == [
            ("start", "run"),
            ("log", 1),
            ("log", 3),
            ("close", None),
        ]
        first, place, last = said
        assert missing(first, "warning: --log own OSError network") == []
        assert "\n" not in first
        assert missing(place, "own test") == []
        assert missing(last, "warning: 1 metrics.jsonl") == []

    def test_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(BackgroundLogger, "_MOST_WAITING", 5)
        said: list[str] = []
        logger = Slow()
        background = self.background(logger, said)
        while not logger.calls:
            time.sleep(0.01)
        for step in range(20):
            background.log(step, {})
        logger.answers.set()
        background.close(None)
        logged = [call[1] for call in logger.calls if call[0] == "log"]
        assert len(logged) in (5, 6)  # the first one may be under way
        assert missing(said[-1], f"warning: {20 - len(logged)}") == []


def test_tensorboard_has_the_settings(tiny: Tiny) -> None:
    folder = RunFolder(tiny(), say=print).open()
    folder.write("train", 2, {"loss": 1.5}, {})
    folder.close()
    events = EventAccumulator(str(folder.path))
    events.Reload()
    metadata = events.summary_metadata["_hparams_/session_start_info"]
    info = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info
    settings = dict(info.hparams.items())
    assert settings["lr"].number_value == 0.05
    assert settings["crop_area"].string_value == "0.35 1.0"
    assert settings.keys() == tiny().to_flat().keys()


class TestTrackio:
    """With the real package where it is installed; it needs Pillow below 13."""

    def runs(self, tiny: Tiny) -> Path:
        folder = RunFolder(tiny(log=("trackio",)), say=pytest.fail).open()
        folder.write_picture("views", Image.new("RGB", (24, 16)))
        for step in (2, 4):
            folder.write("train", step, {"loss": 1 / step}, {})
        folder.close()
        folder = RunFolder(tiny(log=("trackio",)), say=pytest.fail, resume_step=2).open()
        for step in (4, 6):
            folder.write("train", step, {"loss": 1 / step}, {})
        folder.write_summary({"finished": True})
        folder.close()
        return folder.path

    def test_the_package_itself(self, tiny: Tiny) -> None:
        trackio = pytest.importorskip("trackio")
        from trackio.sqlite_storage import SQLiteStorage

        folder = self.runs(tiny)
        (run,) = trackio.Api().runs("fastaug")
        assert run.name == f"run-{json.loads((folder / 'trackio.json').read_text())['id']}"
        assert run.config["lr"] == 0.05
        rows = SQLiteStorage.get_logs("fastaug", run.name)
        losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
        assert losses == [(2, 1 / 2), (4, 1 / 4), (6, 1 / 6)]

    def test_its_documented_interface(self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stand-in that knows init(), Run.log, Run.finish and Image, and nothing else."""
        calls: list[Any] = []

        class Run:
            def log(self, metrics: dict, step: int | None = None) -> None:
                calls.append((step, metrics))

            def finish(self) -> None:
                calls.append("finish")

        def init(project: str, name: str, config: dict, resume: str, embed: bool) -> Run:
            calls.append((project, name, config["lr"], resume))
            return Run()

        stand_in = types.ModuleType("trackio")
        stand_in.init, stand_in.Image = init, lambda picture: picture.size  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "trackio", stand_in)
        monkeypatch.setattr(opening, "find_spec", lambda _name: stand_in)
        folder = self.runs(tiny)
        name = f"run-{json.loads((folder / 'trackio.json').read_text())['id']}"
        assert calls == [
            ("fastaug", name, 0.05, "allow"),
            (0, {"views": (24, 16)}),
            (2, {"train/loss": 1 / 2}),
            (4, {"train/loss": 1 / 4}),
            "finish",
            ("fastaug", name, 0.05, "allow"),
            (6, {"train/loss": 1 / 6}),
            "finish",
        ]
