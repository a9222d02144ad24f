"""Stand-in GPUs in functional mode: operators and kernels compute. Each check has a control."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import nullgpu_client as gpu
import pytest
import torch
import triton
import triton.language as tl
from cuda.bindings import driver, nvrtc
from torch import Tensor, distributed, nn

STAND_INS = {"devices": 2, "functional": True, "late_copies": True}


@pytest.fixture(autouse=True)
def _no_devices_touched() -> Iterator[None]:
    gpu.forget_touched()
    yield
    gpu.clear_error()


def trained(device: str, rate: float = 0.1) -> list[Tensor]:
    """A small network after five steps: the losses and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, groups=2), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 10)),
    ).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, nesterov=True, fused=True)
    numbers = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        images = torch.randn(8, 3, 16, 16, generator=numbers).to(device)
        labels = torch.randint(10, (8,), generator=numbers).to(device)
        loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *(value.detach().cpu() for value in model.state_dict().values())]


def test_five_training_steps_are_those_of_the_cpu() -> None:
    expected = trained("cpu")

    def compare(found: list[Tensor]) -> None:
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)

    compare(trained("cuda:1"))
    gpu.assert_only_device(1)
    with pytest.raises(AssertionError):
        compare(trained("cuda:1", rate=0.1001))


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    images = torch.randn(8, 16).cuda()

    def step(factor: float) -> bool:
        before = model.weight.detach().clone()
        with torch.autocast("cuda", torch.float16):
            found = model(images * factor)
        assert found.dtype == torch.float16
        scaler.scale(found.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return not torch.equal(before, model.weight)

    assert step(1.0)
    assert scaler.get_scale() == 2.0**10
    assert not step(1e4)
    assert scaler.get_scale() == 2.0**9
    assert step(1.0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_views_results_in_place_and_indices() -> None:
    values = torch.arange(24.0, device="cuda").view(2, 3, 4)
    values[:, 1].t().mul_(10)
    assert values[1, 1, 2].item() == 180
    out = torch.empty(0, device="cuda")
    torch.add(values, 1, out=out)
    assert out.shape == values.shape
    assert out.sum().item() == values.cpu().sum().item() + 24
    values[values > 100] = -1
    assert values.unique().numel() == len(set(values.cpu().flatten().tolist()))
    assert values.nonzero().shape == values.cpu().nonzero().shape
    norms = torch._foreach_norm([values, out], float("inf"))
    assert [norm.item() for norm in norms] == [values.cpu().abs().max(), out.cpu().abs().max()]
    half = torch.softmax(values.half(), -1, dtype=torch.float32)
    assert half.dtype == torch.float32
    assert torch.allclose(half.sum(-1), torch.ones(2, 3, device="cuda"))


def test_copies_between_devices_and_operators_that_mix_them() -> None:
    values = torch.arange(3.0, device="cuda")
    there = values.to("cuda:1")
    assert gpu.owner(there) == 1
    assert torch.equal(there.cpu(), values.cpu())
    for other in (there, values.cpu()):
        with pytest.raises(RuntimeError, match="two devices"):
            values + other


def test_random_numbers_follow_the_seed() -> None:
    torch.cuda.manual_seed(3)
    first, second = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(first, torch.rand(4, device="cuda"))
    assert not torch.equal(first, second)


def test_operators_that_need_a_value_on_the_host_wait_for_it() -> None:
    values = torch.ones(4, device="cuda")
    with gpu.marked("needs no value"):
        values * 2
    with gpu.marked("needs a value"):
        values.nonzero()
    assert gpu.syncs(between=("needs no value", "/needs no value")) == []
    assert len(gpu.syncs(between=("needs a value", "/needs a value"))) == 1


@pytest.mark.parametrize("wait", ["event", "stream", "device", "other stream"])
def test_a_late_copy_arrives_when_it_is_waited_for(wait: str) -> None:
    target, side = torch.zeros(4).pin_memory(), torch.cuda.Stream("cuda:1")
    target.copy_(torch.ones(4, device="cuda:1"), non_blocking=True)
    wrong = torch.cuda.Event()
    wrong.record(torch.cuda.current_stream("cuda:0"))
    wrong.synchronize()
    assert (target.view(torch.uint8) == 0xAB).all(), "it arrived with an event of another device"
    current = torch.cuda.current_stream("cuda:1")
    if wait == "event":
        current.record_event().synchronize()
    elif wait == "stream":
        current.synchronize()
    elif wait == "device":
        torch.cuda.synchronize("cuda:1")
    else:
        side.wait_stream(current)
        side.synchronize()
    assert target.tolist() == [1] * 4


ADD = b"""
extern "C" __global__ void add(const float* a, const float* b, float* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = a[i] + b[i];
}
"""


@pytest.fixture
def operands() -> list[Tensor]:
    return [*torch.rand(2, 100).cuda().split(1), torch.zeros(100, device="cuda")]


def test_an_nvrtc_kernel_is_emulated_and_may_not_leave_its_tensors(operands: list[Tensor]) -> None:
    _, program = nvrtc.nvrtcCreateProgram(ADD, b"add.cu", 0, [], [])
    assert nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_90"])[0] == 0
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    assert driver.cuInit(0)[0] == 0
    function = driver.cuModuleGetFunction(driver.cuModuleLoadData(bytes(ptx))[1], b"add")[1]
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    one, other, out = (tensor.clone() for tensor in operands)

    def add(count: int) -> None:
        values = (one.data_ptr(), other.data_ptr(), out.data_ptr(), count)
        driver.cuLaunchKernel(function, 4, 1, 1, 32, 1, 1, 0, 0, (values, kinds), 0)
        torch.cuda.synchronize()

    add(100)
    assert torch.equal(out.cpu(), (one + other).cpu().flatten())
    assert gpu.count("kernel", name="add grid 4") == 1
    with pytest.raises(RuntimeError, match="illegal memory access"):
        add(101)


@triton.jit
def add_kernel(one, other, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.load(one + place, mask=inside) + tl.load(other + place, mask=inside)
    tl.store(out + place, total, mask=inside)


def test_a_triton_kernel_is_emulated_captured_and_may_not_leave_its_tensors(
    operands: list[Tensor],
) -> None:
    one, other, out = (tensor.clone() for tensor in operands)
    add_kernel[(2,)](one, other, out, 99, BLOCK=64)
    assert torch.equal(out[:99].cpu(), (one + other).cpu().flatten()[:99])
    assert out[99].item() == 0
    graph = torch.cuda.CUDAGraph()
    out.zero_()
    with torch.cuda.graph(graph):
        add_kernel[(2,)](one, other, out, 99, BLOCK=64)
    assert out.count_nonzero().item() == 0, "the capture ran the kernel"
    one.mul_(3)
    graph.replay()
    assert torch.equal(out[:99].cpu(), (one + other).cpu().flatten()[:99])
    add_kernel[(2,)](one, other, out, 101, BLOCK=64)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()


def test_two_ranks_exchange_tensors_by_nccl() -> None:
    """Runs this file in two processes, each with its own device."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--standalone", __file__], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rank is done") == 2


def exchange() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        numbers = torch.arange(600_000).remainder(97)  # more than the shared memory holds at once
        own = (numbers * (rank + 1)).to(device, dtype)
        distributed.all_reduce(own)
        assert torch.equal(own.cpu(), (3 * numbers).to(dtype))
    largest = torch.tensor([float(rank)], device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    assert largest.item() == 1
    sent = torch.full((3,), float(rank), device=device)
    distributed.broadcast(sent, 1)
    assert sent.tolist() == [1, 1, 1]
    everyone: list[object] = [None, None]
    distributed.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": 0}, {"rank": 1}]
    part = torch.empty(2, device=device)
    distributed.reduce_scatter_tensor(part, torch.arange(4.0, device=device) * (rank + 1))
    assert part.tolist() == ([0, 3] if rank == 0 else [6, 9])
    replay_all_reduce(rank, device)
    distributed.destroy_process_group()
    gpu.assert_only_device(rank)
    gpu.assert_no_errors()
    with pytest.raises(AssertionError):
        gpu.assert_only_device(1 - rank)
    print("rank is done", flush=True)


def replay_all_reduce(rank: int, device: torch.device) -> None:
    values, graph = torch.zeros(3, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values.add_(rank + 1)
        distributed.all_reduce(values)
    assert values.tolist() == [0] * 3
    graph.replay()
    assert values.tolist() == [3] * 3


if __name__ == "__main__":
    exchange()
