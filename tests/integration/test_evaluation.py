"""Measures against a computation by hand, image by image; and evaluate from a checkpoint alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from color_folders import write_folder
from image_sets import open_data
from torch import nn

from fastaug import cli, evaluate, train
from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import scan_and_check
from fastaug.engine.evaluation import Evaluation
from fastaug.views.philox import TEST_VIEWS
from fastaug.views.plan import draw_plans
from fastaug.views.reference import reference_views

Tiny = Callable[..., TrainConfig]
CPU = torch.device("cpu")


class MeanColor(nn.Module):
    """Seven logits from the mean color of a view; nothing that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 7, generator=generator) * 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) @ self.weight


def images_of(folder: Path) -> ImageSet:
    return scan_and_check(open_data(str(folder), "test"))


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("batch_size", [1, 4, 256])
@pytest.mark.parametrize("views", [0, 1, 3])
def test_the_measures_by_hand(tiny: Tiny, folder: Path, views: int, batch_size: int) -> None:
    config, images, model = tiny(), images_of(folder), MeanColor()
    evaluation = Evaluation(images, config, CPU, batch_size=batch_size)
    found = evaluation.measure(model, views=views)

    sums: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        sums[name] = sums.get(name, 0.0) + float(value) / len(images)

    def rank_of(scores: np.ndarray, label: int) -> int:
        return int((scores > scores[label]).sum())

    for index in range(len(images)):
        image, label = images.image(index), int(images.labels[index])
        where = np.array([index]), np.array([image.shape[:2]])
        plans = []
        for changes in ({"augment": "none", "views": 1}, {"views": views, "batch_size": views}):
            if changes["views"]:
                policy = config.replace(**changes)
                plans += draw_plans(policy.view, policy.run.seed, 0, TEST_VIEWS, *where).of_image(0)
        pixels = reference_views(image, plans, config.view).double().numpy().mean((1, 2))
        logits = pixels @ model.weight.detach().double().numpy()
        central, rest = logits[0], logits[1:]
        add("top1", rank_of(central, label) == 0)
        add("top5", rank_of(central, label) < 5)
        add("nll", -np.log(probabilities(central)[label]))
        if views:
            p = probabilities(rest)
            for name, scores in (("tta_", p.mean(0)), ("tta_logits_", rest.mean(0))):
                add(f"{name}top1", rank_of(scores, label) == 0)
                add(f"{name}top5", rank_of(scores, label) < 5)
            for number in (n for n in (1, 2, 4, 8) if n <= views):
                add(f"tta_top1_at_{number}", rank_of(p[:number].mean(0), label) == 0)
        if views > 1:
            pairs = [(a * np.log(a / b)).sum() for a in p for b in p if a is not b]
            pairs = [value for value in pairs if value != 0]
            add("invariance", sum(pairs) / (views * views - views))
    assert found == pytest.approx(sums, rel=1e-4, abs=1e-7)
    assert evaluation.measure(model, views=views) == found  # on the same views again


@pytest.mark.parametrize("loader", ["torch", "dali"])
def test_bad_images_do_not_count(tiny: Tiny, folder: Path, tmp_path: Path, loader: str) -> None:
    """The measures of a set with a bad image are those of the set without it."""
    with_bad, without = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("a", "b"))
    (with_bad / "test/red/02.jpg").write_bytes(b"")
    (without / "test/red/02.jpg").unlink()
    config = tiny(loader=loader, crop="pad", size=20)  # views are then the same for any number
    found = [
        Evaluation(scan_and_check(open_data(str(data), "test"), max_bad=0.1), config, CPU).measure(
            MeanColor(), views=0
        )
        for data in (with_bad, without)
    ]
    assert found[0] == pytest.approx(found[1])


def test_the_model_is_left_in_its_mode(tiny: Tiny, folder: Path) -> None:
    model = MeanColor()
    seen = []
    model.register_forward_hook(lambda module, *_: seen.append(module.training))
    Evaluation(images_of(folder), tiny(), CPU).measure(model, views=0)
    assert model.training
    assert not any(seen)


def test_what_on_batch_raises_ends_the_evaluation(tiny: Tiny, folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    evaluation = Evaluation(images_of(folder), tiny(), CPU)
    with pytest.raises(KeyboardInterrupt):
        evaluation.measure(MeanColor(), views=2, on_batch=stop)


class TestCommand:
    @pytest.fixture
    def run_folder(self, tiny: Tiny) -> Path:
        config = tiny(max_steps=3, tta=3)
        train.Trainer(config).fit()
        return Path(config.run.out)

    def test_everything_comes_from_the_checkpoint(
        self, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        out = tmp_path / "result.json"
        assert cli.run(evaluate.main, [str(run_folder / "last.pt"), "--out", str(out)]) == 0
        summary = json.loads((run_folder / "summary.json").read_text())
        result = json.loads(out.read_text())
        assert result["measures"] == pytest.approx(summary["measures"])
        # Every class has as many images: the mean over classes is that over images.
        overall = {name: summary["measures"][name] for name in ("top1", "tta_top1")}
        assert result["balanced"] == pytest.approx(overall)
        assert [own["class"] for own in result["classes"]] == ["blue", "green", "red"]
        shown = capsys.readouterr().out
        assert "3 views, averaged probabilities" in shown
        assert "top-1 by class: central crop / 3 views" in shown

    def test_other_views_and_a_run_folder(
        self, run_folder: Path, capsys: pytest.CaptureFixture
    ) -> None:
        assert cli.run(evaluate.main, [str(run_folder), "--tta", "5", "--batch-size", "7"]) == 0
        assert "pairwise KL of 5 views" in capsys.readouterr().out
        assert cli.run(evaluate.main, [str(run_folder), "--tta", "0"]) == 0
        assert "averaged" not in capsys.readouterr().out

    def test_other_data_with_the_same_classes(
        self, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        other = write_folder(tmp_path / "other", {"test": 2})
        assert cli.run(evaluate.main, [str(run_folder), "--data", str(other)]) == 0
        shown = "".join(capsys.readouterr().out.replace("│", " ").split())  # a long path wraps
        assert "other/test,6images" in shown

    def test_another_loader_than_in_the_training(self, tiny: Tiny) -> None:
        """The engine of the views is the dali loader's: the torch loader refuses one."""
        config = tiny(max_steps=1, loader="dali", views_engine="dali")
        train.Trainer(config).fit()
        assert cli.run(evaluate.main, [config.run.out, "--loader", "torch", "--tta", "0"]) == 0

    def test_other_classes_are_refused(
        self, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        other = write_folder(tmp_path / "other", {"test": 2})
        (other / "test/red").rename(other / "test/rouge")
        assert cli.run(evaluate.main, [str(run_folder), "--data", str(other)]) == 2
        assert "rouge" in capsys.readouterr().err

    @pytest.mark.parametrize("out", ["missing/x.json", "."])
    def test_where_no_result_can_be_written(
        self, tmp_path: Path, out: str, capsys: pytest.CaptureFixture
    ) -> None:
        assert cli.run(evaluate.main, [str(tmp_path), "--out", str(tmp_path / out)]) == 2
        assert f"--out {tmp_path / out}: " in capsys.readouterr().err

    def test_no_checkpoint(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        assert cli.run(evaluate.main, [str(tmp_path)]) == 2
        assert f"error: {tmp_path}: " in capsys.readouterr().err
