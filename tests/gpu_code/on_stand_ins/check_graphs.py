"""CUDA graphs on stand-in GPUs: what a GPU refuses during capture, and replays with values."""

from __future__ import annotations

from collections.abc import Callable

import nullgpu_client as gpu
import pytest
import torch
from torch import Tensor, nn

STAND_INS = {"devices": 1, "functional": True}
WARM_UP, REPLAYS = 2, 3


class Training:
    """A small training with batch norm, whose step reads static inputs."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.images = torch.zeros(4, 3, 6, 6, device=device)
        self.labels = torch.zeros(4, dtype=torch.long, device=device)
        self._random = torch.Generator().manual_seed(1)

    def load(self) -> None:
        self.images.copy_(torch.randn(4, 3, 6, 6, generator=self._random))
        self.labels.copy_(torch.randint(5, (4,), generator=self._random))

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        labels = self.labels.view(4, 1).repeat(1, 1).flatten()  # indices made inside of the graph
        loss = nn.functional.cross_entropy(self.model(self.images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[Tensor]:
        return [value.detach().cpu().clone() for value in self.model.state_dict().values()]


def eager(device: str, steps: int) -> tuple[list[float], list[Tensor]]:
    training, losses = Training(device), []
    for _ in range(steps):
        training.load()
        losses.append(training.step().item())
    return losses, training.state()


def warmed_up(training: Training) -> list[float]:
    side, losses = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            training.load()
            losses.append(training.step().item())
    torch.cuda.current_stream().wait_stream(side)
    return losses


def test_a_captured_training_step_replays_with_the_cpu_values() -> None:
    training, graph = Training("cuda"), torch.cuda.CUDAGraph()
    losses = warmed_up(training)
    before = training.state()
    with gpu.marked("capture"), torch.cuda.graph(graph):
        loss = training.step()
    assert all(map(torch.equal, before, training.state())), "the capture changed values"
    assert gpu.count("op", between=("capture", "/capture")) == 0
    nodes = gpu.count("captured", between=("capture", "/capture"))
    for _ in range(REPLAYS):
        training.load()
        with gpu.marked("replay"):
            graph.replay()
        losses.append(loss.item())
    expected_losses, expected = eager("cpu", WARM_UP + REPLAYS)
    assert losses == expected_losses
    assert all(map(torch.equal, expected, training.state()))
    assert gpu.count("graph", between=("replay", "/replay")) == REPLAYS
    assert gpu.count("replayed", between=("replay", "/replay")) == REPLAYS * nodes
    gpu.assert_no_errors()


def test_random_numbers_and_pinned_memory_are_read_by_each_replay() -> None:
    pinned, on_gpu = torch.zeros(3).pin_memory(), torch.zeros(3, device="cuda")
    result, graph = torch.zeros(3).pin_memory(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.copy_(pinned, non_blocking=True)
        result.copy_(on_gpu * 2, non_blocking=True)
        noise = torch.rand(8, device="cuda")
    assert result.tolist() == [0, 0, 0]
    pinned.fill_(5)
    graph.replay()
    first = noise.tolist()
    graph.replay()
    assert result.tolist() == [10, 10, 10]
    assert noise.tolist() != first


def forked(join: bool) -> Callable[[Tensor], None]:
    def work(values: Tensor) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values.add_(1)
        if join:
            torch.cuda.current_stream().wait_stream(side)

    return work


def captured(work: Callable[[Tensor], object]) -> torch.cuda.CUDAGraph:
    values, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values.mul_(2)
        work(values)
    return graph


def wait_for_earlier_event(values: Tensor) -> None:
    event = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        event.record()
    event.wait()


def wait_for_captured_event(values: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


ILLEGAL: dict[str, tuple[Callable[[Tensor], object], int | None]] = {
    "item": (lambda values: values.sum().item(), 900),
    "device": (lambda values: torch.cuda.synchronize(), 900),
    "stream": (lambda values: torch.cuda.Stream().synchronize(), 900),
    "nonzero": (lambda values: values.nonzero(), 900),
    "unjoined": (forked(join=False), 904),
    "earlier event": (wait_for_earlier_event, 905),
    "captured event": (wait_for_captured_event, 907),
    "pageable upload": (lambda values: values.copy_(torch.ones(4)), None),
    "pageable download": (lambda values: torch.ones(4).copy_(values, non_blocking=True), None),
}
"""The work, and the error that the log has; None: torch refuses it before CUDA does."""


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_a_gpu_refuses_during_capture_is_refused(name: str) -> None:
    work, error = ILLEGAL[name]
    with gpu.marked(name), pytest.raises(RuntimeError):
        captured(work)
    logged = [record.bytes for record in gpu.selected("error", between=(name, f"/{name}"))]
    assert logged == ([] if error is None else [error])
    torch.cuda.synchronize()  # the GPU is usable


def test_legal_work_is_captured() -> None:
    """The control: what looks much the same is allowed."""
    with gpu.marked("legal"):
        captured(lambda values: values.sum()).replay()
        captured(forked(join=True)).replay()
        captured(lambda values: values.copy_(torch.ones(4).pin_memory(), non_blocking=True))
        captured(lambda values: torch.empty(2**22, device="cuda").zero_()).replay()
    assert gpu.count("error", between=("legal", "/legal")) == 0
    assert gpu.count("graph", between=("legal", "/legal")) == 3


def test_work_on_the_default_stream_is_done_now() -> None:
    values, others = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with gpu.marked("default"), torch.cuda.graph(graph):
        values.mul_(2)
        with torch.cuda.stream(torch.cuda.default_stream()):
            others.add_(1)
    assert (values.tolist(), others.tolist()) == ([1] * 4, [2] * 4)
    (record,) = gpu.selected("uncaptured", between=("default", "/default"))
    assert record.name.startswith("op aten::add_")
    graph.replay()
    assert (values.tolist(), others.tolist()) == ([2] * 4, [2] * 4)
