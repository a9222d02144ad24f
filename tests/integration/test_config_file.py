"""--config and --print-config: files become settings as if they had been typed; mistakes are one
line that names the file."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import yaml
from expect import missing, raises
from states import state_of

from fastaug import cli, train
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.recipes import get_recipe
from fastaug.runs.checkpoint import write_checkpoint

# Of every type: switches on and off, text, whole and broken numbers, tuples, a normalization.
FLAGS = [
    *("--views", "2", "--nesterov", "--lr", "3e-5", "--crop-area", "0.25", "0.75"),
    *("--normalize", "0.5,0.4,0.3", "0.2", "--log", "tensorboard", "mlflow", "--model", "wrn-16-4"),
    *("--compile", "default", "--deterministic", "--out", "runs/a b", "--workers", "-1"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(*args: str) -> TrainConfig:
    config, _ = train.read_settings(args)
    return config


def write(content: object, name: str = "c.yaml") -> str:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    Path(name).write_text(text)
    return name


class TestRoundTrip:
    @pytest.mark.parametrize("name", ["c.yaml", "c.txt"])
    def test_what_is_printed_is_read_again(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.run(train.main, [*FLAGS, "--print-config"]) == 0
        file = write(capsys.readouterr().out, name)
        typed = settings(*FLAGS)
        assert settings("--config", file) == typed
        assert (typed.view.views, typed.optim.lr, typed.run.out) == (2, 3e-5, "runs/a b")
        assert os.listdir() == [file]  # no run folder

    def test_by_another_reader(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Groups are the components, values those of the config."""
        assert cli.run(train.main, [*FLAGS, "--print-config"]) == 0
        groups = yaml.safe_load(capsys.readouterr().out)
        flat = {name: value for group in groups.values() for name, value in group.items()}
        assert flat == json.loads(json.dumps(settings(*FLAGS).to_flat()))
        assert groups["view"]["crop_area"] == [0.25, 0.75]

    def test_a_run_s_config(self, capsys: pytest.CaptureFixture[str]) -> None:
        """All settings of the run but those of one run, which are named."""
        typed = settings(*FLAGS, "--max-steps", "7")
        Path("run").mkdir()
        Path("run/config.json").write_text(json.dumps(typed.to_flat()))
        for named in ("run", "run/config.json"):
            found = settings("--config", named, "--lr", "2")
            assert found == typed.replace(lr=2.0, out="", max_steps=0)
            said = capsys.readouterr().err
            assert missing(said, "run/config.json --out --max-steps") == []
            assert "--debug" not in said

    def test_a_run_s_config_of_an_earlier_version(self) -> None:
        old = {"optimiser": "sgd", "normalise": "cifar", "compile": True, "views": 2, "epochs": 9}
        found = settings("--config", write(json.dumps(old), "config.json"))
        assert (found.view.normalize, found.run.compile, found.optim.epochs) == (
            *("cifar", "default"),
            9,
        )


class TestPrecedence:
    def test_recipe_then_file_then_flags(self) -> None:
        file = write("recipe: cifar100-wrn-16-4\ndata: x\nlr: 1e-3\nbatch-size: 128\n")
        recipe = get_recipe("cifar100-wrn-16-4")
        expected = recipe.replace(data="x", lr=1e-3, batch_size=32)
        assert settings("--config", file, "--batch-size", "32") == expected
        assert settings("--config", file) == expected.replace(batch_size=128)

    def test_a_recipe_of_the_command_line(self) -> None:
        file = write("lr: 0.5")
        expected = get_recipe("cifar100-wrn-16-4").replace(lr=0.5)
        assert settings("--recipe", "cifar100-wrn-16-4", "--config", file) == expected

    def test_the_default_recipe_depends_on_the_data_of_the_file(self) -> None:
        assert settings("--config", write("data: photos")).run.recipe == ""
        assert settings("--config", write("data: shapes")).run.recipe == "shapes"
        assert settings("--config", write("")) == get_recipe("shapes")

    def test_switches_may_be_turned_off_again(self) -> None:
        file = write("nesterov: true\nantialias: false\n")
        assert settings("--config", file).optim.nesterov is True
        assert settings("--config", file, "--no-nesterov").optim.nesterov is False

    def test_names_grouped_by_component_or_flat_with_either_dash(self) -> None:
        for text in (
            "optim: {batch-size: 64}\nloss: {kl_weight: 2}",
            "batch_size: 64\nkl-weight: 2",
            "--batch-size: 64\n--kl-weight: 2",
        ):
            found = settings("--config", write(text))
            assert (found.optim.batch_size, found.loss.kl_weight) == (64, 2)

    def test_yaml_s_own_ideas_of_values(self) -> None:
        """1e-3 is text and off is false to a YAML 1.1 reader."""
        found = settings("--config", write("lr: 1e-3\ncompile: off\nlog: none\n"))
        assert (found.optim.lr, found.run.compile, found.run.log) == (1e-3, "off", ("none",))

    def test_the_short_form_of_the_dali_loader(self) -> None:
        assert settings("--config", write("dali: true")).data.loader == "dali"
        assert settings("--config", write("dali: true"), "--loader", "torch").data.loader == "torch"

    def test_resume_and_out_in_the_file(self) -> None:
        """As in a job script that is started again and again."""
        file = write("resume: auto\nout: here\nworkers: 0\nlr: 0.25\nema: 0")
        assert train.read_settings(["--config", file])[1] is None
        state = state_of(40)
        state["config"] = settings("--config", file).to_flat()
        Path("here").mkdir()
        write_checkpoint(Path("here/last.pt"), state)
        config, checkpoint = train.read_settings(["--config", file, "--workers", "3"])
        assert checkpoint == Path("here/last.pt")
        assert (config.run.out, config.optim.lr, config.data.workers) == ("here", 0.25, 3)


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("viewz: 3", "viewz views"),
            ("view: {viewz: 3}", "viewz views"),
            ("print_config: true", "print_config"),
            ("help: true", "help"),
            ("views: many", "--views many"),
            ("views: 2.5", "--views 2.5"),
            ("views: 0", "--views 0"),
            ("views:", "views None"),
            ("views: {a: 1}", "views"),
            ("views: [1, 2]", "2"),
            ("views: true", "--views true"),
            ("nesterov: 3", "nesterov 3"),
            ("nesterov: 'yes'", "nesterov yes"),
            ("schedule: square", "--schedule square"),
            ("crop_area: 0.5", "--crop-area"),
            ("crop_area: [a, b]", "--crop-area"),
            ("crop_area: [0.5, [1, x]]", "crop_area"),
            ("normalize: [1, 2, 3]", "--normalize"),
            ("recipe: nonsense", "nonsense"),
            ("recipe: 3", "recipe 3"),
            ("resume: [x]", "resume"),
            ("data: 3.5", "data 3.5"),
            ("log: [--kernel, 'os:system']", "log"),
            ("batch-size: 8\nbatch_size: 9", "batch_size"),
            ("views: 2\nlr: 1\nlr: 2", "lr 3"),
            ("dali: maybe", "dali maybe loader"),
            ("dali: true\nloader: torch", "loader"),
            ("lr: 1\noptim: {lr: 2}", "lr"),
            ("- views", "views"),
            ("just text", "text"),
            ("3", "3"),
            ("a: [", "YAML 1"),
            ("a: !!python/object/apply:os.system ['touch hacked']", "YAML"),
            ("? [a, b]\n: 3", "YAML"),
            ("\t- x", "YAML"),
            ("views: 3\x00", "YAML"),
            ("2: 3", "2"),
            ("views: &a 3\nepochs: *a", "YAML 2"),  # aliases can grow without bound
        ],
        ids=lambda value: value[:25],
    )
    def test_are_one_line_that_names_the_file(self, text: str, names: str) -> None:
        with raises(ConfigError, f"--config c.yaml {names}") as caught:
            settings("--config", write(text))
        assert str(caught.value).count("--config") == 1
        assert not Path("hacked").exists()

    @pytest.mark.parametrize(
        "text",
        [
            *('{"viewz": 3}', '{"views": "x"}', '{"data": 3}', '{"crop_area": "ab"}', "[]", "{"),
            *('{"log": 3}', '{"log": [[]]}', '{"model": {"a": 1}}', '{"views": null}', '"x"'),
            *('{"out": {}, "crop_area": [1]}', '{"lr": NaN}', '{"schedule": ["a"]}', "nul"),
        ],
    )
    def test_in_a_run_s_config(self, text: str) -> None:
        with raises(ConfigError, "--config config.json"):
            settings("--config", write(text, "config.json"))

    def test_another_file_of_a_run(self) -> None:
        Path("run").mkdir()
        write_checkpoint(Path("run/best.pt"), state_of(40))
        with raises(ConfigError, "--config run/best.pt --config run"):
            settings("--config", "run/best.pt")
        write('{"step": 3, "kernel": "native", "measures": {"top1": 0.5}}', "run/summary.json")
        with raises(ConfigError, "--config run/summary.json config.json"):
            settings("--config", "run/summary.json")

    def test_two_recipes(self) -> None:
        file = write("recipe: shapes")
        with raises(ConfigError, f"--config {file} shapes --recipe cifar100-wrn-16-4"):
            settings("--recipe", "cifar100-wrn-16-4", "--config", file)
        Path("config.json").write_text(json.dumps(TrainConfig().to_flat()))
        with raises(ConfigError, "--config config.json --recipe shapes"):
            settings("--recipe", "shapes", "--config", "config.json")

    def test_settings_that_do_not_fit_together(self) -> None:
        with raises(ConfigError, "--config c.yaml --batch-size 30"):
            settings("--config", write("batch_size: 30\nviews: 4"))

    def test_no_file(self) -> None:
        with raises(ConfigError, "--config not.there"):
            settings("--config", "not.there")
        os.mkfifo("pipe.yaml")
        with raises(ConfigError, "--config pipe.yaml"):
            settings("--config", "pipe.yaml")

    def test_not_text(self) -> None:
        Path("c.yaml").write_bytes(b"\xff\xfe\0v")
        with raises(ConfigError, "--config c.yaml"):
            settings("--config", "c.yaml")

    @pytest.mark.parametrize(
        "text",
        [
            "views: [&a0 [1], " + ", ".join(f"&a{i + 1} [*a{i}, *a{i}]" for i in range(22)) + "]",
            "&a [*a]",
            "views: " + "[" * 50_000,
            "a: " * 50_000,
            "views: " + "9" * 100_000,
            "views: 1" + ":59" * 50_000,
            "lr: " + "x" * 200_000,
            "x" * 200_000 + ": 3",
            "#" * 1_000_000,
        ],
        ids=["aliases", "itself", "deep", "deep maps", "digits", "base 60", "text", "name", "size"],
    )
    def test_bombs(self, text: str) -> None:
        limit = sys.getrecursionlimit()
        started = time.monotonic()
        with raises(ConfigError, "--config c.yaml") as caught:
            settings("--config", write(text))
        assert len(str(caught.value)) < 1000
        assert time.monotonic() - started < 20
        assert sys.getrecursionlimit() == limit

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"views": ' + "9" * 100_000 + "}"])
    def test_bombs_of_json(self, text: str) -> None:
        with raises(ConfigError, "--config config.json") as caught:
            settings("--config", write(text, "config.json"))
        assert len(str(caught.value)) < 1000


class TestCode:
    """A file or a checkpoint may come from anyone: what it names is not imported."""

    @pytest.mark.parametrize(
        ("name", "value"), [("kernel", "their.module:kernel"), ("log", "their.module:logger")]
    )
    def test_it_is_named_again(self, name: str, value: str) -> None:
        file = write({name: value})
        saved = TrainConfig.from_flat(**{name: value if name == "kernel" else [value]}).to_flat()
        write(json.dumps(saved), "config.json")
        write_checkpoint(Path("last.pt"), state_of(40) | {"config": saved})
        sources = (["--config", file], ["--config", "config.json"], ["--resume", "last.pt"])
        for source in sources:
            with raises(ConfigError, f"--{name} {value}"):
                settings(*source)
            assert settings(*source, f"--{name}", value).get(name) in (value, (value,))
            other = {"kernel": "reference", "log": "none"}[name]
            assert settings(*source, f"--{name}", other).get(name) in (other, (other,))
