"""Exported files, read by other libraries and compared with the network; and what is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from expect import missing
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fastaug
from fastaug import __main__, cli, export
from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError
from fastaug.exporters import formats as exporting
from fastaug.exporters.folding import fold_constants
from fastaug.models.build import build_model
from fastaug.runs import checkpoint
from fastaug.runs.weights import (
    model_from_safetensors,
    safetensors_metadata,
    weights_as_safetensors,
)

Tiny = Callable[..., TrainConfig]
Save = Callable[..., tuple[Path, nn.Module]]
CLASSES = ["blue", "green", "red"]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2"}


def network_of(config: TrainConfig) -> nn.Module:
    """All weights are moved: gains and running means start at 0, where mistakes do not show."""
    torch.manual_seed(0)
    model = build_model(config.model.model, len(CLASSES), image_size=config.view.size)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.randn(value.shape), alpha=0.01 if value.ndim > 1 else 0.1)
    return model.eval()


@pytest.fixture
def save(tiny: Tiny, tmp_path: Path) -> Save:
    """A checkpoint with the fields of the trainer's that concern the network, and the network."""

    def write(name: str = "best.pt", ema: bool = False, **changes: Any) -> tuple[Path, nn.Module]:
        config = tiny(**changes)
        model = network_of(config)
        weights = model.state_dict()
        state: dict[str, Any] = {
            "config": config.to_flat(),
            "classes": CLASSES,
            "model": weights,
            "ema": None,
            "step": 1234,
        }
        if ema:
            averaged = {f"module.{n}": v for n, v in weights.items()}
            state["ema"] = {"n_averaged": torch.tensor(3), **averaged}
            state["model"] = {n: torch.zeros_like(v) for n, v in weights.items()}
        path = tmp_path / "run" / name
        path.parent.mkdir(exist_ok=True)
        checkpoint.write_checkpoint(path, state)
        return path, model

    return write


def metadata_of(config: TrainConfig) -> dict[str, str]:
    return safetensors_metadata({"config": config.to_flat(), "classes": CLASSES, "step": 1})


def images_of(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(9))


def onnx_logits(path: Path, images: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def program_logits(path: Path, images: Tensor) -> Tensor:
    return torch.export.load(path).module()(images)


def safetensors_logits(path: Path, images: Tensor) -> Tensor:
    """From the metadata of the file, without fastaug.runs.weights."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    model = build_model(
        metadata["model"],
        len(json.loads(metadata["classes"])),
        image_size=int(metadata["size"]),
    )
    model.load_state_dict(load_file(path))
    return model.eval()(images)


LOGITS = {
    "onnx": onnx_logits,
    "torch-export": program_logits,
    "safetensors": safetensors_logits,
}


def fail(capsys: pytest.CaptureFixture, *args: object) -> str:
    """The one line that a wrong command ends with."""
    assert cli.run(export.main, [str(arg) for arg in args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def check_logits(files: dict[str, Path], network: nn.Module, size: int) -> None:
    for count in (1, 4):
        images = images_of(count, size)
        with torch.no_grad():
            expected = network(images)
            for to, file in files.items():
                torch.testing.assert_close(LOGITS[to](file, images), expected, **TOLERANCE)


def test_files_of_a_run_give_the_logits_of_its_network(
    save: Save, capfd: pytest.CaptureFixture
) -> None:
    path, network = save()
    files = {to: path.with_suffix(suffix) for to, suffix in FORMATS.items()}
    for to in files:
        assert cli.run(export.main, [str(path), "--to", to]) == 0
    beside = [path.with_name(name) for name in ("preprocess.json", "preprocess.py")]
    assert sorted(path.parent.iterdir()) == sorted([path, *files.values(), *beside])
    check_logits(files, network, size=16)
    check_that_files_describe_themselves(files["onnx"], files["torch-export"])
    captured = capfd.readouterr()
    assert captured.out.count("logits differ by") == len(files)
    assert captured.err == ""  # not a word of the exporters


# Formats that take a while are left out where they add nothing: onnx has the same traced program
# in it as torch-export, and safetensors differ by buffers, which resnet18 has.
@pytest.mark.parametrize(
    ("model", "size", "formats"),
    [
        ("resnet18", 16, ("safetensors", "onnx")),
        ("nf_resnet26", 32, ("torch-export", "onnx")),
        ("timm/test_vit", 32, ("safetensors", "onnx")),
    ],
)
def test_every_family_of_models(
    tiny: Tiny, tmp_path: Path, model: str, size: int, formats: tuple[str, ...]
) -> None:
    config = tiny(model=model, size=size)
    network = network_of(config)
    metadata = metadata_of(config)
    files = {to: tmp_path / f"x{FORMATS[to]}" for to in formats}
    for to, file in files.items():
        exported = exporting.export_network(to, file, network, config, metadata)
        assert exported.difference <= 1e-5 * exported.largest_logit
    check_logits(files, network, size)
    if model == "nf_resnet26":
        check_that_weights_are_folded(files["onnx"], network)


def test_the_average_is_what_is_written(save: Save) -> None:
    path, network = save(ema=True)
    assert cli.run(export.main, [str(path.parent)]) == 0
    in_a_run = path.with_name("x.safetensors")  # as the trainer writes it beside best.pt
    in_a_run.write_bytes(weights_as_safetensors(checkpoint.load_checkpoint(path)))
    expected = network.state_dict()
    for file in (path.with_suffix(".safetensors"), in_a_run):
        written = load_file(file)
        assert set(written) == set(expected)
        assert all(torch.equal(written[name], value) for name, value in expected.items())


def test_the_metadata_rebuild_the_network(save: Save) -> None:
    path, network = save(normalize="cifar", crop="pad")
    state = checkpoint.load_checkpoint(path)
    out = path.with_name("x.safetensors")
    out.write_bytes(weights_as_safetensors(state))
    with safe_open(out, framework="numpy") as file:  # without torch
        metadata = file.metadata()
        stem = file.get_tensor("stem.weight")
    np.testing.assert_array_equal(stem, network.state_dict()["stem.weight"].numpy())
    assert json.loads(metadata.pop("config")) == state["config"]
    assert "0 to 255" in metadata.pop("input")
    about = json.loads(metadata.pop("preprocessing"))
    decoding = about.pop("decoding")
    assert missing(decoding, "RGB", "uint8", "alpha", "16-bit", "EXIF") == []
    assert about == {
        "crop_share": 1.0,  # --crop pad
        "size": 16,
        "interpolation": "bicubic",
        "antialias": False,
        "mean": [125.3, 123.0, 113.9],
        "std": [63.0, 62.1, 66.7],
        "layout": "NCHW, float32",
        "classes": CLASSES,
    }
    assert metadata == {
        "format": "pt",
        "model": "wrn-10-1",
        "classes": '["blue", "green", "red"]',
        "size": "16",
        "mean": "[125.3, 123.0, 113.9]",
        "std": "[63.0, 62.1, 66.7]",
        "fastaug": fastaug.__version__,
        "step": "1234",
    }
    images, trained = images_of(3, 16), model_from_safetensors(out)
    assert trained.classes == ("blue", "green", "red")
    assert trained.config.to_flat() == state["config"]
    assert not trained.model.training
    with torch.no_grad():
        assert torch.equal(trained.model(images), network(images))


def test_the_metadata_have_a_normalization_given_as_numbers(save: Save) -> None:
    path, _ = save(normalize=(0.5, (0.229, 0.224, 0.225)))
    out = path.with_name("x.safetensors")
    out.write_bytes(weights_as_safetensors(checkpoint.load_checkpoint(path)))
    with safe_open(out, framework="numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata["mean"]) == [127.5, 127.5, 127.5]
    assert json.loads(metadata["std"]) == [58.395, 57.12, 57.375]


def check_that_files_describe_themselves(onnx_file: Path, program_file: Path) -> None:
    session = onnxruntime.InferenceSession(str(onnx_file))
    extra = {"fastaug.json": ""}
    torch.export.load(program_file, extra_files=extra)
    for found in (session.get_modelmeta().custom_metadata_map, json.loads(extra["fastaug.json"])):
        assert json.loads(found["classes"]) == CLASSES
        assert found["size"] == "16"
        assert json.loads(found["preprocessing"]) == json.loads(
            onnx_file.with_name("preprocess.json").read_text()
        )
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.shape) == ("images", ["batch", 3, 16, 16])
    assert (logits.name, logits.shape) == ("logits", ["batch", 3])
    assert (images.type, logits.type) == ("tensor(float)", "tensor(float)")


def check_that_weights_are_folded(file: Path, network: nn.Module) -> None:
    """A norm-free network is written as convolutions, with only their weights."""
    graph = onnx.load(file).graph
    operations = Counter(node.op_type for node in graph.node)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in network.modules())
    assert operations["Conv"] == convolutions
    assert operations["ReduceMean"] <= 1  # the pooling
    assert not {"BatchNormalization", "Sqrt", "Div", "Sub"} & set(operations)
    size = file.stat().st_size
    weights = sum(parameter.nbytes for parameter in network.parameters())
    assert size == pytest.approx(weights, rel=0.01)


class TestFolding:
    class Scaled(nn.Module):
        """x * (a standardized weight), and a weight that only it needs."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
            self.shift = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * ((self.weight - self.weight.mean()) * 2) + self.shift

    class InPlace(Scaled):
        """A weight's copy that the images are added to: another one for every call."""

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * 2).add_(x.sum()) + self.shift

    def folded(self, module: nn.Module) -> torch.fx.GraphModule:
        return fold_constants(torch.export.export(module, (torch.ones(2, 3),)).module())

    def test_what_follows_from_weights_is_a_weight(self) -> None:
        folded = self.folded(self.Scaled())
        left = {name: value.tolist() for name, value in folded.state_dict().items()}
        assert left.pop("shift") == [1, 1, 1]
        ((_, product),) = left.items()
        assert product == pytest.approx([-8 / 3, -2 / 3, 10 / 3])
        expected = [[1 - 8 / 3, 1 - 2 / 3, 1 + 10 / 3]] * 2
        np.testing.assert_allclose(folded(torch.ones(2, 3)).detach(), expected, rtol=1e-6)

    def test_what_is_changed_in_place_is_left(self) -> None:
        folded = self.folded(self.InPlace())
        for _ in range(2):
            assert folded(torch.ones(2, 3)).tolist() == [9.0, 11.0, 15.0]


class TestTheCheck:
    """A file that does not compute the network's logits is never left behind."""

    @pytest.mark.parametrize("to", FORMATS)
    def test_one_wrong_weight_is_found(
        self, save: Save, to: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        path, _ = save()
        right = exporting.FORMATS[to]

        def write(file: Path, model: nn.Module, *rest: Any) -> None:
            with torch.no_grad():
                weight = model.get_parameter("blocks.1.conv2.weight")
                before = weight[0, 0, 1, 1].clone()
                weight[0, 0, 1, 1] += 1
                right.write(file, model, *rest)
                weight[0, 0, 1, 1] = before

        wrong = exporting.Format(right.suffix, write, right.read)
        monkeypatch.setitem(exporting.FORMATS, to, wrong)
        out = path.with_suffix(FORMATS[to])
        out.write_bytes(b"an older file")
        assert fail(capsys, path, "--to", to).startswith(f"error: {out}: not written")
        assert out.read_bytes() == b"an older file"
        assert sorted(path.parent.iterdir()) == sorted([path, out])

    def test_a_fixed_batch_size_is_found(
        self, save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        path, _ = save()
        monkeypatch.setattr(exporting, "_ANY_BATCH", None)
        error = fail(capsys, path, "--to", "torch-export")
        assert "wrn-10-1" in error
        assert "torch-export" in error
        assert list(path.parent.iterdir()) == [path]

    def test_a_network_without_numbers_is_refused(
        self, save: Save, capsys: pytest.CaptureFixture
    ) -> None:
        path, _ = save()
        state = checkpoint.load_checkpoint(path)
        state["model"]["head.bias"][0] = torch.nan
        checkpoint.write_checkpoint(path, state)
        assert "not finite" in fail(capsys, path)
        assert list(path.parent.iterdir()) == [path]


class TestErrors:
    def test_places_that_cannot_be_written(self, save: Save, capsys: pytest.CaptureFixture) -> None:
        path, _ = save()
        for out in (path.parent, path.parent / "nowhere" / "x.safetensors"):
            assert f"--out {out}: " in fail(capsys, path, "--out", out)
        (path.parent / "best.safetensors").mkdir()
        assert f"{path.with_suffix('.safetensors')}: " in fail(capsys, path)

    def test_a_suffix_of_another_format(self, save: Save, capsys: pytest.CaptureFixture) -> None:
        path, _ = save()
        error = fail(capsys, path, "--out", path.with_name("x.onnx"))
        assert ".safetensors" in error
        assert "--to onnx" in error
        error = fail(capsys, path, "--to=onnx", "--out=x.bin")
        assert error.startswith("error: --out x.bin: ")
        assert ".onnx" in error

    def test_files_beside_the_export_that_are_not_its_own(
        self, save: Save, capsys: pytest.CaptureFixture
    ) -> None:
        path, _ = save()
        assert cli.run(export.main, [str(path)]) == 0
        assert cli.run(export.main, [str(path)]) == 0  # its own are replaced
        description, code = (path.with_name(f"preprocess.{end}") for end in ("json", "py"))
        before = description.read_text()
        description.write_text(before.replace("bicubic", "bilinear"))
        assert str(description) in fail(capsys, path)
        assert "bilinear" in description.read_text()
        description.write_text("[" * 100_000)
        assert str(description) in fail(capsys, path)
        description.unlink()
        code.write_text("print('mine')\n")
        assert str(code) in fail(capsys, path)
        assert code.read_text() == "print('mine')\n"
        code.unlink()
        code.mkdir()
        assert str(code) in fail(capsys, path)

    def test_no_checkpoint(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        assert f"{tmp_path}: " in fail(capsys, tmp_path)
        assert "nothing.pt" in fail(capsys, tmp_path / "nothing.pt")
        (tmp_path / "last.pt").touch()
        assert missing(fail(capsys, tmp_path), str(tmp_path / "last.pt")) == []

    def test_a_folder_of_runs(self, save: Save, capsys: pytest.CaptureFixture) -> None:
        run = save()[0].parent
        assert missing(fail(capsys, run.parent), str(run.parent), str(run)) == []

    def test_without_the_packages(
        self, save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        path, _ = save()
        monkeypatch.setitem(sys.modules, "onnxscript", None)
        assert "pip install 'fastaug[export]'" in fail(capsys, path, "--to", "onnx")

    def test_an_unknown_format(self, capsys: pytest.CaptureFixture) -> None:
        assert "torch-export" in fail(capsys, "best.pt", "--to", "tflite")

    def test_files_of_other_programs(self, tiny: Tiny, tmp_path: Path) -> None:
        file = tmp_path / "x.safetensors"
        file.write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match=str(file)):
            model_from_safetensors(file)
        save_file({"w": torch.zeros(1)}, file)
        with pytest.raises(CheckpointError, match="classes and config"):
            model_from_safetensors(file)
        for shape in (1, len(CLASSES)):
            save_file({"w": torch.zeros(shape)}, file, metadata_of(tiny()))
            with pytest.raises(CheckpointError, match=r"wrn-10-1"):
                model_from_safetensors(file)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("classes", "[" * 100_000),
            ("classes", "no JSON"),
            ("classes", '{"a": 1}'),
            ("classes", "[1, 2, 3]"),
            ("classes", json.dumps(["x"] * 10_000_000)),  # nothing is built for them
            ("config", "[]"),
            ("config", "null"),
            ("config", '{"size": {}}'),
            ("config", '{"normalize": [[], 1]}'),
            ("config", '{"size": 1000000}'),
            ("config", '{"model": "wrn-10-1", "unheard": 1}'),
            ("config", '{"model": "wrn-10-9999"}'),  # 3 TB of weights
            ("config", json.dumps({"model": f"wrn-{'9' * 5000}-1"})),
        ],
    )
    def test_metadata_of_strangers(self, tiny: Tiny, tmp_path: Path, key: str, value: str) -> None:
        file = tmp_path / "x.safetensors"
        save_file({"w": torch.zeros(3)}, file, metadata_of(tiny()) | {key: value})
        with pytest.raises(CheckpointError, match=str(file)):
            model_from_safetensors(file)


def test_another_name_in_this_folder(
    save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path, _ = save("last.pt", ema=True)
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(__main__.main, ["export", "last.pt", "--out", "x.safetensors"]) == 0
    assert "last.pt (step 1,234, moving average)" in capsys.readouterr().out
    assert (path.parent / "x.safetensors").exists()
