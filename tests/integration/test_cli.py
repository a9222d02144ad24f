"""The command line: flags, errors in one line, --help; as typed in a shell."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import missing, raises

import fastaug
from fastaug import __main__, cli, doctor, evaluate, export, pack, preview, scan, train
from fastaug.config import TrainConfig, setting_owners
from fastaug.data.packing.config import PackConfig
from fastaug.doctor import DoctorConfig
from fastaug.errors import CheckpointError
from fastaug.evaluate import EvaluateConfig
from fastaug.export import ExportConfig
from fastaug.preview import PreviewConfig
from fastaug.recipes import get_recipe
from fastaug.scan import ScanConfig
from fastaug.settings import switch

# Scripts rely on these, and on --dali.
FIXED_FLAGS = {
    *("recipe", "data", "loader", "model", "views", "batch_size", "average", "kl_weight"),
    *("label_smoothing", "augment", "epochs", "max_steps", "lr", "seed", "precision", "kernel"),
    *("compile", "ema", "workers", "out", "resume", "checkpoint_every", "device"),
}


POSITIONAL = {(EvaluateConfig, "checkpoint"), (ExportConfig, "checkpoint"), (ScanConfig, "data")}


def fail(capsys: pytest.CaptureFixture, *args: str, main: Callable = train.main) -> str:
    """The one line that a mistake ends with."""
    assert cli.run(main, args) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--views x", "--views x"),
        ("--lr fast", "--lr fast"),
        ("--viewz 3", "--viewz --views"),
        ("--viewz 3 --lr", "--viewz --views"),  # the unknown flag, not the missing value
        ("--batch 8", "--batch-size"),
        ("--learning_rate 1", "--learning_rate --lr"),
        ("--crop-area 0.1", "--crop-area 2"),
        ("--crop-area a b", "--crop-area a b"),
        ("--optimizer adamm", "--optimizer adamm adamw"),
        ("--schedule warmup-cosine", "--schedule cosine --warmup-epochs 5"),
        ("--freeze stam", "--freeze stam stem"),
        ("--model nope --data nowhere", "nope timm/NAME"),  # before the data is opened
        ("--out setup.py --data nowhere", "--out setup.py"),
        ("--out /proc/here/run --data nowhere", "--out /proc/here/run"),
        ("--average means", "means --average"),
        ("--views", "--views"),
        ("--batch-size 66", "--views 4 66 64 68"),
        ("--recipe imagenet-nf-resnet5", "imagenet-nf-resnet50"),
        ("--data nowhere", "nowhere"),
        ("--recipe imagenet-nf-resnet50", "--data"),
        ("--resume nowhere", "nowhere"),
        ("stray", "stray"),
        # From here on with data, which these need.
        ("--model wrn-17-2 --data DATA", "wrn-17-2 wrn-16-2"),
        ("--model nf_resnet5 --data DATA", "nf_resnet5 nf_resnet50"),
        ("--kernel referense --data DATA", "referense reference"),
        ("--optimizer apex --data DATA", "apex --optimizer"),
        ("--dropout 0.5 --data DATA", "dropout 0.5"),
        ("--batch-size 400 --data DATA", "36 100"),
    ],
)
def test_a_mistake_ends_with_one_line(
    flags: str, names: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    message = fail(capsys, *flags.replace("DATA", str(folder)).split())
    assert missing(message, names) == []


def test_a_flag_like_no_other_gets_no_suggestion(capsys: pytest.CaptureFixture) -> None:
    message = fail(capsys, "--cutmix", "1.0")
    assert missing(message, "--cutmix --help") == []
    assert "did you mean" not in message


def test_a_mistake_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "new/run"
    fail(capsys, "--data", "nowhere", "--out", str(out))
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_a_terminal_without_unicode() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fastaug.train", "--precision", "fp8"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert missing(result.stderr, "error: fp8 --precision") == []
    assert result.stderr.count("\n") == 1


def test_debug_shows_where(capsys: pytest.CaptureFixture) -> None:
    assert cli.run(train.main, ["--data", "nowhere", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (MemoryError(), "--batch-size --workers"),
        (MemoryError("std::bad_alloc"), "std::bad_alloc --batch-size"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "2 GiB --accumulate",
        ),
        (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: 8 bytes"), "8 bytes"),
        (RuntimeError("Error in thread 0:\nstd::bad_alloc\nmore"), "std::bad_alloc"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "--batch-size"),
        (OSError(errno.ENOSPC, "No space left on device", "a.bin"), "a.bin --out TMPDIR"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "a.bin"), "a.bin FASTAUG_CACHE"),
    ],
)
def test_a_lack_of_memory_or_disk_space_is_one_line(
    error: Exception, names: str, capsys: pytest.CaptureFixture
) -> None:
    def main(_args: Sequence[str]) -> int:
        raise error

    assert cli.run(main, []) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert missing(line, names) == []


@pytest.mark.parametrize("error", [RuntimeError("bug"), OSError(errno.EIO, "it"), KeyError("it")])
def test_other_errors_are_bugs(error: Exception) -> None:
    def main(_args: Sequence[str]) -> int:
        raise error

    with pytest.raises(type(error)):
        cli.run(main, [])


def test_ctrl_c_before_the_training(capsys: pytest.CaptureFixture) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    assert cli.run(interrupted, []) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("main", "config"),
    [
        (train.main, TrainConfig),
        (evaluate.main, EvaluateConfig),
        (export.main, ExportConfig),
        (scan.main, ScanConfig),
        (pack.main, PackConfig),
        (preview.main, PreviewConfig),
        (doctor.main, DoctorConfig),
    ],
)
def test_help_explains_every_flag(
    main: Callable, config: type, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.run(main, ["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    own = {field.name for field in fields(config)}
    names = setting_owners(config) if issubclass(config, TrainConfig) else own
    for name in names:
        if (config, name) not in POSITIONAL:
            # A switch that the default recipe turns on is shown as what turns it off.
            assert any(f"{switch(name, on)} " in shown for on in (True, False))
    assert "│ (default" not in shown  # a flag without a word of explanation


def test_the_fixed_flags_are_there() -> None:
    assert {*setting_owners(), "dali"} >= FIXED_FLAGS


@pytest.mark.parametrize(
    ("args", "recipe", "switches"),
    [
        ([], "shapes", ["--pretrained", "--no-nesterov"]),
        (["--data", "x"], "", ["--pretrained"]),
        (["--recipe", "finetune"], "finetune", ["--no-pretrained"]),
    ],
)
def test_help_says_whose_defaults_it_shows_and_which_switches_are_on(
    args: list[str], recipe: str, switches: list[str], capsys: pytest.CaptureFixture
) -> None:
    for _ in range(2):  # the second help is that of the first
        with pytest.raises(SystemExit):
            cli.run(train.main, [*args, "--help"])
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        about, _, flags = text.partition("Example: python -m fastaug.train")
        assert (f"recipe {recipe};" if recipe else "without a recipe") in about
        for name in switches:
            _, _, help_text = flags.partition(f" {name} ")
            assert help_text
            assert help_text.startswith("Turn off") == name.startswith("--no-")
        assert flags.count("Turn off") == sum(
            value is True for value in get_recipe(recipe).to_flat().values()
        )


def test_help_of_a_recipe_shows_its_defaults(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.run(train.main, ["--recipe", "imagenet-nfnet-f0", "--help"])
    # Without a terminal the help has no box, and may break a line anywhere.
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: nfnet_f0)" in shown
    assert "--list-recipes" in shown


class TestConfigure:
    def test_dali_is_short_for_the_loader(self) -> None:
        assert train.configure([])[0].data.loader == "torch"
        for flags in (["--dali"], ["--loader", "dali"]):
            assert train.configure([*flags, "--views", "2"])[0].data.loader == "dali"

    @pytest.mark.parametrize(
        ("flags", "mode"),
        [
            ("--compile", "default"),
            ("--compile --views 2", "default"),
            ("--compile reduce-overhead", "reduce-overhead"),
            ("--compile=max-autotune", "max-autotune"),
            ("--no-compile", "off"),
            ("", "off"),
        ],
    )
    def test_compile_takes_a_mode_or_none(self, flags: str, mode: str) -> None:
        assert train.configure(flags.split())[0].run.compile == mode

    def test_flags_change_the_recipe(self) -> None:
        config, checkpoint = train.configure(["--recipe=cifar100-wrn-16-4", "--views", "8"])
        assert (config.model.model, config.view.views, config.view.crop) == ("wrn-16-4", 8, "pad")
        assert checkpoint is None
        assert config.run.out.startswith("runs/cifar100-wrn-16-4-")

    @pytest.mark.parametrize("recipe", ["shapes", "cifar100-wrn-16-4"])
    def test_a_switch_has_both_forms_whatever_the_recipe_says(self, recipe: str) -> None:
        for word, expected in (("--nesterov", True), ("--no-nesterov", False)):
            config, _ = train.configure(["--recipe", recipe, "--data", "photos", word])
            assert config.optim.nesterov is expected

    def test_the_recipe_of_the_built_in_set_is_only_for_it(self) -> None:
        own, _ = train.configure(["--data", "photos"])
        assert own.replace(data="shapes", out="") == TrainConfig()
        assert own.run.out.startswith("runs/photos-")
        built_in, _ = train.configure([])
        assert built_in.run.recipe == "shapes"
        assert built_in.replace(out="") == get_recipe("shapes")
        named, _ = train.configure(["--recipe", "shapes", "--data", "photos"])
        assert named.optim == built_in.optim

    def test_paths_become_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        config, _ = train.configure(["--data", "photos"])
        assert config.data.data == str(tmp_path / "photos")
        assert train.configure([])[0].data.data == "shapes"

    def test_resume_takes_the_settings_of_the_checkpoint(
        self, tiny: Callable[..., TrainConfig]
    ) -> None:
        config = tiny(max_steps=1, tta=0)
        train.Trainer(config).fit()
        for resume in (config.run.out, f"{config.run.out}/last.pt"):
            resumed, checkpoint = train.configure(["--resume", resume, "--max-steps", "2"])
            assert checkpoint == Path(config.run.out) / "last.pt"
            assert (resumed.optim.max_steps, resumed.optim.batch_size, resumed.run.out) == (
                2,
                16,
                config.run.out,
            )
        resumed, _ = train.configure(["--resume", config.run.out])
        assert resumed.optim.max_steps == 0
        older, _ = train.configure(["--resume", f"{config.run.out}/best.pt"])
        assert older.run.out != config.run.out
        resumed, checkpoint = train.configure(["--resume", "auto", "--out", config.run.out])
        assert checkpoint == Path(config.run.out) / "last.pt"
        with raises(CheckpointError, "--views 2 4"):
            train.Trainer(*train.configure(["--resume", config.run.out, "--views", "4"]))

    def test_auto_without_a_checkpoint_starts_from_the_beginning(
        self, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        _, checkpoint = train.configure(["--resume", "auto", "--out", str(tmp_path)])
        assert checkpoint is None
        assert "starting from the beginning" in capsys.readouterr().err


class TestCommands:
    def test_each_is_a_module_and_a_subcommand(self, capsys: pytest.CaptureFixture) -> None:
        assert cli.run(__main__.main, []) == 0
        shown = capsys.readouterr().out
        for command in __main__.COMMANDS:
            assert command in shown
            with pytest.raises(SystemExit) as exit_info:
                cli.run(__main__.main, [command, "--help"])
            assert exit_info.value.code == 0

    def test_the_version(self, capsys: pytest.CaptureFixture) -> None:
        assert cli.run(__main__.main, ["--version"]) == 0
        assert capsys.readouterr().out == f"fastaug {fastaug.__version__}\n"

    @pytest.mark.parametrize("command", [evaluate, export])
    def test_a_missing_argument(self, capsys: pytest.CaptureFixture, command: Any) -> None:
        message = fail(capsys, main=command.main)
        assert missing(message, "CHECKPOINT best.pt --help") == []
        assert "required" not in message

    def test_an_unknown_one_is_suggested(self, capsys: pytest.CaptureFixture) -> None:
        assert "did you mean train" in fail(capsys, "tran", main=__main__.main)


def test_from_a_shell(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Train a little and evaluate, as the README has it."""
    small = "--model wrn-10-1 --size 16 --views 2 --batch-size 16 --epochs 1 --workers 1 --tta 2"
    command = [sys.executable, "-m", "fastaug.train", *small.split(), "--data", str(folder)]
    trained = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "central crop, top-1 / top-5" in trained.stdout
    assert "Traceback" not in trained.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["finished"]
    assert cli.run(evaluate.main, [str(run / "best.pt"), "--tta", "3"]) == 0
    assert "3 views, averaged logits" in capsys.readouterr().out


def test_only_train_lists_recipes(capsys: pytest.CaptureFixture) -> None:
    """Elsewhere the flag would be accepted and do nothing."""
    assert cli.run(train.main, ["--list-recipes"]) == 0
    assert "cifar100-wrn-16-4" in capsys.readouterr().out
    assert cli.run(preview.main, ["--list-recipes"]) == 2
    assert "--list-recipes" in capsys.readouterr().err
