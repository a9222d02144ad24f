"""fastaug.predict: all ways to use a trained network give the predictions of an evaluation."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from color_folders import write_folder
from expect import missing
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from fastaug import __main__, cli, export, predict
from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.diagnostics.photos import photo_folder
from fastaug.engine.evaluation import Evaluation
from fastaug.engine.loaders import build_evaluation_loader
from fastaug.engine.prediction import Prediction, Predictor, find_images
from fastaug.exporters.loading import load_network
from fastaug.models.build import build_model
from fastaug.runs import checkpoint

Tiny = Callable[..., TrainConfig]
CPU = torch.device("cpu")
CLASSES = [f"class {i}" for i in range(10)]
EXPORTS = {
    "safetensors": "best.safetensors",
    "onnx": "best.onnx",
    "onnx-with-preprocessing": "best-with-preprocessing.onnx",
    "torch-export": "best.pt2",
}
# Logits of the networks below have a deviation of about 16; other libraries sum in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}


class Trained:
    """A run folder with a network whose classes differ clearly from photo to photo."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        torch.manual_seed(0)
        self.model = build_model(config.model.model, len(CLASSES), image_size=config.view.size)
        # An untrained network gives all images nearly the same logits: the last layer is scaled.
        with torch.no_grad():
            self.model.head.weight.normal_(std=3.0)
        self.model.eval()
        self.classes = CLASSES
        self.save()

    def save(self) -> None:
        state: dict[str, Any] = {"config": self.config.to_flat(), "classes": self.classes}
        state |= {"model": self.model.state_dict(), "ema": None, "step": 7}
        self.folder.mkdir(exist_ok=True)
        checkpoint.write_checkpoint(self.folder / "best.pt", state)

    def export(self, *formats: str) -> list[Path]:
        for to in formats:
            assert cli.run(export.main, [str(self.folder), "--to", to]) == 0
        return [self.folder / EXPORTS[to] for to in formats]


@pytest.fixture
def trained(tiny: Tiny, tmp_path: Path) -> Callable[..., Trained]:
    return lambda **changes: Trained(tiny(**changes), tmp_path / "run")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """100 photographs: those of $FASTAUG_PHOTOS, or generated ones."""
    named = os.environ.get("FASTAUG_PHOTOS")
    found = find_images([named or str(photo_folder(tmp_path_factory.mktemp("photos")))])[:100]
    assert len(found) == 100
    return found


def evaluated_logits(model: nn.Module, config: TrainConfig, paths: list[str], views: int) -> Tensor:
    """[N, max(1, K), C], from the loader of fastaug.evaluate."""
    labels = [CLASSES[i % len(CLASSES)] for i in range(len(paths))]
    images = ImageSet.from_files(paths, labels, CLASSES)
    loader = build_evaluation_loader(config, images, views=views, batch_size=64)
    with torch.inference_mode():
        logits = [model(batch.flat).unflatten(0, batch.views.shape[:2]) for batch in loader]
    return torch.cat(logits)


def predicted_logits(named: Path, paths: list[str]) -> Tensor:
    """[N, C]."""
    found = list(Predictor(load_network(str(named), CPU, trust=True)).predict(paths))
    assert all(isinstance(own, Prediction) for own in found)
    assert [own.image for own in found] == paths
    return torch.stack([own.logits for own in found])


def snippet_logits(folder: Path, paths: list[str]) -> Tensor:
    """[N, C], with onnxruntime and the files beside the export, without fastaug."""
    names: dict[str, Any] = {}
    exec((folder / "preprocess.py").read_text(), names)
    about = json.loads((folder / "preprocess.json").read_text())
    session = onnxruntime.InferenceSession(str(folder / "best.onnx"))
    return stacked(
        session.run(["logits"], {"images": names["preprocess"](Image.open(path), about)})[0]
        for path in paths
    )


def in_graph_logits(folder: Path, paths: list[str]) -> Tensor:
    """[N, C], with onnxruntime and decoded pixels."""
    session = onnxruntime.InferenceSession(str(folder / "best-with-preprocessing.onnx"))
    pixels = (np.asarray(Image.open(path).convert("RGB")) for path in paths)
    return stacked(session.run(["logits"], {"pixels": own[None]})[0] for own in pixels)


def stacked(logits: Any) -> Tensor:
    return torch.from_numpy(np.concatenate(list(logits)))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_all_ways_to_predict_agree_on_photographs(
    trained: Callable[..., Trained], photos: list[str], interpolation: str, antialias: bool
) -> None:
    run = trained(size=64, interpolation=interpolation, antialias=antialias)
    run.export("onnx", "onnx-with-preprocessing")
    expected = evaluated_logits(run.model, run.config, photos, views=0)[:, 0]
    assert len(expected.argmax(1).unique()) > 1
    ways = {
        "predict": predicted_logits(run.folder, photos),
        "predict, ONNX": predicted_logits(run.folder / "best.onnx", photos),
        "snippet": snippet_logits(run.folder, photos),
        "in the graph": in_graph_logits(run.folder, photos),
    }
    for way, logits in ways.items():
        torch.testing.assert_close(logits, expected, **TOLERANCE, msg=lambda m, w=way: f"{w}: {m}")
        assert torch.equal(logits.argmax(1), expected.argmax(1)), way


def test_another_preprocessing_is_noticed(
    trained: Callable[..., Trained], photos: list[str]
) -> None:
    """What the test above compares depends on the crop and the filter."""
    run = trained(size=64)
    logits = evaluated_logits(run.model, run.config, photos[:20], views=0)[:, 0]
    for change in ({"antialias": True}, {"interpolation": "bilinear"}):
        view = replace(run.config.view, **change)
        other = evaluated_logits(run.model, replace(run.config, view=view), photos[:20], views=0)
        assert (other[:, 0] - logits).abs().max() > 100 * TOLERANCE["atol"]


def test_every_file_gives_the_same_predictions(
    trained: Callable[..., Trained], folder: Path
) -> None:
    run = trained()
    paths = find_images([str(folder / "test")])
    expected = evaluated_logits(run.model, run.config, paths, views=0)[:, 0]
    for file in (run.folder, run.folder / "best.pt", *run.export(*EXPORTS)):
        torch.testing.assert_close(predicted_logits(file, paths), expected, **TOLERANCE)


@pytest.mark.parametrize("changes", [{"augment": "randaugment"}, {"augment": "none"}], ids=str)
def test_the_views_are_those_of_an_evaluation(
    trained: Callable[..., Trained], folder: Path, changes: dict[str, Any]
) -> None:
    run = trained(**changes)
    paths = find_images([str(folder / "test")])
    expected = evaluated_logits(run.model, run.config, paths, views=3)
    for batch_size in (256, 2):  # also when the views of an image do not fit into a batch
        network = load_network(str(run.folder), CPU)
        found = list(Predictor(network, views=3, batch_size=batch_size).predict(paths))
        views = torch.stack([own.view_logits for own in found if isinstance(own, Prediction)])
        torch.testing.assert_close(views, expected, **TOLERANCE)


def run_json(capsys: pytest.CaptureFixture, *args: object) -> list[dict[str, Any]]:
    assert cli.run(predict.main, [*map(str, args), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_spread_over_views(
    trained: Callable[..., Trained], folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """Against the loader's views and formulas that are written out."""
    run = trained(augment="randaugment")
    paths = find_images([str(folder / "test")])
    found = run_json(capsys, run.folder, *paths, "--views", 4, "--top", 3)
    central = evaluated_logits(run.model, run.config, paths, views=0)[:, 0].softmax(1)
    log_p = evaluated_logits(run.model, run.config, paths, views=4).double().log_softmax(-1)
    assert [own["image"] for own in found] == paths
    for own, p, views in zip(found, central, log_p, strict=True):
        best = p.argsort(descending=True)[:3].tolist()
        assert [entry["index"] for entry in own["top"]] == best
        assert [entry["class"] for entry in own["top"]] == [CLASSES[i] for i in best]
        for entry in own["top"]:
            of_class = views.exp()[:, entry["index"]]
            assert entry["probability"] == pytest.approx(p[entry["index"]].item(), rel=1e-3)
            spread = {"mean": of_class.mean(), "std": of_class.std(correction=0)}
            spread |= {"min": of_class.min(), "max": of_class.max()}
            spread = {name: value.item() for name, value in spread.items()}
            assert entry["views"] == pytest.approx(spread, rel=1e-3, abs=1e-5)
        assert own["agree"] == sum(view.argmax().item() == best[0] for view in views)
        kl = [
            functional.kl_div(b, a, reduction="sum", log_target=True)
            for a, b in itertools.permutations(views, 2)
        ]
        assert own["invariance"] == pytest.approx(torch.stack(kl).mean().item(), rel=1e-3)
    assert {own["agree"] for own in found} != {4}  # the views do not always agree


def test_the_accuracy_of_evaluate(trained: Callable[..., Trained], tmp_path: Path) -> None:
    run = trained()
    root = write_folder(tmp_path / "own", {"test": 8})
    paths = find_images([str(root)])
    labels = [CLASSES[2 * i // len(paths)] for i in range(len(paths))]
    images = ImageSet.from_files(paths, labels, CLASSES)
    measured = Evaluation(images, run.config, CPU).measure(run.model, views=0)
    found = [CLASSES[i] for i in predicted_logits(run.folder, paths).argmax(1)]
    assert measured["top1"] == np.mean([a == b for a, b in zip(found, labels, strict=True)])


def test_a_network_for_cifar_takes_images_of_any_size(
    trained: Callable[..., Trained], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = trained(size=20, crop="pad")
    exact = find_images([str(folder / "test")])
    expected = evaluated_logits(run.model, run.config, exact, views=0)[:, 0]
    torch.testing.assert_close(predicted_logits(run.folder, exact), expected, **TOLERANCE)
    large = tmp_path / "large.png"
    with Image.open(exact[0]) as image:
        image.resize((60, 60), Image.Resampling.NEAREST).save(large)
    (own,) = run_json(capsys, run.folder, large, "--views", 2)
    (small,) = run_json(capsys, run.folder, exact[0], "--views", 2)
    assert own["top"][0]["class"] == small["top"][0]["class"]
    assert own["views"] == 2


class TestTheCommand:
    def test_a_paragraph_for_each_image(
        self, trained: Callable[..., Trained], folder: Path, capsys: pytest.CaptureFixture
    ) -> None:
        run = trained()
        images = sorted((folder / "test" / "red").iterdir())[:2]
        args = [str(run.folder), *map(str, images), "--views", "2"]
        assert cli.run(__main__.main, ["predict", *args]) == 0
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        assert captured.err == ""
        assert [line for line in lines if not line.startswith(" ")] == list(map(str, images))
        assert sum("%  class " in line for line in lines) == 2 * 5
        assert sum(line.endswith(" nats") for line in lines) == 2

    def test_unreadable_images_are_reported_and_the_others_predicted(
        self,
        trained: Callable[..., Trained],
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        run = trained()
        good = sorted((folder / "test" / "red").iterdir())[0]
        damaged, empty = tmp_path / "damaged.jpg", tmp_path / "empty\x1b.jpg"
        damaged.write_bytes(good.read_bytes()[:200])
        empty.touch()
        args = [run.folder, damaged, good, empty, "--json"]
        assert cli.run(predict.main, list(map(str, args))) == 2
        captured = capsys.readouterr()
        found = [json.loads(line) for line in captured.out.splitlines()]
        assert [own["image"] for own in found] == list(map(str, (damaged, good, empty)))
        assert ["error" in own for own in found] == [True, False, True]
        assert missing(caplog.text, str(damaged), str(tmp_path / "empty")) == []
        assert missing(captured.err, "error: ", "2 of 3") == []
        assert "\x1b" not in captured.out

    def test_names_are_shown_and_not_obeyed(
        self, trained: Callable[..., Trained], folder: Path, capsys: pytest.CaptureFixture
    ) -> None:
        run = trained()
        run.classes = ["\x1b[2J", *CLASSES[1:]]
        run.save()
        assert cli.run(predict.main, [str(run.folder), str(folder), "--top", "10"]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\\x1b[2J" in out

    def fail(self, capsys: pytest.CaptureFixture, *args: object) -> str:
        assert cli.run(predict.main, list(map(str, args))) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    def test_mistakes(
        self,
        trained: Callable[..., Trained],
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture,
    ) -> None:
        run, image = trained(), folder / "test"
        nowhere, nothing = tmp_path / "nowhere.jpg", tmp_path / "nothing"
        nothing.mkdir()
        assert "IMAGE" in self.fail(capsys, run.folder)
        assert str(nowhere) in self.fail(capsys, run.folder, image, nowhere)
        assert str(nothing) in self.fail(capsys, run.folder, nothing)
        for name in ("x.pt", "x.onnx", "x.pt2", "x.safetensors"):
            assert str(tmp_path / name) in self.fail(capsys, tmp_path / name, image)
        (file,) = run.export("onnx-with-preprocessing")
        capsys.readouterr()
        assert missing(self.fail(capsys, file, image, "--views", 2), "--views 2", file.name) == []

    def test_a_program_is_loaded_only_if_it_is_trusted(
        self,
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """torch.export.load unpickles, so it is not even called."""
        called: list[Any] = []
        monkeypatch.setattr(torch.export, "load", lambda path, **_: called.append(path))
        file = tmp_path / "x.pt2"
        file.write_bytes(b"anything")
        assert missing(self.fail(capsys, file, folder), str(file), "--trust") == []
        assert called == []
        self.fail(capsys, file, folder, "--trust")
        assert called == [file]

    @pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".safetensors"])
    def test_damaged_files(
        self,
        trained: Callable[..., Trained],
        folder: Path,
        tmp_path: Path,
        suffix: str,
        capsys: pytest.CaptureFixture,
    ) -> None:
        file = tmp_path / f"x{suffix}"
        file.write_bytes(b"nothing")
        assert str(file) in self.fail(capsys, file, folder, "--trust")
        os.truncate(file, 2**42)  # sparse
        assert str(file) in self.fail(capsys, file, folder, "--trust")

    @pytest.mark.parametrize("classes", [None, [1, 2], {"a": 1}, "names", [b"a", b"b"]], ids=str)
    def test_a_checkpoint_whose_classes_are_no_names(
        self,
        trained: Callable[..., Trained],
        folder: Path,
        classes: Any,
        capsys: pytest.CaptureFixture,
    ) -> None:
        run = trained()
        run.classes = classes
        run.save()
        assert str(run.folder / "best.pt") in self.fail(capsys, run.folder, folder)

    def test_onnx_of_other_programs(
        self,
        trained: Callable[..., Trained],
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture,
    ) -> None:
        """Without metadata, with metadata that lie, and with another output than logits."""
        import onnx

        run = trained()
        (file,) = run.export("onnx")
        capsys.readouterr()
        original = onnx.load(file)
        config = run.config.replace(size=24).to_flat()
        for changes in (
            {},
            {"config": json.dumps(run.config.to_flat()), "classes": '["a", "b"]'},
            {"config": json.dumps(config), "classes": json.dumps(CLASSES)},
        ):
            model = onnx.ModelProto()
            model.CopyFrom(original)
            onnx.helper.set_model_props(model, changes)
            onnx.save(model, tmp_path / "other.onnx")
            assert "other.onnx" in self.fail(capsys, tmp_path / "other.onnx", folder)

    def test_one_view_has_no_spread(
        self, trained: Callable[..., Trained], folder: Path, capsys: pytest.CaptureFixture
    ) -> None:
        message = self.fail(capsys, trained().folder, folder, "--views", "1")
        assert missing(message, "--views 0 2 1") == []
