"""The inputs of the prediction: numbers of GPUs, nodes, network and storage, with their sources.

A source is a public document, or "assumed:" and why. What a document gives with sparsity or for
both directions is halved here, and the source says so. Where this was written (November 2026), the
data sheets and NVIDIA's pages on HGX, DGX A100 and NCCL 2.4 could not be opened: their numbers were
compared with https://glennklockwood.com/garden/processors/ (H100, B200), calculon-ai/calculon
a100_80g.json (A100 and its network) and dealers' pages (L4, DGX A100's cores). Of the other
documents, stored copies were read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from fastaug.errors import ConfigError, suggest

Case = Literal["low", "mid", "high"]
"""All assumptions at their slow end, as assumed, or at their fast end."""

A100 = "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/"
H100 = "NVIDIA H100 data sheet, https://www.nvidia.com/en-us/data-center/h100/"
L4 = "NVIDIA L4 data sheet, https://www.nvidia.com/en-us/data-center/l4/"
B200 = "NVIDIA HGX specifications, https://www.nvidia.com/en-us/data-center/hgx/"
DGX_A100 = (
    "NVIDIA on the DGX A100, https://developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100"
)
SUPERPOD = (
    "NVIDIA DGX SuperPOD H100, https://docs.nvidia.com/dgx-superpod/"
    "reference-architecture-scalable-infrastructure-h100/latest/dgx-superpod-components.html"
)
DGX_B200 = (
    "NVIDIA DGX B200 user guide, https://docs.nvidia.com/dgx/"
    "dgxb200-user-guide/introduction-to-dgxb200.html"
)
G2 = "Google Cloud GPU machines, https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth"
DALI_ISSUE = "NVIDIA's DALI blog as quoted in https://github.com/NVIDIA/DALI/issues/5362"
TORCHVISION = "https://github.com/pytorch/vision/pull/8496"
SPARSE = "; half of the figure with sparsity"
ONE_WAY = "; half of the figure for both directions"


@dataclass(frozen=True)
class Value:
    """A number, where it comes from, and the range that it may be in if that is not a point."""

    value: float
    unit: str
    source: str
    low: float | None = None
    high: float | None = None

    def at(self, case: Case) -> float:
        """low is the end that makes a step slower, which for a time is the larger number."""
        found = {"low": self.low, "mid": self.value, "high": self.high}[case]
        return self.value if found is None else found

    @property
    def assumed(self) -> bool:
        return self.source.startswith("assumed:")


@dataclass(frozen=True)
class Gpu:
    """A GPU and its share of the node that it is usually rented or bought in."""

    name: str
    bf16: Value
    """Dense peak; fp16 has the same."""
    fp32: Value
    """Dense peak of TF32, which torch's convolutions use for fp32."""
    memory: Value
    decode: Value
    """JPEGs like ImageNet's (about 500x375)."""
    pcie: Value
    """Host to GPU, one direction."""
    link: Value
    """To the other GPUs of the node, one direction."""
    network: Value
    """To other nodes, one direction, a GPU's share."""
    node: Value
    cores: Value
    decode_on_sms: bool = False
    """Decoding takes time from the network's kernels; else an engine of its own does it."""


def _flops(tera: float, source: str) -> Value:
    return Value(tera * 1e12, "FLOP/s", source)


def _rate(giga: float, source: str) -> Value:
    return Value(giga * 1e9, "B/s", source)


EIGHT = Value(8, "GPUs", "as in the vendors' nodes: DGX A100, DGX H100, DGX B200; " + G2)

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="A100",  # SXM, 80 GB
            bf16=_flops(312, A100),
            fp32=_flops(156, A100),
            memory=_rate(2039, A100),
            decode=Value(
                *(7000, "images/s"),
                f"7,000 with 75% of the images on the JPEG engine, 5,000 with all: {DALI_ISSUE}; "
                f"over 8,000 at 551x676: {TORCHVISION}",
                *(5000, 8000),
            ),
            pcie=_rate(32, A100 + ONE_WAY),
            link=_rate(300, A100 + ONE_WAY),
            network=_rate(25, "200 Gb/s for each GPU: " + DGX_A100),
            node=EIGHT,
            cores=Value(16, "cores", "128 for 8 GPUs: " + DGX_A100),
        ),
        Gpu(
            name="H100",  # SXM
            bf16=_flops(989.4, H100 + SPARSE),
            fp32=_flops(494.7, H100 + SPARSE),
            memory=_rate(3350, H100),
            decode=Value(
                *(10000, "images/s"),
                "assumed: no published rate found; 1.4 of the A100's, whose JPEG engine is older",
                *(7000, 14000),
            ),
            pcie=_rate(64, H100 + ONE_WAY),
            link=_rate(450, SUPERPOD + ONE_WAY),
            network=_rate(50, "400 Gb/s for each GPU: " + SUPERPOD),
            node=EIGHT,
            cores=Value(14, "cores", "112 for 8 GPUs: " + SUPERPOD),
        ),
        Gpu(
            name="L4",
            bf16=_flops(121, L4 + SPARSE),
            fp32=_flops(60, L4 + SPARSE),
            memory=_rate(300, L4),
            decode=Value(
                *(3000, "images/s"),
                "assumed: no published rate found; in CUDA, half of the A100's 6,000 without its "
                f"JPEG engine ({DALI_ISSUE}), for about half of its SMs",
                *(1500, 6000),
            ),
            pcie=_rate(32, L4 + ONE_WAY),
            link=_rate(32, "no NVLink, so over PCIe: " + L4 + ONE_WAY),
            network=_rate(12.5 / 8, "100 Gb/s for 8 GPUs (G2): " + G2),
            node=EIGHT,
            cores=Value(6, "cores", "assumed: 96 threads for 8 GPUs (g2-standard-96), two a core"),
            decode_on_sms=True,
        ),
        Gpu(
            name="B200",  # HGX, 1,000 W
            bf16=_flops(2250, B200 + SPARSE),
            fp32=_flops(1125, B200 + SPARSE),
            memory=_rate(8000, B200),
            decode=Value(
                *(10000, "images/s"),
                "assumed: no published rate found; as the H100, with a JPEG engine of its own",
                *(7000, 20000),
            ),
            pcie=_rate(64, "PCIe 5.0 x16: " + DGX_B200 + ONE_WAY),
            link=_rate(900, B200 + ONE_WAY),
            network=_rate(50, "400 Gb/s for each GPU: " + DGX_B200),
            node=EIGHT,
            cores=Value(14, "cores", "112 for 8 GPUs: " + DGX_B200),
        ),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet says. low and high make the band of the prediction."""

    compute: Value = Value(
        *(0.5, "of peak"), "assumed: large convolutions reach half of the peak", *(0.35, 0.7)
    )
    memory: Value = Value(
        *(0.75, "of peak"), "assumed: streaming kernels reach three quarters", *(0.6, 0.9)
    )
    pcie: Value = Value(*(0.8, "of peak"), "assumed: packet headers and gaps", *(0.6, 0.9))
    link: Value = Value(
        *(0.8, "of peak"),
        "NCCL's overhead is about 20%: https://github.com/NVIDIA/nccl-tests/issues/212",
        *(0.65, 0.9),
    )
    launch: Value = Value(
        *(5e-6, "s"), "assumed: the host needs this long to launch an operation", *(10e-6, 2.5e-6)
    )
    hop: Value = Value(
        *(20e-6, "s"),
        "assumed: latency of a message; NCCL's trees need 2 log2(n) of them, "
        "https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/",
        *(40e-6, 10e-6),
    )
    overlap: Value = Value(
        *(0.9, "of the backward pass"),
        "assumed: hides the all-reduce; the last bucket of DDP has nothing left to hide behind",
        *(0.6, 1.0),
    )
    crop_flip: Value = Value(
        *(1.5, "passes"),
        "assumed: fp32 passes of the fused kernel over a view: it writes it once (1) and reads its "
        "box of the decoded image, bytes and half of the image on average (0.5); slow end: as long "
        "as four passes for its arithmetic; fast end: boxes of one image come out of the cache",
        *(4, 1),
    )
    randaugment: Value = Value(
        *(4, "passes"),
        "assumed: those of crop-flip, and bytes written and read between the crop and each of 4 "
        "operations (0.5 each); slow end: twice that and its arithmetic; fast end: in the cache",
        *(10, 1.5),
    )
    objective: Value = Value(
        *(4, "passes"), "assumed: read logits, write gradient, scale it by autograd's", *(8, 2)
    )
    core_decode: Value = Value(
        *(390, "images/s"),
        "assumed: as on this project's development machine, 620 to 950 on 2 cores",
        *(310, 475),
    )

    def listed(self) -> Iterator[tuple[str, Value]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


ASSUMED = Assumptions()
STORAGE = Value(
    *(40e9, "B/s"),
    "assumed: what a file system gives to all GPUs together; one DGX H100 node alone can read over "
    f"40 GB/s: {SUPERPOD}",
)
IMAGE_BYTES = Value(
    *(110_000, "B"),
    "ImageNet takes 150 GB: https://developer.nvidia.com/blog/"
    "loading-data-fast-with-dali-and-new-jpeg-decoder-in-a100/; 1.33 million images",
)

PUBLISHED: Mapping[str, tuple[str, float, str]] = {
    "A100": (
        "timm/resnet50",
        2470,
        "NVIDIA's ResNet-50 v1.5, 1x A100 80 GB, mixed precision: https://github.com/NVIDIA/"
        "DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5",
    )
}
"""Training in images/s that others measured, to compare with: no input is fitted to it."""


def get_gpu(name: str) -> Gpu:
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in known:
        raise ConfigError(f"--gpus: no data for {name!r}: {suggest(name, known)}")
    return known[name.lower()]


def inputs(gpu: Gpu) -> Iterator[tuple[str, Value]]:
    for field in fields(gpu):
        if isinstance(value := getattr(gpu, field.name), Value):
            yield field.name, value
