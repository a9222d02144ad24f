"""The Python examples of the documentation, run as they are."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from color_folders import write_folder
from PIL import Image
from timm_files import NAME, save_weights, trained_network

import fastaug
from fastaug import cli, evaluate, export, predict, preview, train
from fastaug.config import TrainConfig
from fastaug.data import shapes
from fastaug.engine.trainer import Trainer
from fastaug.kernels import registry
from fastaug.recipes import get_recipe
from fastaug.runs.config_file import ConfigFile
from fastaug.runs.folder import RunFolder

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = {"evaluate": evaluate, "export": export, "predict": predict, "preview": preview}
COMMANDS |= {"train": train}


def examples(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert found, page
    return found


def indented_example(page: str, heading: str) -> str:
    """The first indented code block below a heading."""
    section = (DOCS / page).read_text().partition(f"## {heading}\n")[2]
    block = re.search(r"\n\n((?:    .*\n|\n)+)", "\n" + section)
    assert block, heading
    return "\n".join(line[4:] for line in block[1].splitlines())


def run(code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {} if names is None else names
    exec(code, names)
    return names


@pytest.fixture
def small_shapes(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in set with a few images: drawing all takes seconds."""
    monkeypatch.setattr(shapes, "IMAGES_PER_CLASS", {"train": 2, "test": 1})


@pytest.fixture
def finished_run(tiny: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, which is also the current folder, with a network for 32 px."""
    config = tiny(size=32, model="wrn-10-1", max_steps=1, ema=0.9)
    Trainer(config).fit()
    monkeypatch.chdir(config.run.out)
    return Path(config.run.out)


@pytest.mark.usefixtures("small_shapes")
def test_the_python_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the page build on one another."""
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    names: dict[str, Any] = {}
    for code in examples("reference/python-api.md"):
        run(code, names)
    shown = set(re.findall(r"fastaug\.(\w+)\(", "".join(examples("reference/python-api.md"))))
    callables = {name for name in fastaug.__all__ if name[0].islower()} | {"MultiViewLoss"}
    assert shown == callables


def test_own_images_and_loop(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the page build on one another; colors are learned in a few steps."""
    write_folder(tmp_path / "in", {"photos": 12}, size=40)
    monkeypatch.chdir(tmp_path / "in")
    names: dict[str, Any] = {}
    for code in examples("guide/own-data.md"):
        run(code, names)
    assert names["classes"] == ("blue", "green", "red")
    assert names["total"] == 36
    assert names["batch"].views.shape == (8, 4, 3, 32, 32)
    views, labels = names["views"], names["labels"]
    assert (views.shape, labels.shape) == ((32, 3, 32, 32), (8,))
    # The raised channel of a view tells its label.
    brightest = 2 - names["batch"].flat.mean((2, 3)).argmax(1).unflatten(0, (8, 4))
    assert (brightest == names["batch"].labels[:, None]).float().mean() > 0.9


def test_the_loss_in_a_loop() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    views, labels = torch.randn(3 * 4, 3, 2, 2), torch.tensor([0, 4, 2])
    before = model[1].weight.detach().clone()
    names = {"model": model, "optimizer": optimizer, "loader": [(views, labels)]}
    logits = model(views).detach().unflatten(0, (3, 4))
    run(indented_example("guide/loss.md", "In your own training loop"), names)
    # Written out: the mean cross-entropy of all views, and KL of all ordered pairs.
    log_p = logits.double().log_softmax(-1)
    nll = -log_p.gather(2, labels[:, None, None].expand(3, 4, 1)).mean()
    pairs = [
        (log_p[:, i].exp() * (log_p[:, i] - log_p[:, j])).sum(-1)
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    expected = nll + torch.stack(pairs).mean()
    assert names["terms"].loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert not torch.equal(model[1].weight, before)


def test_soft_targets() -> None:
    """A teacher and noisy labels, against torch's cross_entropy."""
    torch.manual_seed(0)
    student, teacher = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    names = {"torch": torch, "fastaug": fastaug, "student": student, "teacher": teacher}
    names |= {"plain": torch.randn(5, 6), "views": torch.randn(5 * 4, 6), "K": 4}
    names |= {"temperature": 2.0, "labels": torch.tensor([0, 1, 2, 1, 0])}
    names |= {"noise": torch.rand(3, 3), "unlabeled": torch.tensor([False, True] * 2 + [False])}
    distill, noisy = examples("guide/loss.md")
    run(distill, names)
    rows = (teacher(names["plain"]) / 2).softmax(-1).repeat_interleave(4, 0)
    expected = torch.nn.functional.cross_entropy(student(names["views"]), rows)
    torch.testing.assert_close(names["terms"].nll.mean(), expected.detach())
    assert student.weight.grad is not None
    assert teacher.weight.grad is None
    run(noisy, names)
    rows = names["noise"][names["labels"]] * ~names["unlabeled"][:, None]
    rows = rows.repeat_interleave(4, 0)
    expected = torch.nn.functional.cross_entropy(student(names["views"]), rows)
    torch.testing.assert_close(names["terms"].nll.mean(), expected.detach())
    assert (names["terms"].nll == 0).tolist() == names["unlabeled"].tolist()


def test_the_statistics_of_own_data(capsys: pytest.CaptureFixture) -> None:
    """The printed flag against torch's mean and deviation of all pixels, and as a flag."""
    (code,) = examples("guide/views.md")
    images = run(code)["images"]
    _, *words = (line := capsys.readouterr().out).split()
    some = np.stack([images.image(index) for index in range(0, len(images), 4)])
    pixels = torch.from_numpy(some).double().div(255).flatten(0, 2)
    config, _ = train.configure(line.split())
    assert len(words) == 2
    expected = [pixels.mean(0).tolist(), pixels.std(0, unbiased=False).tolist()]
    np.testing.assert_allclose(config.view.normalize, expected, atol=6e-4)


def test_the_checkpoint_page(finished_run: Path) -> None:
    names: dict[str, Any] = {}
    for code in examples("reference/checkpoint.md"):
        run(code, names)
    state, page = names["state"], (DOCS / "reference/checkpoint.md").read_text()
    listed = page.partition("## Format 3")[2].partition("## Checksum")[0]
    assert set(state) == set(re.findall(r"^\| `(\w+)`", listed, re.MULTILINE))
    assert not names["model"].training
    averaged = state["ema"]["module.stem.weight"]
    assert torch.equal(names["model"].stem.weight, averaged)


def test_the_export_page(
    finished_run: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the page build on one another. The last one is preprocess.py."""
    for to in ("onnx", "onnx-with-preprocessing"):
        assert cli.run(export.main, [".", "--to", to]) == 0
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save("photo.jpg")
    monkeypatch.syspath_prepend(finished_run)
    *codes, snippet = examples("guide/export.md")
    assert snippet == Path("preprocess.py").read_text()
    capsys.readouterr()
    names: dict[str, Any] = {}
    logits = []
    for code in codes:
        run(code, names)
        logits.append(torch.as_tensor(names["logits"]))
    monkeypatch.delitem(sys.modules, "preprocess")
    for own in logits:
        torch.testing.assert_close(own, logits[0], rtol=1e-4, atol=1e-5)
    printed = capsys.readouterr().out.split()
    assert printed == [names["trained"].classes[logits[0].argmax()]] * 2


def test_the_run_folder_page_lists_what_a_run_writes(finished_run: Path) -> None:
    page = (DOCS / "reference/run-folder.md").read_text()
    for file in finished_run.iterdir():
        name = "events.out.tfevents.*" if file.name.startswith("events") else file.name
        assert f"`{name}" in page or name == "checkpoints", name
    summary = json.loads((finished_run / "summary.json").read_text())
    listed = page.partition("## summary.json")[2].partition("## Exit")[0]
    assert set(summary) <= set(re.findall(r"`(\w+)`", listed))
    for line in (finished_run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert f"| `{record['kind']}` |" in page
        names = [re.sub(r"_at_\d+$", "_at_N", name) for name in (*record, *record["timing"])]
        assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.usefixtures("small_shapes")
def test_the_views_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = indented_example("guide/views.md", "In your own training loop")
    names = run(code.replace("(0, 700, 1900)", "(0, 7, 19)"))
    assert names["views"].shape == (3, 8, 3, 64, 64)
    assert (tmp_path / "views.png").stat().st_size > 1000


def test_the_commands_of_fine_tuning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk-through on the color folders, with timm's smallest network in one step; the other
    trainings as far as the network. Nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    save_weights(trained_network(), tmp_path / "W.safetensors")
    (tmp_path / "photo.jpg").write_bytes(next(folder.rglob("*.jpg")).read_bytes())
    small = f"timm/{NAME} --no-pretrained --size 32 --max-steps 1 --epochs 2 --workers 0"
    page = (DOCS / "guide/fine-tuning.md").read_text().partition("## Does it help")[0]
    ran = []
    for command, words in re.findall(r"^    python -m fastaug\.(\w+) (.*)$", page, re.MULTILINE):
        line = words.replace("DIR", str(folder))
        if "--out" in line:
            line = line.replace("timm/resnet18", small).replace("--validation 0.2", "")
        args = line.split()
        if command == "train" and "--out" not in line:
            train.configure(args)
        else:
            assert COMMANDS[command].main(args) == 0, line
            ran.append(command)
    assert ran == ["preview", "train", "evaluate", "predict", "export"]
    assert (tmp_path / "runs/first/best.onnx").exists()


def test_logger_of_the_docs(
    tiny: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = examples("guide/logging.md")
    (tmp_path / "logger_of_the_docs.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    folder = RunFolder(tiny(log=("logger_of_the_docs:MyLogger",)), say=pytest.fail).open()
    folder.write("train", 2, {"loss": 1.5}, {})
    folder.close()
    assert (folder.path / "my.log").read_text() == "2 {'train/loss': 1.5}\n"


def test_config_file_of_the_docs(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "guide/training.md").read_text(), re.DOTALL
    )
    (tmp_path / "birds.yaml").write_text(example)
    file = ConfigFile(str(tmp_path / "birds.yaml"))
    default = get_recipe(file.text("recipe"))
    config = cli.parse_training(TrainConfig, file.flags(), prog="", default=default)
    changes = {"data": "/data/birds", "batch_size": 128, "lr": 1e-3, "crop_area": (0.5, 1.0)}
    changes |= {"log": ("tensorboard", "wandb"), "antialias": True, "loader": "dali"}
    assert config == default.replace(**changes)
