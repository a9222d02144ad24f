"""Model of a training step on a GPU: seconds on each resource, and which of them limits.

It is a PREDICTION. The tables below are all of its inputs. A source is a public document, or
"assumed:" and why. Figures that a document gives with sparsity or for both directions are halved
here, and the source says so. When this was written (November 2026) the data sheets and NVIDIA's
pages on HGX, DGX A100 and NCCL 2.4 could not be opened: their numbers were compared with
https://glennklockwood.com/garden/processors/ (H100, B200), calculon-ai/calculon a100_80g.json (A100
and its network) and dealers' pages (L4, DGX A100's cores). Of the other documents, stored copies
were read.

A step of V views uses V/K images. The loader (storage, PCIe, JPEG decoder) works ahead of the
training, and the host launches ahead of the GPU, so a step takes as long as the slowest of them:

    step  = max(storage, PCIe, decode, launch, train)
    train = views + forward + backward + objective + optimizer + the part of the all-reduce that
            the backward pass does not hide (+ decode, where it runs on the GPU's SMs)

Each operation of the network takes max(FLOPs / rate, bytes / bandwidth), one by one as torch runs
them without torch.compile. The model does not check whether a step fits into memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fastaug.models.build import build_model

Case = Literal["low", "mid", "high"]
"""All assumptions at their slow end, as assumed, or at their fast end."""


class Value(NamedTuple):
    """A number, its source, and its range if it is not a point."""

    value: float
    unit: str
    source: str
    low: float | None = None
    """The end that makes a step slower: for a time, the larger number."""
    high: float | None = None

    def at(self, case: Case) -> float:
        found = {"low": self.low, "mid": self.value, "high": self.high}[case]
        return self.value if found is None else found


# --- the hardware ---

_A100 = "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "NVIDIA H100 data sheet, https://www.nvidia.com/en-us/data-center/h100/"
_L4 = "NVIDIA L4 data sheet, https://www.nvidia.com/en-us/data-center/l4/"
_B200 = "NVIDIA HGX specifications, https://www.nvidia.com/en-us/data-center/hgx/"
_BLOG = "https://developer.nvidia.com/blog"
_DGX_A100 = f"NVIDIA on the DGX A100, {_BLOG}/defining-ai-innovation-with-dgx-a100"
_SUPERPOD = (
    "NVIDIA DGX SuperPOD H100, https://docs.nvidia.com/dgx-superpod/"
    "reference-architecture-scalable-infrastructure-h100/latest/dgx-superpod-components.html"
)
_DGX_B200 = (
    "NVIDIA DGX B200 user guide, https://docs.nvidia.com/dgx/"
    "dgxb200-user-guide/introduction-to-dgxb200.html"
)
_G2 = "Google Cloud GPU machines, https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth"
_DALI = "NVIDIA's DALI blog as quoted in https://github.com/NVIDIA/DALI/issues/5362"
_SPARSE = "; half of the figure with sparsity"
_ONE_WAY = "; half of the figure for both directions"
_DECODE_A100 = (
    f"7,000 with 75% of the images on the JPEG engine, 5,000 with all: {_DALI}; "
    "over 8,000 at 551x676: https://github.com/pytorch/vision/pull/8496"
)
_UNKNOWN = "assumed: no published rate found; "
_DECODE_L4 = (
    f"{_UNKNOWN}in CUDA, half of the A100's 6,000 without its JPEG engine ({_DALI}), for about "
    "half of its SMs"
)
_NODE = "as in the vendors' nodes: DGX A100, DGX H100, DGX B200; " + _G2
_CORES_L4 = "assumed: 96 threads for 8 GPUs (g2-standard-96), two a core"
_TABLE: dict[str, tuple[Any, ...]] = {
    # quantity: unit, then (value, source[, low, high]) of A100 (SXM, 80 GB), H100 (SXM), L4 and
    # B200 (HGX, 1,000 W), each with its share of the node it is usually rented or bought in
    "bf16": (  # dense peak; fp16 has the same
        "FLOP/s",
        (312e12, _A100),
        (989.4e12, _H100 + _SPARSE),
        (121e12, _L4 + _SPARSE),
        (2250e12, _B200 + _SPARSE),
    ),
    "fp32": (  # peak without tensor cores
        "FLOP/s",
        (19.5e12, _A100),
        (66.9e12, _H100),
        (30.3e12, _L4),
        (75e12, _B200),
    ),
    "tf32": (  # dense peak
        "FLOP/s",
        (156e12, _A100),
        (494.7e12, _H100 + _SPARSE),
        (60e12, _L4 + _SPARSE),
        (1125e12, _B200 + _SPARSE),
    ),
    "memory": (
        "B/s",
        (2039e9, _A100),
        (3350e9, _H100),
        (300e9, _L4),
        (8000e9, _B200),
    ),
    "decode": (  # JPEGs like ImageNet's (about 500x375)
        "images/s",
        (7000, _DECODE_A100, 5000, 8000),
        (10000, _UNKNOWN + "1.4 of the A100's older JPEG engine", 7000, 14000),
        (3000, _DECODE_L4, 1500, 6000),
        (10000, _UNKNOWN + "as the H100, with a JPEG engine", 7000, 20000),
    ),
    "pcie": (  # host to GPU, one direction
        "B/s",
        (32e9, _A100 + _ONE_WAY),
        (64e9, _H100 + _ONE_WAY),
        (32e9, _L4 + _ONE_WAY),
        (64e9, "PCIe 5.0 x16: " + _DGX_B200 + _ONE_WAY),
    ),
    "link": (  # to the other GPUs of the node, one direction
        "B/s",
        (300e9, _A100 + _ONE_WAY),
        (450e9, _SUPERPOD + _ONE_WAY),
        (32e9, "no NVLink, so over PCIe: " + _L4 + _ONE_WAY),
        (900e9, _B200 + _ONE_WAY),
    ),
    "network": (  # to other nodes, one direction, a GPU's share
        "B/s",
        (25e9, "200 Gb/s for each GPU: " + _DGX_A100),
        (50e9, "400 Gb/s for each GPU: " + _SUPERPOD),
        (12.5e9 / 8, "100 Gb/s for 8 GPUs (G2): " + _G2),
        (50e9, "400 Gb/s for each GPU: " + _DGX_B200),
    ),
    "node": ("GPUs", *4 * [(8, _NODE)]),
    "cores": (
        "cores",
        (16, "128 for 8 GPUs: " + _DGX_A100),
        (14, "112 for 8 GPUs: " + _SUPERPOD),
        (6, _CORES_L4),
        (14, "112 for 8 GPUs: " + _DGX_B200),
    ),
}
GPUS: dict[str, dict[str, Value]] = {
    gpu: {
        name: Value(own[place][0], unit, *own[place][1:]) for name, (unit, *own) in _TABLE.items()
    }
    for place, gpu in enumerate(("A100", "H100", "L4", "B200"))
}
DECODES_ON_SMS = ("L4",)
"""GPUs without a JPEG engine: decoding takes time from the training."""
ASSUMED: dict[str, Value] = {
    name: Value(value, unit, source, low, high)
    for name, unit, low, value, high, source in (
        ("compute", "of peak", 0.35, 0.5, 0.7, "assumed: large convolutions reach half of it"),
        ("memory", "of peak", 0.6, 0.75, 0.9, "assumed: streaming kernels reach three quarters"),
        ("pcie", "of peak", 0.6, 0.8, 0.9, "assumed: packet headers and gaps"),
        (
            *("link", "of peak", 0.65, 0.8, 0.9),
            "NCCL's overhead is about 20%: https://github.com/NVIDIA/nccl-tests/issues/212",
        ),
        ("launch", "s", 10e-6, 5e-6, 2.5e-6, "assumed: time of the host to launch an operation"),
        (
            *("hop", "s", 40e-6, 20e-6, 10e-6),
            "assumed: latency of a message; NCCL's trees need 2 log2(n) of them, "
            f"{_BLOG}/massively-scale-deep-learning-training-nccl-2-4/",
        ),
        (
            *("overlap", "of the backward pass", 0.6, 0.9, 1.0),
            "assumed: hides the all-reduce; DDP's last bucket has nothing left to hide behind",
        ),
        (
            *("crop_flip", "passes", 4, 1.5, 1),
            "assumed: fp32 passes of the fused kernel over a view: it writes it once (1) and reads "
            "its box of the decoded image, bytes and half of the image on average (0.5); slow "
            "end: four passes, for its arithmetic; fast end: boxes of one image are in the cache",
        ),
        (
            *("randaugment", "passes", 10, 4, 1.5),
            "assumed: those of crop_flip, and bytes written and read between the crop and each of "
            "4 operations (0.5 each); slow end: twice that and its arithmetic; fast end: cached",
        ),
        (
            *("objective", "passes", 8, 4, 2),
            "assumed: read logits, write gradient, scale it by autograd's",
        ),
        (
            *("core_decode", "images/s", 310, 390, 475),
            "assumed: as on this project's development machine, 620 to 950 on 2 cores",
        ),
    )
}
STORAGE_RATE = Value(
    *(40e9, "B/s"),
    "assumed: what a file system gives to all GPUs together; a single DGX H100 node can read over "
    f"40 GB/s: {_SUPERPOD}",
)
IMAGE_BYTES = Value(
    *(110_000, "B"),
    f"ImageNet takes 150 GB: {_BLOG}/loading-data-fast-with-dali-and-new-jpeg-decoder-in-a100/; "
    "1.33 million images",
)
PUBLISHED = {
    "A100": (
        *("timm/resnet50", 2470),
        "NVIDIA's ResNet-50 v1.5, 1x A100 80 GB, mixed precision: https://github.com/NVIDIA/"
        "DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5",
    )
}
"""GPU -> (model, training images/s measured by others, source). No input is fitted to it."""


# --- the work of a step ---

STORAGE, PCIE, DECODE, LAUNCH = "storage", "PCIe", "decode", "launch"
MEMORY, COMPUTE, ALL_REDUCE = "GPU memory bandwidth", "GPU arithmetic", "all-reduce"
FP32 = 4
DECODED_BYTES = 500 * 375 * 3
"""Bytes of a decoded image of ImageNet's usual size."""
OPTIMIZER_PASSES = 5
"""Fused SGD with momentum reads parameter, gradient and momentum, and writes two of them."""
OBJECTIVE_OPERATIONS = 10
"""Approximate number of launches of fastaug.objective and its backward."""


class Op(NamedTuple):
    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """The operations of a training step."""

    views: int
    size: int
    classes: int
    parameters: int
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]


class _Counter(TorchDispatchMode):
    """Records FLOPs, and bytes of all tensors read and written, of operations that move data."""

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
        if moves and func._opname not in ("detach", "empty_like", "_unsafe_view", "new_empty"):
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            self.ops.append(Op(flops, sum(leaf.nbytes for leaf in (*read, *written))))
        return out


def count_work(
    build: Callable[[], nn.Module], *, views: int, size: int, precision: str = "fp32"
) -> Work:
    """Count the operations of a training step on fake tensors, without computing it."""
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


@cache
def network_work(model: str, classes: int, size: int, views: int, precision: str) -> Work:
    """count_work of a model by its name."""
    build = partial(build_model, model, classes, image_size=size)
    return count_work(build, views=views, size=size, precision=precision)


# --- the time of a step ---


@dataclass(frozen=True)
class Rates:
    """What a device does per second, after all losses."""

    flops: float
    memory: float
    decode: float
    """Images/s."""
    launch: float = 0.0
    """Seconds for each operation."""
    pcie: float = math.inf
    storage: float = math.inf
    """Bytes/s of all devices together."""
    link: float = math.inf
    network: float = math.inf
    hop: float = 0.0
    node: int = 1
    overlap: float = 1.0
    view_passes: float = 6.0
    objective_passes: float = 4.0
    views: float = 0.0
    """Views/s where measured; 0: from view_passes."""
    memory_by_size: tuple[tuple[float, float], ...] = ()
    """(bytes that an operation moves, bytes/s) where measured; empty: `memory` for all sizes."""
    decode_on_device: bool = False
    """Decoding takes time from training."""
    pixels_over_pcie: bool = False
    """Images are decoded on the host."""

    def seconds(self, moved: float) -> float:
        """Time to move this many bytes in one operation, at the rate of the nearest size."""
        if not self.memory_by_size:
            return moved / self.memory
        near = min(self.memory_by_size, key=lambda entry: abs(math.log(entry[0] / max(moved, 1))))
        return moved / near[1]


def gpu_rates(
    name: str,
    case: Case,
    *,
    assumed: Mapping[str, Value] = ASSUMED,
    precision: str = "bf16",
    augment: str = "crop-flip",
    storage: float = STORAGE_RATE.value,
    decode_on_host: bool = False,
) -> Rates:
    gpu = {field: value.at(case) for field, value in GPUS[name].items()}
    share = {field: value.at(case) for field, value in assumed.items()}
    return Rates(
        flops=gpu["bf16" if precision == "fp16" else precision] * share["compute"],
        memory=gpu["memory"] * share["memory"],
        decode=gpu["cores"] * share["core_decode"] if decode_on_host else gpu["decode"],
        launch=share["launch"],
        pcie=gpu["pcie"] * share["pcie"],
        storage=storage,
        link=gpu["link"] * share["link"],
        network=gpu["network"] * share["link"],
        hop=share["hop"],
        node=int(gpu["node"]),
        overlap=share["overlap"],
        view_passes=share["crop_flip" if augment == "crop-flip" else "randaugment"],
        objective_passes=share["objective"],
        decode_on_device=name in DECODES_ON_SMS and not decode_on_host,
        pixels_over_pcie=decode_on_host,
    )


def roofline(ops: Iterable[Op], rates: Rates) -> tuple[float, float]:
    """Seconds of the operations limited by arithmetic, and of those limited by memory."""
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

    n devices exchange 2(n-1)/n of the bytes each. Between nodes each device sends its share of the
    node's sum, over its own part of the network; latencies are those of a tree.
    """
    inside = min(count, rates.node)
    nodes = math.ceil(count / rates.node)
    seconds = 2 * (inside - 1) / inside * size / rates.link
    seconds += 2 * (nodes - 1) / nodes * (size / inside) / rates.network
    return seconds + 2 * math.log2(count) * rates.hop


def view_seconds(work: Work, rates: Rates) -> float:
    if rates.views:
        return work.views / rates.views
    return rates.view_passes * rates.seconds(work.views * 3 * work.size**2 * FP32)


def objective_seconds(work: Work, rates: Rates) -> float:
    return rates.objective_passes * rates.seconds(work.views * work.classes * FP32)


def optimizer_seconds(work: Work, rates: Rates) -> float:
    return OPTIMIZER_PASSES * rates.seconds(work.parameters * FP32)


class Step(NamedTuple):
    seconds: float
    limit: str
    images: float
    """Per second, of all devices."""
    views: float
    parts: dict[str, float]
    """Seconds on each resource, whether or not it limits."""


def predict(
    work: Work, rates: Rates, *, k: int, devices: int = 1, image_bytes: float = IMAGE_BYTES.value
) -> Step:
    """A step of work.views views on each device, K of each image."""
    images = work.views / k
    compute, memory = roofline(work.forward, rates)
    backward = roofline(work.backward, rates)
    exchange = all_reduce(FP32 * work.parameters, devices, rates)
    memory += view_seconds(work, rates) + objective_seconds(work, rates)
    parts = {
        STORAGE: images * devices * image_bytes / rates.storage,
        PCIE: images * (DECODED_BYTES if rates.pixels_over_pcie else image_bytes) / rates.pcie,
        DECODE: images / rates.decode,
        LAUNCH: rates.launch * (len(work.forward) + len(work.backward) + OBJECTIVE_OPERATIONS),
        COMPUTE: compute + backward[0],
        MEMORY: memory + backward[1] + optimizer_seconds(work, rates),
        ALL_REDUCE: exchange,
    }
    exposed = max(0.0, exchange - rates.overlap * sum(backward))
    in_train = {COMPUTE: parts[COMPUTE], MEMORY: parts[MEMORY], ALL_REDUCE: exposed}
    ahead = {name: parts[name] for name in (STORAGE, PCIE, LAUNCH)}
    (in_train if rates.decode_on_device else ahead)[DECODE] = parts[DECODE]
    train = sum(in_train.values())
    slowest = max(ahead, key=ahead.__getitem__)
    seconds = max(train, ahead[slowest])
    # Within the training, the limit is the part that takes the most time.
    limit = slowest if ahead[slowest] > train else max(in_train, key=in_train.__getitem__)
    total = devices / seconds
    return Step(seconds, limit, images * total, work.views * total, parts)


def crossover_k(
    work: Work, rates: Rates, views: Sequence[int], *, image_bytes: float = IMAGE_BYTES.value
) -> int | None:
    """The smallest of these K at which decoding does not limit one device; None: it always does."""
    for k in sorted(views):
        if predict(work, rates, k=k, image_bytes=image_bytes).limit != DECODE:
            return k
    return None
