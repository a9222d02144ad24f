"""Files of weights against timm's own network, whose state they hold."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from expect import raises
from timm.data import resolve_data_config
from timm_files import NAME, save_weights, trained_network
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError, ConfigError, FastaugError
from fastaug.models import timm_weights
from fastaug.models.build import build_model
from fastaug.models.pretrained import match_weights
from fastaug.models.timm_weights import data_settings, pretrained_weights
from fastaug.normalization import pixel_statistics
from fastaug.runs.initial_weights import read_initial_weights, settings_of_weights

CLASSES = 7
NAMES = tuple("abcdefg")
ONE = torch.ones((), dtype=torch.int64)


def configured(weights: Path, model: str = f"timm/{NAME}", **changes: Any) -> TrainConfig:
    return TrainConfig.from_flat(model=model, weights=str(weights), size=32, **changes)


def loaded(
    weights: Path, model: str = f"timm/{NAME}", classes: int = CLASSES, size: int = 32
) -> tuple[nn.Module, list[str]]:
    """A new network with the weights of a file, and the report."""
    initial = read_initial_weights(configured(weights, model).replace(size=size))
    assert initial is not None
    network = build_model(model, classes, image_size=size)
    return network.eval(), initial.load_into(network, model, NAMES[:classes])


def check_equal(network: nn.Module, oracle: nn.Module) -> None:
    """All weights to the bit, and the logits."""
    own, theirs = network.state_dict(), oracle.state_dict()
    assert own.keys() == theirs.keys()
    assert [name for name in own if not torch.equal(own[name], theirs[name])] == []
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(network(images), oracle(images), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def oracle() -> nn.Module:
    return trained_network(CLASSES)


def other(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {f"{prefix}{name}": value for name, value in state.items()}


CONTENTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": dict,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "model": lambda s: {"model": s, "optimizer": {"state": {}, "param_groups": []}},
    "model_state_dict": lambda s: {"model_state_dict": s},
    "state_dict_ema": lambda s: {"state_dict": other(s), "state_dict_ema": s},
    "model_ema": lambda s: {"model": other(s), "model_ema": prefixed("module.")(s)},
    "no average": lambda s: {"model": s, "model_ema": None},
    "timm's training": lambda s: {
        "state_dict": s,
        "arch": NAME,
        "args": argparse.Namespace(lr=0.1, opt="adamw"),
        "version": 2,
    },
    "parameters": lambda s: {k: nn.Parameter(v, False) for k, v in s.items()},
    "DDP": prefixed("module."),
    "torch.compile": prefixed("_orig_mod."),
    "both": prefixed("module._orig_mod."),
    "Lightning model": lambda s: {"state_dict": prefixed("model.")(s), "global_step": 1},
    "Lightning net": lambda s: {"state_dict": prefixed("net._orig_mod.")(s)},
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("former", [False, True], ids=["zip", "before torch 1.6"])
def test_a_state_dict_in_every_wrapper(
    content: str, former: bool, oracle: nn.Module, tmp_path: Path
) -> None:
    saved = CONTENTS[content](oracle.state_dict())
    torch.save(saved, tmp_path / "w.pth", _use_new_zipfile_serialization=not former)
    network, report = loaded(tmp_path / "w.pth")
    check_equal(network, oracle)
    assert len(report) == 1  # nothing was left out


def test_safetensors(oracle: nn.Module, tmp_path: Path) -> None:
    network, report = loaded(save_weights(oracle, tmp_path / "w.safetensors"))
    check_equal(network, oracle)
    assert len(report) == 1


def test_weights_in_half_precision_become_fp32(oracle: nn.Module, tmp_path: Path) -> None:
    state = oracle.state_dict()
    halves = {k: v.half() if v.is_floating_point() else v for k, v in state.items()}
    torch.save(halves, tmp_path / "w.pt")
    network, _ = loaded(tmp_path / "w.pt")
    for name, value in network.state_dict().items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, halves[name].to(value.dtype)), name


def test_a_head_of_another_size_is_replaced_and_reported(tmp_path: Path) -> None:
    theirs = trained_network(5)
    path = save_weights(theirs, tmp_path / "w.pt")
    torch.manual_seed(3)
    new = build_model(f"timm/{NAME}", CLASSES).state_dict()
    torch.manual_seed(3)
    network, report = loaded(path)
    assert "replaced: fc.weight [5, 96] -> [7, 96], fc.bias [5] -> [7]" in report
    for name, value in network.state_dict().items():
        source = new if name.startswith("fc.") else theirs.state_dict()
        assert torch.equal(value, source[name]), name


def test_a_file_without_a_head(oracle: nn.Module, tmp_path: Path) -> None:
    state = oracle.state_dict()
    torch.save({k: v for k, v in state.items() if not k.startswith("fc.")}, tmp_path / "w.pt")
    _, report = loaded(tmp_path / "w.pt")
    assert "replaced: fc.weight, fc.bias" in report


def test_what_did_not_match_is_listed(oracle: nn.Module, tmp_path: Path) -> None:
    state = dict(oracle.state_dict())
    del state["layer1.0.bn1.weight"]
    state["layer1.0.bn1.bias"] = torch.zeros(3)
    shape = list(oracle.state_dict()["layer1.0.bn1.bias"].shape)
    state |= {f"decoder.{i}": torch.zeros(2) for i in range(5)}
    torch.save(state, tmp_path / "w.pt")
    _, (_, *report) = loaded(tmp_path / "w.pt")
    listed = [line.partition(": ")[2] for line in report]
    assert listed == [
        f"layer1.0.bn1.bias [3] -> {shape}",
        "layer1.0.bn1.weight",
        "decoder.0, decoder.1, decoder.2 and 2 more",
    ]


def test_another_architecture_is_refused_with_counts(tmp_path: Path) -> None:
    """ResNet-50's batch norms and 3x3 convolutions fit into ResNet-18, most of its tensors."""
    theirs = timm.create_model("resnet50")
    path = save_weights(theirs, tmp_path / "w.pt")
    own = timm.create_model("resnet18").state_dict()
    body = {k: v for k, v in own.items() if not k.startswith("fc.")}
    state = theirs.state_dict()
    fitting = {k: v for k, v in body.items() if k in state and state[k].shape == v.shape}
    assert len(fitting) > 0.8 * len(body)
    counts = [sum(v.numel() for v in some.values()) for some in (fitting, body)]
    with raises(CheckpointError, f"timm/resnet18 {counts[0]:,} {counts[1]:,}"):
        loaded(path, "timm/resnet18")


@pytest.mark.parametrize("prefix", ["", "module.model."])
def test_a_larger_network_of_the_family_is_refused_with_counts(prefix: str, tmp_path: Path) -> None:
    """ResNet-34 has all weights of ResNet-18, and as many again."""
    theirs = timm.create_model("resnet34").state_dict()
    torch.save(prefixed(prefix)(theirs), tmp_path / "w.pt")
    own = timm.create_model("resnet18").state_dict()
    assert own.keys() < theirs.keys()
    body = {
        name: value.numel()
        for name, value in theirs.items()
        if not name.startswith("fc.") and value.is_floating_point()
    }
    extra = sum(count for name, count in body.items() if name not in own)
    with raises(CheckpointError, f"timm/resnet18 {extra:,} {sum(body.values()):,} --model"):
        loaded(tmp_path / "w.pt", "timm/resnet18")


def test_further_modules_in_the_file_do_not_matter(oracle: nn.Module, tmp_path: Path) -> None:
    state = dict(oracle.state_dict())
    extras = {f"ema.module.{name}": value + 1 for name, value in state.items()}
    extras |= {"head_dist.weight": torch.ones(1000, 96), "aux.conv.weight": torch.ones(10**6)}
    extras |= {"fc_teacher.weight": torch.ones(1000, 96), "decoder.0.weight": torch.ones(10**6)}
    extras |= {"layer1.0.attn_mask": torch.ones(64), "layer1.0.bn9.num_batches_tracked": ONE}
    extras |= {"layer1.0.relative_position_index": torch.ones(10**6, dtype=torch.int64)}
    torch.save({**extras, **state}, tmp_path / "w.pt")
    network, report = loaded(tmp_path / "w.pt")
    check_equal(network, oracle)
    assert [line for line in report if f"and {len(extras) - 3:,} more" in line]


@pytest.mark.parametrize("model", ["wrn-10-1", "resnet18", "timm/vit_tiny_patch16_224"])
def test_nothing_matches(model: str, oracle: nn.Module, tmp_path: Path) -> None:
    path = save_weights(oracle, tmp_path / "w.safetensors")
    with raises(CheckpointError, f"--weights {path} {model}"):
        loaded(path, model)


def test_nonfinite_weights_are_refused(oracle: nn.Module, tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in oracle.state_dict().items()}
    state["conv1.0.weight"][0, 0, 0, 0] = torch.nan
    torch.save(state, tmp_path / "w.pt")
    with raises(CheckpointError, "conv1.0.weight"):
        loaded(tmp_path / "w.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_position_embeddings_are_resized_as_timm_does(suffix: str, tmp_path: Path) -> None:
    name = "test_vit"
    theirs = trained_network(CLASSES, name)
    path = save_weights(theirs, tmp_path / f"w{suffix}")
    network, report = loaded(path, f"timm/{name}", size=64)
    resized = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(path), "num_classes": CLASSES},
        num_classes=CLASSES,
        img_size=64,
    ).state_dict()
    own = network.state_dict()
    assert own["pos_embed"].shape != theirs.state_dict()["pos_embed"].shape
    assert [k for k in own if not torch.equal(own[k], resized[k])] == []
    assert len(report) == 1


# --- files that are damaged, hostile, or something else ---


class Hostile:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._marker),)


def hostile_pickle(folder: Path) -> None:
    (folder / "w.pt").write_bytes(pickle.dumps(Hostile(folder / "ran"), 2))


def hostile_archive(folder: Path) -> None:
    torch.save({"model": {"w": Hostile(folder / "ran")}}, folder / "w.pt")


def hostile_former(folder: Path) -> None:
    state = {"w": Hostile(folder / "ran")}
    torch.save(state, folder / "w.pt", _use_new_zipfile_serialization=False)


class HugeBytes:
    def __reduce__(self) -> tuple:
        return bytearray, (2**40,)


def huge_bytes(folder: Path) -> None:
    torch.save({"w": HugeBytes()}, folder / "w.pt")


def huge_tensor(folder: Path) -> None:
    """A few bytes that claim 4 TB, by strides of 0."""
    torch.save({"w": torch.zeros(1).expand(2**40)}, folder / "w.pt")


def compressed(folder: Path) -> None:
    torch.save({"w": torch.zeros(2**20)}, folder / "stored.pt")
    with (
        zipfile.ZipFile(folder / "stored.pt") as stored,
        zipfile.ZipFile(folder / "w.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))


def truncated(folder: Path) -> None:
    torch.save(trained_network().state_dict(), folder / "w.pt")
    os.truncate(folder / "w.pt", 10_000)


def truncated_former(folder: Path) -> None:
    state = trained_network().state_dict()
    torch.save(state, folder / "w.pt", _use_new_zipfile_serialization=False)
    os.truncate(folder / "w.pt", 100_000)


def empty(folder: Path) -> None:
    (folder / "w.pt").touch()


def text(folder: Path) -> None:
    (folder / "w.pt").write_text("version https://git-lfs.github.com/spec/v1\n")


def a_list(folder: Path) -> None:
    torch.save([torch.zeros(2)], folder / "w.pt")


def no_tensors(folder: Path) -> None:
    torch.save({"epoch": 3}, folder / "w.pt")


BAD_FILES = [hostile_pickle, hostile_archive, hostile_former, huge_bytes, huge_tensor, compressed]
# Found before torch loads anything.
REASONS = {hostile_archive: "mkdir", hostile_former: "mkdir", huge_bytes: "bytearray"}
REASONS |= {compressed: "compressed"}
BAD_FILES += [truncated, truncated_former, empty, text, a_list, no_tensors]


@pytest.mark.parametrize("write", BAD_FILES, ids=lambda write: write.__name__)
def test_a_bad_file_ends_in_one_line(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    reason = REASONS.get(write, "")
    for read in (read_initial_weights, settings_of_weights):
        with raises(CheckpointError, f"--weights {tmp_path / 'w.pt'} {reason}"):
            read(configured(tmp_path / "w.pt"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{}", b"\1\0\0\0\0\0\0\0{"])
def test_a_bad_safetensors_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with raises(CheckpointError, f"--weights {tmp_path / 'w.safetensors'}"):
        read_initial_weights(configured(tmp_path / "w.safetensors"))


def test_no_such_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")  # reading it would block
    for name in ("missing.pt", "pipe.pt"):
        with raises(ConfigError, f"--weights {tmp_path / name} safetensors"):
            read_initial_weights(configured(tmp_path / name))
    with raises(FastaugError, f"--weights {tmp_path} safetensors"):
        read_initial_weights(configured(tmp_path))


def test_weights_or_pretrained() -> None:
    with raises(ConfigError, "--weights w.pt --pretrained"):
        TrainConfig.from_flat(weights="w.pt", pretrained=True)


# --- what timm publishes ---


def test_timm_s_nfnet_has_the_weights_of_ours() -> None:
    """DeepMind's weights fit; tests/unit/test_nf.py has the function."""
    with torch.device("meta"):
        ours, theirs = build_model("nfnet_f0", 1000), timm.create_model("dm_nfnet_f0")
        match = match_weights(ours, theirs.state_dict(), "nfnet_f0")
    assert match.matched == match.total > 60e6
    assert not match.report()


@pytest.mark.parametrize("model", ["nf_resnet50", "wrn-16-4", "resnet18", "timm/test_resnet2"])
def test_models_without_published_weights(model: str) -> None:
    with raises(ConfigError, model):
        pretrained_weights(model, 32)


@pytest.mark.parametrize("model", ["wrn-16-4", "resnet18", "nf_resnet50"])
def test_only_models_that_timm_has_are_suggested(model: str) -> None:
    with raises(ConfigError) as caught:
        pretrained_weights(model, 32)
    (named,) = re.findall(r"timm/([\w-]+)", str(caught.value))
    assert named in {*timm.list_models(), "NAME"}
    assert (named == model) == (model in timm.list_models())


def test_timm_s_nf_resnet_is_another_network() -> None:
    with torch.device("meta"):
        ours, theirs = build_model("nf_resnet50", 1000), timm.create_model("nf_resnet50")
        match = match_weights(ours, theirs.state_dict(), "nf_resnet50")
    with raises(CheckpointError, "FILE nf_resnet50"):
        match.check("FILE", "nf_resnet50")


def test_data_settings_of_all_of_timm_s_weights() -> None:
    for name in timm.list_pretrained():
        published = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
        config = TrainConfig().replace(**data_settings(f"timm/{name}"))
        mean, deviation = pixel_statistics(config.view.normalize)
        assert mean == pytest.approx([255 * value for value in published["mean"]])
        assert deviation == pytest.approx([255 * value for value in published["std"]])
        assert config.view.interpolation == published["interpolation"]
        assert config.view.antialias


def test_another_filter_becomes_bicubic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = timm.get_pretrained_cfg("resnet18")
    source.interpolation = "lanczos"
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: source)
    with caplog.at_level("INFO"):
        assert timm_weights.data_settings("timm/resnet18")["interpolation"] == "bicubic"
    assert "lanczos" in caplog.text


def test_a_network_of_our_own_has_no_published_settings() -> None:
    assert data_settings("wrn-16-4") == {}
