"""DALI on stand-in GPUs: a pipeline of a GPU is built for the CPU, and its outputs are moved there.

DALI brings its own CUDA runtime, which finds no GPU here. What the program asks of it is logged:
`dali` records have the device and the stream that outputs were bound to. A raw handle of 0 means
the default stream of the *current* device, whatever the pipeline's own device is. With late copies,
outputs become visible to work on that stream, and to streams that wait for it, but to no other.
"""

from __future__ import annotations

import ctypes
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import nullgpu_client as client
import numpy as np

POISON = 0xAB
KEPT_INPUTS = 16
"""Inputs of a pipeline that are kept alive, since it may read them later."""


def install() -> None:
    """Called when nvidia.dali has been imported."""
    from nvidia.dali import ops
    from nvidia.dali.data_node import DataNode
    from nvidia.dali.external_source import ExternalSource
    from nvidia.dali.pipeline import Pipeline

    _wrap(Pipeline, "__init__", _make_pipeline)
    _wrap(Pipeline, "outputs", _outputs)
    _wrap(Pipeline, "share_outputs", _outputs)
    _wrap(Pipeline, "_feed_input", _feed_input)
    _wrap(ExternalSource, "__init__", _make_source)
    _wrap(ExternalSource, "__call__", _call_source)
    _wrap(DataNode, "gpu", lambda gpu, node: node if _is_stand_in() else gpu(node))
    Pipeline.device_id = property(lambda self: self.stand_in_device)
    ops._DaliOperatorMeta.__call__ = _make_operator


def _wrap(owner: Any, name: str, replacement: Callable) -> None:
    original = getattr(owner, name)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return replacement(original, self, *arguments, **options)

    call.__signature__ = inspect.signature(original)  # DALI looks at it
    setattr(owner, name, call)


# --- building pipelines


def _make_pipeline(init: Callable, self: Any, *arguments: Any, **options: Any) -> None:
    given = inspect.signature(init).bind(self, *arguments, **options)
    device = given.arguments.get("device_id")
    self.stand_in_device = device if device is not None and device >= 0 else None
    self.stand_in_inputs = {}
    self.stand_in_kept = deque(maxlen=KEPT_INPUTS)
    given.arguments["device_id"] = None
    init(*given.args, **given.kwargs)


def _is_stand_in() -> bool:
    """Whether the pipeline that is being defined is one of a stand-in GPU."""
    from nvidia.dali.pipeline import Pipeline

    current = Pipeline.current()
    return current is not None and current.stand_in_device is not None


def _make_operator(kind: Any, *arguments: Any, **options: Any) -> Any:
    if options.get("device") in ("gpu", "mixed") and _is_stand_in():
        options["device"] = "cpu"
    return type.__call__(kind, *arguments, **options)


def _make_source(init: Callable, self: Any, *arguments: Any, **options: Any) -> None:
    self.is_of_stand_in = options.get("device") == "gpu" and _is_stand_in()
    if self.is_of_stand_in:
        options["device"] = "cpu"
    init(self, *arguments, **options)


def _call_source(call: Callable, self: Any, *arguments: Any, **options: Any) -> Any:
    from nvidia.dali.pipeline import Pipeline

    if self.is_of_stand_in:
        name = options.get("name") or self._name
        no_copy = options.get("no_copy") or self._no_copy
        Pipeline.current().stand_in_inputs[name] = bool(no_copy)
    return call(self, *arguments, **options)


# --- outputs


def _outputs(take: Callable, self: Any, cuda_stream: Any = None) -> Any:
    if self.stand_in_device is None:
        return take(self) if cuda_stream is None else take(self, cuda_stream)
    made = take(self)
    stream = _handle(cuda_stream)
    name = f"outputs of a pipeline of device {self.stand_in_device}"
    if stream is None:
        client.note("sync_stream", f"DALI: {name}", self.stand_in_device)
    else:
        client.note("dali", name, *_place(stream))
    return tuple(DeviceTensors(output, self.stand_in_device, stream) for output in made)


def _handle(stream: Any) -> int | None:
    from nvidia.dali import types

    return types._raw_cuda_stream(stream)


def _place(handle: int) -> tuple[int, int]:
    """The device and the number of a stream by its handle, as CUDA understands it."""
    library = client.library()
    library.nullgpu_stream_device.argtypes = [ctypes.c_void_p]
    return library.nullgpu_stream_device(handle), library.nullgpu_stream_number(handle)


class DeviceTensors:
    """Looks like DALI's TensorListGPU."""

    def __init__(self, output: Any, device: int, stream: int | None) -> None:
        self.stream, self._device, self._host = stream, device, output
        self.dtype = output.dtype
        arrays = [np.asarray(output.at(i)) for i in range(len(output))]
        self._dense: Any = None
        if len({array.shape for array in arrays}) == 1:
            self._dense = _on_device(np.stack(arrays), device, stream)
            tensors = list(self._dense)
        else:
            tensors = [_on_device(array, device, stream) for array in arrays]
        self._tensors = [DeviceTensor(tensor, self) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> DeviceTensor:
        return self._tensors[index]

    def __iter__(self) -> Iterator[DeviceTensor]:
        return iter(self._tensors)

    at = __getitem__

    def shape(self) -> list[tuple[int, ...]]:
        return [tensor.shape() for tensor in self._tensors]

    def layout(self) -> str:
        return self._host.layout()

    def device_id(self) -> int:
        return self._device

    def is_dense_tensor(self) -> bool:
        return self._dense is not None

    def as_tensor(self) -> DeviceTensor:
        if self._dense is None:
            raise ValueError("as_tensor needs samples of one shape")
        return DeviceTensor(self._dense, self)

    def as_cpu(self) -> Any:
        client.note("sync_memcpy", "DALI: as_cpu", self._device)
        return self._host


class DeviceTensor:
    """Looks like DALI's TensorGPU; the memory is that of a torch tensor."""

    def __init__(self, tensor: Any, batch: DeviceTensors) -> None:
        self._tensor, self._batch = tensor, batch
        self.stream, self.dtype = batch.stream, batch.dtype

    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()

    def device_id(self) -> int:
        return self._tensor.device.index

    def layout(self) -> str:
        return self._batch.layout()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._tensor.__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> Any:
        """Whatever the current device is, and without making a stream wait."""
        from torch.utils.dlpack import to_dlpack

        return to_dlpack(self._tensor)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def _on_device(array: np.ndarray, device: int, stream: int | None) -> Any:
    """A CUDA tensor with this content, which no stream of torch's has written."""
    import torch

    content = np.ascontiguousarray(array)
    dtype = torch.from_numpy(np.empty(0, content.dtype)).dtype
    made = torch.empty(content.shape, dtype=dtype, device=torch.device("cuda", device))
    library = client.library()
    if stream is None or not library.nullgpu_copies_are_late():
        ctypes.memmove(made.data_ptr(), content.ctypes.data, content.nbytes)
    else:
        ctypes.memset(made.data_ptr(), POISON, content.nbytes)
        place, number = _place(stream)
        pointers = map(ctypes.c_size_t, (made.data_ptr(), content.ctypes.data, content.nbytes))
        library.nullgpu_copy_later(*pointers, ctypes.c_int(place), ctypes.c_long(number))
    return made


# --- inputs


def _feed_input(
    feed: Callable,
    self: Any,
    name: str,
    data: Any,
    layout: Any = None,
    cuda_stream: Any = None,
    use_copy_kernel: bool = False,
) -> None:
    if name not in self.stand_in_inputs:
        feed(self, name, data, layout, cuda_stream, use_copy_kernel)
        return
    stream = _handle(_stream_of(data) if cuda_stream is None else cuda_stream) or 0
    device, number = _place(stream)
    client.library().nullgpu_arrive_on_device(ctypes.c_int(device), ctypes.c_long(number))
    samples = list(data)
    copies = not self.stand_in_inputs[name]
    if copies and use_copy_kernel:
        client.note("kernel", "DALI: copy", device, number)
    for sample in samples if copies and not use_copy_kernel else ():
        client.note("memcpy", "D2D", device, number, _host_array(sample).nbytes)
    arrays = [_host_array(sample).copy() for sample in samples]
    self.stand_in_kept.append(arrays)
    feed(self, name, arrays, layout, None, False)


def _stream_of(data: Any) -> Any:
    """As DALI does: the stream of its own outputs, torch's current stream for tensors."""
    from nvidia.dali import types

    first = data[0] if isinstance(data, list) and data else data
    if isinstance(first, (DeviceTensor, DeviceTensors)):
        return first.stream
    return types._get_default_stream_for_array(data)


def _host_array(sample: Any) -> np.ndarray:
    if isinstance(sample, np.ndarray):
        return sample
    interface = sample.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    shape, address = interface["shape"], interface["data"][0]
    strides = interface.get("strides")
    length = int(np.prod(shape)) * dtype.itemsize
    if strides is not None or not length:
        raise ValueError("a stand-in GPU feeds only contiguous tensors to DALI")
    memory = (ctypes.c_uint8 * length).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
