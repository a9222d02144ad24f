"""Kernel launches of a training step, by model: at about 5 us each they are the time of a step of a
small network. Convolutions are counted as cuDNN has them, which a stand-in GPU lacks."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import nullgpu_client as gpu
import pytest
import torch
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.engine.learner import Learner
from fastaug.views.batch import ViewBatch

STAND_INS = {"devices": 1}
LAUNCHES = ("kernel", "blas", "memcpy", "memset")
DEVICE = torch.device("cuda:0")


def launch(name: str, like: Tensor, *sizes: int) -> Tensor:
    """A launch of cuDNN whose result is channels-last."""
    gpu.note("kernel", name, device=0)
    height, width = sizes[-2:]
    strides = (sizes[1] * height * width, 1, sizes[1] * width, sizes[1])
    return like.new_empty_strided(sizes, strides)


def to_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list,
    padding: list,
    dilation: list,
    *_: object,
) -> Tensor:
    to_channels_last(x), to_channels_last(weight)  # as torch does for cuDNN
    kernel = zip(x.shape[2:], weight.shape[2:], padding, dilation, stride, strict=True)
    sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s in kernel]
    result = launch("convolution", x, len(x), len(weight), *sides)
    return result if bias is None else result.add_(bias[:, None, None])


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: object, *rest: object
) -> tuple[Tensor | None, ...]:
    *_, (needs_x, needs_weight, needs_bias) = rest
    to_channels_last(grad), to_channels_last(x), to_channels_last(weight)
    return (
        launch("convolution, data gradient", x, *x.shape) if needs_x else None,
        launch("convolution, weight gradient", x, *weight.shape) if needs_weight else None,
        grad.sum((0, 2, 3)) if needs_bias else None,
    )


@pytest.fixture(autouse=True)
def convolutions_of_cudnn() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution", convolution, "CUDA")
    library.impl("convolution_backward", convolution_backward, "CUDA")
    yield
    library._destroy()


def launches(model: str, size: int, **changes: object) -> int:
    """Launches of the second step: torch prepares some things in the first one."""
    settings = {"model": model, "size": size, "views": 2, "batch_size": 4, "kernel": "reference"}
    learner = Learner(TrainConfig.from_flat(**(settings | changes)), 10, DEVICE)
    views = torch.zeros(2, 2, size, size, 3, device=DEVICE).permute(0, 1, 4, 2, 3)
    labels = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    name = f"{model} {changes}"
    for step in range(2):
        gpu.mark(f"{name} {step}")
        learner.start_step(step)
        learner.backward(ViewBatch(views, labels, labels))
        learner.update(0.1)
    gpu.mark(f"{name} end")
    found = gpu.selected(LAUNCHES, between=(f"{name} 1", f"{name} end"))
    for (kind, name), count in collections.Counter((r.kind, r.name) for r in found).most_common():
        print(f"{count:5} {kind} {name[:120]}")
    return len(found)


@pytest.mark.parametrize(
    ("model", "size", "changes", "budget"),
    [
        ("wrn-16-4", 32, {}, 235),
        ("wrn-16-4", 32, {"precision": "bf16"}, 310),
        ("resnet18", 32, {}, 330),
        ("resnet18", 32, {"precision": "bf16", "ema": 0.9, "clip_norm": 1.0}, 400),
        ("resnet18", 32, {"optimizer": "adamw", "layer_decay": 0.7}, 385),
        ("resnet18", 32, {"optimizer": "lion"}, 405),
        ("resnet18", 32, {"optimizer": "nadamw"}, 355),
        ("resnet18", 32, {"optimizer": "lamb"}, 1350),
        ("resnet18", 32, {"optimizer": "muon"}, 880),
        ("resnet18", 32, {"agc": 0.01}, 510),
        ("resnet18", 32, {"freeze": ("backbone",)}, 190),
        ("nf_resnet50", 64, {"precision": "bf16"}, 1280),
        ("nfnet_f0", 64, {"precision": "bf16"}, 1810),
    ],
)
def test_launches_of_a_step(model: str, size: int, changes: dict, budget: int) -> None:
    assert launches(model, size, **changes) <= budget
