"""The model of a training step: seconds on each resource, and which of them limits. It is a guess.

A step of V views makes V/K images. The loader (storage, PCIe, JPEG decoder) works ahead of the
training, and the host launches ahead of the GPU, so that a step takes as long as the slowest of
them:

    step  = max(storage, PCIe, decode, launch, train)
    train = views + forward + backward + objective + optimizer + what the backward does not hide of
            the all-reduce (+ decode, where it runs on the GPU's SMs)

Each operation of the network takes max(FLOPs / rate, bytes / bandwidth), operation by operation as
torch runs them without torch.compile. Whether a step fits into the memory is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hardware import Assumptions, Case, Gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

STORAGE, PCIE, DECODE, LAUNCH = "storage", "PCIe", "decode", "launch"
MEMORY, COMPUTE, ALL_REDUCE = "GPU memory bandwidth", "GPU arithmetic", "all-reduce"
LIMITS = (DECODE, STORAGE, PCIE, LAUNCH, MEMORY, COMPUTE, ALL_REDUCE)

FP32 = 4
PIXELS = 500 * 375 * 3
"""Bytes of a decoded image of ImageNet's usual size."""
OPTIMISER_PASSES = 5
"""Fused SGD with momentum reads parameter, gradient and momentum, and writes two of them."""
OBJECTIVE_OPERATIONS = 10
"""What fastaug.objective and its backward launch, about."""


class Op(NamedTuple):
    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """What a step of so many views asks of the device."""

    views: int
    size: int
    classes: int
    parameters: int
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]


class _Counter(TorchDispatchMode):
    """FLOPs, and bytes of all tensors read and written, of every operation that moves data."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        moves = written and read and not func.is_view
        # Neither moves data: a new name for a tensor, and memory that is not yet written.
        if moves and func._opname not in ("detach", "empty_like", "_unsafe_view", "new_empty"):
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            self.ops.append(Op(flops, sum(leaf.nbytes for leaf in (*read, *written))))
        return out


def count(
    build: Callable[[], nn.Module], *, views: int, size: int, precision: str = "fp32"
) -> Work:
    """The operations of a training step, without computing it: tensors have shapes alone."""
    model = build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(views, 3, size, size).to(memory_format=torch.channels_last)
        with _Counter() as forward, torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(images)
        with _Counter() as backward:
            logits.backward(torch.empty_like(logits))
    for parameter in model.parameters():
        parameter.grad = None
    classes = logits.shape[-1]
    return Work(views, size, classes, parameters, tuple(forward.ops), tuple(backward.ops))


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, after all losses."""

    flops: float
    memory: float
    decode: float
    """Images/s."""
    launch: float = 0.0
    """Seconds for each operation."""
    pcie: float = math.inf
    storage: float = math.inf
    """Of all devices together."""
    link: float = math.inf
    network: float = math.inf
    hop: float = 0.0
    node: int = 1
    overlap: float = 1.0
    view_passes: float = 6.0
    objective_passes: float = 4.0
    views: float = 0.0
    """Views/s where it was measured; 0: from view_passes."""
    memory_by_size: tuple[tuple[float, float], ...] = ()
    """(bytes that an operation moves, bytes/s) where it was measured; empty: memory for all."""
    decode_on_device: bool = False
    """Decoding takes time from training."""
    pixels_over_pcie: bool = False
    """Decoded on the host."""

    def seconds(self, moved: float) -> float:
        """To move so many bytes in one operation, at the rate of the nearest size."""
        if not self.memory_by_size:
            return moved / self.memory
        near = min(self.memory_by_size, key=lambda entry: abs(math.log(entry[0] / max(moved, 1))))
        return moved / near[1]


def gpu_rates(
    gpu: Gpu,
    assumed: Assumptions,
    case: Case,
    *,
    precision: str = "bf16",
    augment: str = "crop-flip",
    storage: float,
    decode_on_host: bool = False,
) -> Rates:
    peak = gpu.fp32 if precision == "fp32" else gpu.bf16
    passes = assumed.crop_flip if augment == "crop-flip" else assumed.randaugment
    host = gpu.cores.at(case) * assumed.core_decode.at(case)
    return Rates(
        flops=peak.at(case) * assumed.compute.at(case),
        memory=gpu.memory.at(case) * assumed.memory.at(case),
        decode=host if decode_on_host else gpu.decode.at(case),
        launch=assumed.launch.at(case),
        pcie=gpu.pcie.at(case) * assumed.pcie.at(case),
        storage=storage,
        link=gpu.link.at(case) * assumed.link.at(case),
        network=gpu.network.at(case) * assumed.link.at(case),
        hop=assumed.hop.at(case),
        node=int(gpu.node.value),
        overlap=assumed.overlap.at(case),
        view_passes=passes.at(case),
        objective_passes=assumed.objective.at(case),
        decode_on_device=gpu.decode_on_sms and not decode_on_host,
        pixels_over_pcie=decode_on_host,
    )


def roofline(ops: Iterable[Op], rates: Rates) -> tuple[float, float]:
    """Seconds of the operations that arithmetic limits, and of those that memory does."""
    compute = memory = 0.0
    for op in ops:
        by_flops, by_bytes = op.flops / rates.flops, rates.seconds(op.bytes)
        if by_flops > by_bytes:
            compute += by_flops
        else:
            memory += by_bytes
    return compute, memory


def all_reduce(size: float, count: int, rates: Rates) -> float:
    """Seconds to sum `size` bytes over `count` devices: within each node, then between nodes.

    n devices exchange 2(n-1)/n of the bytes each. Between nodes each device sends its share of what
    its node has summed, over its own part of the network; latencies are those of a tree.
    """
    inside = min(count, rates.node)
    nodes = math.ceil(count / rates.node)
    seconds = 2 * (inside - 1) / inside * size / rates.link
    seconds += 2 * (nodes - 1) / nodes * (size / inside) / rates.network
    return seconds + 2 * math.log2(count) * rates.hop


class Step(NamedTuple):
    seconds: float
    limit: str
    images: float
    """Per second, of all devices."""
    views: float
    parts: dict[str, float]
    """Seconds on each resource of LIMITS, whether or not it limits."""


def predict(
    work: Work, rates: Rates, *, k: int, devices: int = 1, image_bytes: float = 110_000
) -> Step:
    """A step of work.views views on each device, K of each image."""
    images = work.views / k
    compute, memory = roofline(work.forward, rates)
    backward = roofline(work.backward, rates)
    gradients = FP32 * work.parameters
    exchange = all_reduce(gradients, devices, rates)
    parts = {
        STORAGE: images * devices * image_bytes / rates.storage,
        PCIE: images * (PIXELS if rates.pixels_over_pcie else image_bytes) / rates.pcie,
        DECODE: images / rates.decode,
        LAUNCH: rates.launch * (len(work.forward) + len(work.backward) + OBJECTIVE_OPERATIONS),
        COMPUTE: compute + backward[0],
        MEMORY: memory
        + backward[1]
        + view_seconds(work, rates)
        + objective_seconds(work, rates)
        + optimizer_seconds(work, rates),
        ALL_REDUCE: exchange,
    }
    exposed = max(0.0, exchange - rates.overlap * sum(backward))
    in_train = {COMPUTE: parts[COMPUTE], MEMORY: parts[MEMORY], ALL_REDUCE: exposed}
    ahead = {name: parts[name] for name in (STORAGE, PCIE, LAUNCH)}
    (in_train if rates.decode_on_device else ahead)[DECODE] = parts[DECODE]
    train = sum(in_train.values())
    slowest = max(ahead, key=ahead.__getitem__)
    seconds = max(train, ahead[slowest])
    # Within the training, the part that takes most of its time.
    limit = slowest if ahead[slowest] > train else max(in_train, key=in_train.__getitem__)
    total = devices / seconds
    return Step(seconds, limit, images * total, work.views * total, parts)


def view_seconds(work: Work, rates: Rates) -> float:
    if rates.views:
        return work.views / rates.views
    return rates.view_passes * rates.seconds(work.views * 3 * work.size**2 * FP32)


def objective_seconds(work: Work, rates: Rates) -> float:
    return rates.objective_passes * rates.seconds(work.views * work.classes * FP32)


def optimizer_seconds(work: Work, rates: Rates) -> float:
    return OPTIMISER_PASSES * rates.seconds(work.parameters * FP32)


def crossover_k(
    work: Work, rates: Rates, views: Sequence[int], *, devices: int = 1, image_bytes: float
) -> int | None:
    """The least of the K at which decoding is no longer the limit; None: it is at all of them."""
    for k in sorted(views):
        if predict(work, rates, k=k, devices=devices, image_bytes=image_bytes).limit != DECODE:
            return k
    return None
