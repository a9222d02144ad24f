"""Stand-in GPUs in null mode: torch's own kernels are logged and not run. Each check has a control.

The tests of one file share a process and its log, so each looks between its own marks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import nullgpu_client as gpu
import pytest
import torch

STAND_INS = {"devices": 2}


@pytest.fixture(autouse=True)
def _no_devices_touched() -> Iterator[None]:
    gpu.forget_touched()
    yield
    gpu.fault_on("")
    gpu.clear_error()


def test_work_on_the_second_device_touches_no_other() -> None:
    assert torch.cuda.device_count() == 2
    layer = torch.nn.Conv2d(3, 8, 3, device="cuda:1")
    with gpu.marked("one device"):
        layer(torch.empty(2, 3, 16, 16, device="cuda:1")).mean().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == layer.weight.shape
    records = gpu.selected(between=("one device", "/one device"))
    assert gpu.touched() == gpu.contexts() == [1]
    gpu.assert_only_device(1)
    gpu.assert_only_device(1, of=records)
    gpu.assert_no_errors(of=records)


def test_work_on_both_devices_is_noticed() -> None:
    with gpu.marked("both"):
        torch.zeros(3, device="cuda:1").add_(1)
        torch.zeros(3, device="cuda:0").add_(1)
    with pytest.raises(AssertionError):
        gpu.assert_only_device(1)
    with pytest.raises(AssertionError):
        gpu.assert_only_device(1, of=gpu.selected(between=("both", "/both")))


def test_kernels_streams_copies_and_waits_are_logged_between_marks() -> None:
    values, pinned = torch.zeros(1000, device="cuda"), torch.zeros(1000).pin_memory()
    side = torch.cuda.Stream()
    with gpu.marked("quiet"):
        values.mul_(2).add_(1)
        with torch.cuda.stream(side):
            values.copy_(pinned, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
    with gpu.marked("loud"):
        values.sum().item()
        torch.zeros(5).to("cuda", non_blocking=True)
    quiet, loud = ("quiet", "/quiet"), ("loud", "/loud")
    assert gpu.count("kernel", between=quiet) == 2
    (copy,) = gpu.selected("memcpy", between=quiet)
    assert (copy.name, copy.bytes, copy.stream) == ("H2D", 4000, gpu.stream_number(side))
    assert copy.stream != gpu.stream_number(torch.cuda.current_stream()) == 0
    assert gpu.count("stream_wait", between=quiet) == 1
    assert gpu.syncs(between=quiet, implicit=True) == []
    assert [record.kind for record in gpu.syncs(between=loud)] == ["sync_stream"]
    implicit = gpu.syncs(between=loud, implicit=True)
    assert any(record.name == "H2D pageable" for record in implicit)


def test_the_log_can_be_switched_off() -> None:
    values = torch.zeros(1000, device="cuda")
    before = gpu.count("kernel")
    was = gpu.logging(False)
    values.add_(1)
    gpu.logging(was)
    assert gpu.count("kernel") == before
    values.add_(1)
    assert gpu.count("kernel") == before + 1
    with pytest.raises(ValueError, match="never"):
        gpu.selected(between=("never", "/never"))


def test_matrix_products_are_on_the_current_stream() -> None:
    one, side = torch.zeros(8, 8, device="cuda"), torch.cuda.Stream()
    with gpu.marked("products"):
        one @ one
        with torch.cuda.stream(side):
            one @ one
    found = gpu.selected("blas", between=("products", "/products"))
    assert [record.stream for record in found] == [0, gpu.stream_number(side)]


def test_a_faulting_kernel_breaks_the_gpu_for_good() -> None:
    values = torch.zeros(1000, device="cuda")
    gpu.fault_on("reduce_kernel")
    values.add_(1)
    torch.cuda.synchronize()  # the control: other kernels do not
    assert gpu.error() == 0
    values.sum()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError):
        values.cpu()
    gpu.fault_on("")
    gpu.clear_error()
    values.sum().item()


def test_a_copy_of_another_kind_than_its_addresses_is_an_error() -> None:
    memory = ctypes.c_void_p(torch.zeros(2, device="cuda").data_ptr())
    copy = gpu.library().cudaMemcpy
    for name, kind in (("device to device", 3), ("host to host", 0)):
        with gpu.marked(name):
            copy(memory, memory, ctypes.c_size_t(4), kind)
    right, wrong = (
        gpu.selected(between=(name, f"/{name}")) for name in ("device to device", "host to host")
    )
    gpu.assert_no_errors(of=right)
    with pytest.raises(AssertionError):
        gpu.assert_no_errors(of=wrong)


def test_a_graph_has_the_kernels_and_products_of_its_capture() -> None:
    values, graph = torch.zeros(8, 8, device="cuda"), torch.cuda.CUDAGraph()
    values @ values  # cuBLAS allocates its workspace
    with gpu.marked("capture"), torch.cuda.graph(graph):
        (values @ values).add_(1).sum()
    within = ("capture", "/capture")
    captured = [record.name.split()[0] for record in gpu.selected("captured", between=within)]
    assert captured == ["blas", "kernel", "kernel"]
    assert gpu.count(gpu.WORK, between=within) == 0
    with gpu.marked("replay"):
        graph.replay()
    replayed = gpu.selected(("graph", "replayed", "kernel"), between=("replay", "/replay"))
    assert [record.kind for record in replayed] == ["graph", "replayed", "replayed", "replayed"]


@pytest.mark.parametrize("wait", ["item", "synchronize"])
def test_a_wait_during_capture_is_refused(wait: str) -> None:
    values, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    waits = {"item": lambda: values.sum().item(), "synchronize": torch.cuda.synchronize}
    with gpu.marked(wait), pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        waits[wait]()
    logged = gpu.selected("error", between=(wait, f"/{wait}"))
    assert [record.bytes for record in logged] == [900]
