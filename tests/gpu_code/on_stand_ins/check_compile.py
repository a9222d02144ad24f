"""torch.compile on a stand-in GPU: cuDNN's layouts, Triton's kernels, and CUDA graphs of them."""

from __future__ import annotations

import nullgpu_client as gpu
import pytest
import torch
from torch import Tensor, nn

STAND_INS = {"devices": 1, "functional": True, "capability": 90}
STEPS = 4


def losses(device: str, compiled: bool) -> list[float]:
    """A channels-last network with batch norm, as the trainer's are."""
    torch.manual_seed(0)
    layers = (
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )
    model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    random, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        images = torch.randn(4, 3, 8, 8, generator=random).to(device)
        labels = torch.randint(5, (4,), generator=random).to(device)
        images = images.contiguous(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_compiled_training_has_the_losses_of_the_cpu() -> None:
    expected = losses("cpu", compiled=False)
    with gpu.marked("compiled"):
        found = losses("cuda", compiled=True)
    assert found == pytest.approx(expected, rel=1e-5)
    within = ("compiled", "/compiled")
    assert gpu.count("kernel", name="triton_", between=within) > 0
    assert gpu.count("graph", between=within) == 2 * (STEPS - 1)  # the first step warms up
    assert gpu.count("replayed", name="kernel triton_", between=within) > 0
    gpu.assert_no_errors()


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_of_a_convolution_have_its_layout(size: int) -> None:
    def strides(format: torch.memory_format) -> list[tuple[int, ...]]:
        weight = torch.zeros(4, 8, size, size, device="cuda").contiguous(memory_format=format)
        images = torch.zeros(2, 8, 6, 6, device="cuda").contiguous(memory_format=format)
        made: Tensor = nn.functional.conv2d(images.requires_grad_(), weight.requires_grad_())
        made.sum().backward()
        assert images.grad is not None
        assert weight.grad is not None
        return [tensor.stride() for tensor in (made, images.grad, weight.grad)]

    area, side = size * size, 7 - size
    assert strides(torch.channels_last) == [
        *((4 * side * side, 1, 4 * side, 4), (8 * 36, 1, 8 * 6, 8), (8 * area, 1, 8 * size, 8)),
    ]
    assert strides(torch.contiguous_format)[0] == (4 * side * side, side * side, side, 1)
