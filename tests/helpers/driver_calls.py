"""CudaKernel and CudaViews down to the driver, without a GPU.

Real: the kernels, NVRTC, and how cuda.bindings calls libcuda.so.1. Stand-ins: that library, which
is fake_driver.c, and the few functions of torch.cuda that are called. The emulator runs what is
loaded and launched, on CPU tensors. test_cuda_kernel.py starts this in a process of its own, which
finds the fake driver by LD_LIBRARY_PATH.

NVRTC 13 does not know a GPU of compute capability 12.9: so it makes PTX, as the emulator needs.
"""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from emulated_gpu import show_images, shown
from emulator import emulator
from expect import raises
from literal import literal_terms

from fastaug.errors import KernelUnavailableError
from fastaug.kernels.cuda import CudaKernel, launch_plan
from fastaug.views.cuda import CudaViews
from fastaug.views.launch import Places
from fastaug.views.native import NativeViews
from fastaug.views.packed_plan import LAYER, VIEW, Form, Pictures, pictures_of
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import RenderSpec

SHARED_LIMIT, PROCESSORS, STREAM, SIDE, CONTEXT = 101376, 2, 0xABC0, 0xDEF0, 0x1000
INVALID_CONTEXT, NO_BINARY = 201, 209
Words = ctypes.POINTER(ctypes.c_longlong)


class FakeDriver:
    """What libcuda does: hands out handles, keeps to its rules, and may fail."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.hook = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, Words)(self.call)
        ctypes.c_void_p.in_dll(self.library, "hook").value = ctypes.cast(
            self.hook, ctypes.c_void_p
        ).value
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, int] = {}
        self.context = 0
        self.images: list[Any] = []
        self.functions: list[tuple[Any, str]] = []
        self.attributes: dict[int, int] = {}
        self.launches: list[dict] = []

    def call(self, name: bytes, words: Any) -> int:
        function = name.decode()
        self.calls[function] += 1
        if function in self.fails:
            return self.fails[function]
        return getattr(self, function)(words) or 0

    def put(self, address: int, value: int, kind: Any = ctypes.c_void_p) -> None:
        kind.from_address(address).value = value

    def init_of_bindings(self, words: Any) -> None:
        pass

    def cuDeviceGet(self, words: Any) -> None:
        self.put(words[0], words[1] + 7, ctypes.c_int)

    def cuDevicePrimaryCtxRetain(self, words: Any) -> None:
        self.put(words[0], CONTEXT + ctypes.c_int(words[1]).value)

    def cuDeviceGetAttribute(self, words: Any) -> None:
        # cuda.h: MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, MULTIPROCESSOR_COUNT
        self.put(words[0], {97: SHARED_LIMIT, 16: PROCESSORS}[words[1]], ctypes.c_int)

    def cuCtxSetCurrent(self, words: Any) -> None:
        self.context = words[0]

    def cuModuleLoadData(self, words: Any) -> int | None:
        if not self.context:
            return INVALID_CONTEXT
        self.images.append(emulator().Module(ctypes.string_at(words[1])))
        return self.put(words[0], len(self.images))

    def cuModuleGetFunction(self, words: Any) -> None:
        self.functions.append(
            (self.images[words[1] - 1], ctypes.string_at(words[2]).decode("ascii"))
        )
        self.put(words[0], len(self.functions))

    def cuFuncSetAttribute(self, words: Any) -> None:
        self.attributes[ctypes.c_int(words[1]).value] = words[2]

    def cuLaunchKernel(self, words: Any) -> int | None:
        if not self.context:
            return INVALID_CONTEXT
        module, name = self.functions[words[0] - 1]
        grid, threads = tuple(words[1:4]), tuple(words[4:7])
        shared, stream, parameters = words[7], words[8], words[9]
        assert words[10] == 0
        read = view_arguments if name.startswith("views") else objective_arguments
        values = read(module, name, grid[0], parameters)
        module.launch(name, grid, threads, values, shared, shared_limit=SHARED_LIMIT)
        self.launches.append({"name": name, "threads": threads, "shared": shared, "stream": stream})
        happened.append(f"launch on {stream:x}")
        return None


def objective_arguments(module: Any, name: str, images: int, parameters: int) -> list:
    pointers = (ctypes.c_void_p * 12).from_address(parameters)
    values = [
        struct.unpack(kind, ctypes.string_at(at, struct.calcsize(kind)))[0]
        for kind, at in zip("PqqPPPPiiiff", pointers, strict=True)
    ]
    z, image_stride, view_stride, y, nll, kl, gradient, views, classes, *_ = values
    item = 4 if name.endswith("_f32") else 2
    reach = (images - 1) * image_stride + (views - 1) * view_stride + classes
    tile = images * views * classes
    targets = 4 * images * classes if "_soft_" in name else 8 * images
    lengths = [(0, z, item * reach), (3, y, targets), (4, nll, 4 * images)]
    lengths += [(5, kl, 4 * images), (6, gradient, item * tile)]
    for place, address, length in lengths:
        values[place] = memory(address, length) if address else None
    return values


def view_arguments(module: Any, name: str, blocks: int, parameters: int) -> list:
    pointers = (ctypes.c_void_p * 7).from_address(parameters)
    words = [ctypes.c_longlong.from_address(at).value for at in pointers[:5]]
    views, layers, count, out, scratch = words
    form, places = Form.from_address(pointers[5]), Places.from_address(pointers[6])
    records = memory(views, count * VIEW.itemsize).view(VIEW).copy()
    sizes = np.stack([records["height"], records["width"]], axis=-1)
    pictures = Pictures(records["pixels"].copy(), records["row_bytes"], sizes)
    show_images(module, pictures)
    records["pixels"] = shown(pictures).pointers
    item = 4 if "_f32_" in name else 2
    return [
        records.view(np.uint8),
        memory(layers, count * form.layers * LAYER.itemsize),
        count,
        memory(out, count * 3 * form.size**2 * item),
        memory(scratch, blocks * places.piece) if scratch else None,
        bytes(form),
        bytes(places),
    ]


def memory(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


happened: list[str] = []
"""In its order, what streams were told."""


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def wait_stream(self, other: FakeStream) -> None:
        happened.append(f"{self.cuda_stream:x} waits for {other.cuda_stream:x}")

    def record_event(self) -> Any:
        happened.append(f"event on {self.cuda_stream:x}")
        return SimpleNamespace(of=self.cuda_stream, query=lambda: True)

    def wait_event(self, event: Any) -> None:
        happened.append(f"{self.cuda_stream:x} waits for the event of {event.of:x}")


def pretend_that_there_is_a_gpu() -> list[int]:
    """What is asked of torch.cuda; returns the devices that were made current."""
    current: list[int] = []

    @contextmanager
    def device(index: int) -> Any:
        current.append(index)
        yield

    torch.cuda.get_device_capability = lambda index: (12, 9)
    torch.cuda.get_device_name = lambda index: "GPU"
    streams = [FakeStream(STREAM)]

    @contextmanager
    def stream(inner: FakeStream) -> Any:
        streams.append(inner)
        yield
        streams.pop()

    torch.cuda.current_stream = lambda index: streams[-1]
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 3
    torch.cuda.Stream = lambda device: FakeStream(SIDE)
    torch.cuda.stream = stream
    torch.cuda.device = device
    torch.Tensor.pin_memory = lambda tensor: happened.append("pinned") or tensor
    torch.Tensor.record_stream = lambda tensor, stream: happened.append(
        f"{list(tensor.shape)} is used on {stream.cuda_stream:x}"
    )
    return current


def check_values(driver: FakeDriver, current: list[int]) -> None:
    kernel = CudaKernel()
    generator = torch.Generator().manual_seed(0)
    room = torch.randn(3, 5, 20, generator=generator)
    targets = torch.tensor([1, 0, 16])
    soft = torch.rand(3, 17, generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        logits = room.to(dtype)[:, 1:, :17]
        for average, some, need_grad in (
            ("probs", targets, True),
            (None, None, False),
            ("probs", targets, True),
            ("probs", soft, True),
        ):
            settings: dict = {"average": average, "kl_weight": 0.3, "label_smoothing": 0.1}
            nll, kl, grad = kernel.value_and_grad(logits, some, **settings, need_grad=need_grad)
            expected = literal_terms(logits, some, average, 0.3, 0.1)
            torch.testing.assert_close(nll.double(), expected[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(kl.double(), expected[1], rtol=1e-5, atol=1e-9)
            if need_grad:
                assert (grad.double() - expected[2]).norm() <= tolerance * expected[2].norm()
            else:
                assert grad is None
    plan = launch_plan(4, 17, SHARED_LIMIT)
    times = {"probs": 2, "none": 1, "soft_probs": 1}
    assert Counter(launch["name"] for launch in driver.launches) == Counter(
        {f"objective_{name}_{t}": n for t in ("f32", "bf16") for name, n in times.items()}
    )
    for launch in driver.launches:
        assert launch["stream"] == STREAM
        assert launch["threads"] == (plan.threads, 1, 1)
        assert launch["shared"] == plan.shared_bytes
    # Each kernel is loaded once; a context is set before each load and each launch.
    assert driver.calls["cuModuleLoadData"] == driver.calls["cuModuleGetFunction"] == 6
    assert driver.calls["cuCtxSetCurrent"] == 6 + 8
    assert driver.calls["cuDevicePrimaryCtxRetain"] == 1
    assert driver.attributes == {8: SHARED_LIMIT, 9: 100}  # cuda.h: their numbers
    assert driver.context == CONTEXT + 7 - 1  # the CPU tensors are on device -1
    assert set(current) == {-1}


def check_errors(driver: FakeDriver) -> None:
    logits = SimpleNamespace(
        dtype=torch.float32, is_cuda=True, shape=(2, 3, 4), get_device=lambda: 0
    )
    assert CudaKernel().supports(logits) is None
    for function in ("init_of_bindings", "cuDeviceGet", "cuModuleLoadData", "cuFuncSetAttribute"):
        driver.fails = {function: NO_BINARY}
        reason = CudaKernel().supports(logits)
        assert reason == "CUDA driver: CUDA_ERROR_NO_BINARY_FOR_GPU", (function, reason)
    driver.fails = {}
    kernel = CudaKernel()
    real = torch.randn(1, 2, 3)
    settings: dict = {"average": None, "kl_weight": 1.0, "label_smoothing": 0.0, "need_grad": True}
    kernel.value_and_grad(real, None, **settings)
    driver.fails = {"cuLaunchKernel": 701}
    with raises(KernelUnavailableError, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        kernel.value_and_grad(real, None, **settings)
    driver.fails = {}
    logits.shape = (2, 100_000, 4)
    assert "100000 views" in str(CudaKernel().supports(logits))
    torch.cuda.get_device_capability = lambda index: (7, 0)
    reason = CudaKernel().supports(logits)
    assert reason == "needs compute capability 7.5 or later, GPU has 7.0", reason


def check_views(driver: FakeDriver, current: list[int]) -> None:
    """With operations that need two views in shared memory, and so large that they do not fit."""
    engine = CudaViews(torch.device("cpu"))
    assert engine.why_not() is None
    generator = torch.Generator().manual_seed(0)
    for size, dtype in ((9, torch.bfloat16), (150, torch.float32)):
        images = [torch.randint(256, (7, 11, 3), dtype=torch.uint8, generator=generator)]
        boxes = np.array([[(0, 0, 7, 11), (-2, 3, 5, 20), (1, 1, 2, 2)]], np.int32)
        operations = np.array([[[4, 2], [10, 1], [3, 4]]], np.int32)
        arguments = np.full((1, 3, 2, 4), 1.4)
        plans = ViewPlans(boxes, np.array([[True, False, True]]), operations, arguments, size)
        pictures, kept = pictures_of(images)
        happened.clear()
        form = RenderSpec(dtype=dtype)
        started = engine.start(pictures, plans, form, threads=0, kept=kept)
        assert [what for _, what in engine._side._in_use] == [kept]
        found = started.finish()
        assert not engine._side._in_use  # its event has come
        assert happened == [
            f"{SIDE:x} waits for {STREAM:x}",
            "pinned",
            f"launch on {SIDE:x}",
            f"event on {SIDE:x}",
            f"{STREAM:x} waits for the event of {SIDE:x}",
            f"[1, 3, 3, {size}, {size}] is used on {STREAM:x}",
        ]
        expected = NativeViews().start(pictures, plans, form, threads=0, kept=kept).finish()
        assert torch.equal(found, expected)
    assert driver.launches[-2]["name"] == "views_bf16_all"
    assert driver.launches[-1]["name"] == "views_f32_tables"
    assert driver.launches[-1]["threads"] == (384, 1, 1)
    assert driver.attributes == {8: SHARED_LIMIT, 9: -1}
    assert driver.context == CONTEXT + 3 + 7
    assert set(current) == {3}
    driver.fails = {"cuModuleLoadData": NO_BINARY}
    reason = CudaViews(torch.device("cpu")).why_not()
    assert reason == "CUDA driver: CUDA_ERROR_NO_BINARY_FOR_GPU", reason
    driver.fails = {}


if __name__ == "__main__":
    devices = pretend_that_there_is_a_gpu()
    fake = FakeDriver()
    check_values(fake, devices)
    devices.clear()
    check_views(fake, devices)
    check_errors(fake)
    print("all calls were right")
