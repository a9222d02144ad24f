"""The settings of a run, as values. Every check of a value is here, and nowhere else.

The other commands' are in options.py.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastaug.errors import ConfigError, suggest


@dataclass(frozen=True)
class TrainConfig:
    """Train an image classifier on K random views of every image at once."""

    recipe: str = "shapes"
    """Named defaults of all other flags, one for each experiment of the paper and for its small
    versions; --list-recipes says which there are."""

    # --- data ---
    data: str = "shapes"
    """shapes (built in), a folder of class folders or of shards (WebDataset, TFRecord, RecordIO) in
    train/ and val/ or test/, CIFAR-10 or CIFAR-100 in python format (folder or .tar.gz), or an .npz
    with images and labels."""
    loader: Literal["torch", "dali"] = "torch"
    """What decodes the images and makes the views; --dali is short for --loader dali."""
    workers: int = -1
    """Loader processes (torch) or threads (dali); -1: one less than the cores, 1 to 8; 0: no
    process of their own (torch), one thread (dali)."""
    prefetch: int = 2
    """Batches that the dali loader works on ahead of the training."""
    decode_memory: int = 0
    """MiB that each of DALI's decoders reserves from the start, on the host and on the GPU, so that
    large images do not make it grow later; 0: what the first images need."""
    scan: Literal["quick", "full"] = "quick"
    """How images are looked at before the training. quick: header, size and end; full: decoded."""
    max_bad: float = 0.01
    """Largest share of images that may be bad, 0 to 1. They are listed and not used: training takes
    another image in their place, evaluation goes without."""
    last_batch: Literal["drop", "fill"] = "drop"
    """Images of an epoch that make no whole step. drop: left out, others each time; fill: the step
    is filled with images from the start of the epoch's order."""
    train_images: int = 0
    """Training images that are used, as many of each class as of the others; 0: all."""
    validation: float = 0.0
    """Share of the training images, of each class, that is held out and evaluated after each epoch
    in place of the test images; the final evaluation is of both. 0: none."""
    size: int = 32
    """Side of a view in pixels."""
    views: int = 4
    """K, the number of random views of each image in a step."""
    batch_size: int = 32
    """Views in an optimizer step, of all ranks together: batch-size / views unique images."""
    augment: Literal["none", "crop-flip", "randaugment"] = "crop-flip"
    """What makes a view. none: the central crop; randaugment: crop, flip and RandAugment."""
    crop: Literal["resized", "pad"] = "resized"
    """resized: random area and aspect ratio; pad: reflect 4 pixels around, crop --size (CIFAR)."""
    crop_area: tuple[float, float] = (0.35, 1.0)
    """Smallest and largest share of the image's area in a resized crop."""
    crop_sampling: Literal["dali", "tf"] = "dali"
    """How resized crops are drawn. dali: area uniform, ratio log-uniform; tf: ratio and height
    uniform, at least 0.1 of the image, as the paper's pipeline does."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How crops are resized to the view; the default is the paper's."""
    antialias: bool = False
    """Shrinking widens the filter of --interpolation, so that every pixel of the crop counts, as in
    Pillow (but for a view's outermost pixels); the default is the paper's."""
    randaugment_policy: Literal["nfnet", "dali"] = "nfnet"
    """nfnet: the paper's 16 operations; dali: DALI's own 14, magnitude 0 to 30 (dali loader)."""
    randaugment_layers: int = 4
    """N, the operations that RandAugment applies one after another."""
    randaugment_magnitude: float = 5.0
    """M, the strength of RandAugment's operations, 0 to 10 (0 to 30 of the dali policy)."""
    normalize: Literal["imagenet", "cifar"] = "imagenet"
    """Whose channel means and deviations the views are normalized with."""
    views_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """What the loader hands out; fp16 and bf16 halve its memory and need --precision bf16 or
    fp16."""
    views_engine: Literal["auto", "fused", "dali"] = "auto"
    """What makes the views in the dali loader. fused: one kernel for all of a view (needs g++ on a
    CPU); dali: DALI's operators; auto: fused where it is admitted, and the run says which."""

    # --- model ---
    model: str = "wrn-10-1"
    """wrn-D-W, nf_resnet26, nf_resnet50, nf_resnet101, nfnet_f0, resnet18, or timm/NAME."""
    dropout: float = 0.0
    """Dropout rate before the last layer (nf_resnet, nfnet and timm models)."""
    stochastic_depth: float = 0.0
    """Stochastic depth rate of the deepest block (nf_resnet, nfnet and timm models)."""

    batch_norm: Literal["local", "sync"] = "local"
    """Whose statistics batch norm takes where there are several ranks. local: each rank's own part
    of a step; sync: all ranks' together (resnet18), which waits for the others in every layer."""

    # --- objective ---
    average: Literal["losses", "probs", "logits"] = "losses"
    """What is averaged over the views of an image."""
    kl_weight: float = 1.0
    """Weight of the pairwise KL between the views of an image; 0 is without the regularizer."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the classes."""
    kernel: str = "auto"
    """Loss kernel: auto, a registered name, or package.module:attribute."""

    # --- optimizer ---
    epochs: int = 12
    """Passes over the training images; the schedule ends with the last one."""
    max_steps: int = 0
    """Stop after this many optimizer steps in all, schedule unchanged; 0 is no limit."""
    lr: float = 0.04
    """Learning rate, before --lr-scaling and --schedule."""
    lr_scaling: Literal["none", "unique-images"] = "none"
    """unique-images: lr is multiplied by the unique images in a step, as the paper's WRNs do."""
    schedule: Literal["halving", "cosine", "warmup-cosine"] = "cosine"
    """halving: constant for half of the steps, then halved ten times, evenly spaced."""
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up of the warmup-cosine schedule."""
    momentum: float = 0.9
    """SGD momentum."""
    nesterov: bool = False
    """Nesterov momentum."""
    weight_decay: float = 5e-4
    """Decay of the weights; gains, biases and SkipInit scalars have none."""
    optimizer: Literal["sgd", "apex"] = "sgd"
    """sgd: torch's fused SGD; apex: NVIDIA apex's FusedSGD (needs a GPU)."""
    accumulate: int = 1
    """Parts that an optimizer step is computed in, to save memory."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, used in evaluation; 0 is off."""

    # --- evaluation ---
    eval_every: int = 1
    """Evaluate after every so many epochs, and always after the last."""
    eval_views: int = 2
    """Views of each test image for the invariance after an epoch; 0 is the central crop alone."""
    tta: int = 8
    """Views of each test image in the final evaluation, which also has the accuracy over the first
    1, 2, 4, ... of them; 0 is the central crop alone."""

    # --- machine ---
    device: str = "auto"
    """auto, cpu, cuda, or cuda:N."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the network; the last layer and the loss are always fp32."""
    compile: bool = False
    """Compile the network with torch.compile."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and the views."""

    # --- run ---
    out: str = ""
    """Run folder; default: runs/RECIPE-DATE-TIME-PROCESS."""
    resume: str = ""
    """Continue from a run folder or checkpoint; auto: from the newest run, or from --out."""
    log_every: int = 20
    """Steps between two readings of the metrics from the device."""
    checkpoint_every: int = 0
    """Steps between two checkpoints, besides that of every epoch; 0: by the clock alone."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints, likewise; 0: none by the clock."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept: if the last one is damaged, the one before is taken; 1:
    there is none before it."""
    max_bad_steps: int = 20
    """Steps in a row with a loss or gradient that is no number after which the run stops; each of
    them is skipped and noted."""
    stall_timeout: float = 1200.0
    """Seconds without progress of the training after which the run ends with the stack of every
    thread; 0: never."""
    profile: bool = False
    """Write a Chrome trace of a few steps to trace.json in the run folder, with named ranges (NVTX
    too on a GPU). Of DALI it shows what training feeds it and waits for, not its own threads."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                finite = "" if math.isfinite(value) else "finite, and "
                raise ConfigError(f"{flag(name)} must be {finite}at least {least}, got {value}")
        for name in _BELOW_ONE:
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ConfigError(f"{flag(name)} must be at least 0 and below 1, got {value}")
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ConfigError(f"--crop-area takes 0 < LOW <= HIGH <= 1, got {low} {high}")
        self._check_randaugment()
        if self.max_bad > 1:
            raise ConfigError(f"--max-bad is a share, between 0 and 1, got {self.max_bad}")
        if self.views_dtype != "fp32" and self.precision == "fp32":
            raise ConfigError(
                f"--views-dtype {self.views_dtype} needs --precision fp16 or bf16: "
                "a network in fp32 takes fp32"
            )
        self._check_views_engine()
        if self.seed >= 2**32:
            raise ConfigError(f"--seed must be below 2**32, got {self.seed}")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("--nesterov needs a --momentum above 0")
        if self.schedule == "warmup-cosine" and self.warmup_epochs >= self.epochs:
            raise ConfigError(
                f"--warmup-epochs must be below --epochs ({self.epochs}), got {self.warmup_epochs}"
            )
        self.images_per_part()

    def _check_randaugment(self) -> None:
        magnitude, layers = self.randaugment_magnitude, self.randaugment_layers
        if layers > 16:
            raise ConfigError(f"--randaugment-layers must be between 1 and 16, got {layers}")
        if self.randaugment_policy == "nfnet" and magnitude > 10:
            raise ConfigError(f"--randaugment-magnitude must be between 0 and 10, got {magnitude}")
        if self.randaugment_policy == "dali":
            if self.augment == "randaugment" and self.loader != "dali":
                raise ConfigError(
                    "--randaugment-policy dali needs --loader dali: its operations are DALI's own"
                )
            if magnitude > 30 or magnitude != int(magnitude):
                raise ConfigError(
                    "--randaugment-magnitude must be a whole number from 0 to 30 with "
                    f"--randaugment-policy dali, got {magnitude}"
                )

    def _check_views_engine(self) -> None:
        engine = self.views_engine
        if engine != "auto" and self.loader != "dali":
            raise ConfigError(
                f"--views-engine is of the dali loader: add --dali; got {engine} with "
                f"--loader {self.loader}, which takes auto alone"
            )
        own = self.augment == "randaugment" and self.randaugment_policy == "dali"
        if engine == "fused" and own:
            raise ConfigError(
                "--views-engine fused has no operations of --randaugment-policy dali: use "
                "--views-engine dali or auto, or --randaugment-policy nfnet"
            )

    @property
    def images_per_step(self) -> int:
        """Unique images in an optimizer step over all ranks."""
        return self.batch_size // self.views

    def images_per_part(self, ranks: int = 1) -> int:
        """Unique images in one forward pass of one rank."""
        unit = self.views * self.accumulate * ranks
        below = self.batch_size // unit * unit
        if below != self.batch_size:
            factors = f"--views ({self.views})"
            factors += f" x --accumulate ({self.accumulate})" if self.accumulate > 1 else ""
            factors += f" x ranks ({ranks})" if ranks > 1 else ""
            nearest = " or ".join(str(size) for size in (below, below + unit) if size > 0)
            raise ConfigError(
                f"--batch-size counts views, so it must be a multiple of {factors}; "
                f"got {self.batch_size}, nearest: {nearest}"
            )
        return self.batch_size // unit

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for JSON and checkpoints."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(
                f"unknown setting {unknown[0]!r}: {suggest(unknown[0], known)} "
                "(written by another version of fastaug?)"
            )
        plain: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in values.items()
        }
        return cls(**plain)

    def differences(self, other: TrainConfig) -> list[str]:
        """Settings that would make the rest of the run another training, with both values."""
        return [
            f"{flag(field.name)} {getattr(self, field.name)} (here: {getattr(other, field.name)})"
            for field in fields(self)
            if field.name not in FREE_ON_RESUME
            and getattr(self, field.name) != getattr(other, field.name)
        ]


def flag(name: str) -> str:
    """A field's name as it is typed: kl_weight -> --kl-weight."""
    return "--" + name.replace("_", "-")


def check_choices(config: Any) -> None:
    """The values of Literal fields, for configs that were not made by the command line."""
    for name, choices in _choices(type(config)):  # type: ignore[arg-type]
        if (value := getattr(config, name)) not in choices:
            raise ConfigError(f"{flag(name)} cannot be {value!r}: {suggest(str(value), choices)}")


@cache
def _choices(kind: type) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The Literal fields of a config: looked up once, as a sweep makes thousands of them."""
    hints = get_type_hints(kind).items()
    return tuple((name, get_args(hint)) for name, hint in hints if get_origin(hint) is Literal)


_LEAST: dict[str, float] = {
    "workers": -1,
    "prefetch": 1,
    "decode_memory": 0,
    "max_bad": 0,
    "train_images": 0,
    "size": 8,
    "views": 1,
    "batch_size": 1,
    "randaugment_layers": 1,
    "randaugment_magnitude": 0,
    "kl_weight": 0,
    "epochs": 1,
    "max_steps": 0,
    "lr": 0,
    "warmup_epochs": 0,
    "weight_decay": 0,
    "accumulate": 1,
    "eval_every": 1,
    "eval_views": 0,
    "tta": 0,
    "seed": 0,
    "log_every": 1,
    "checkpoint_every": 0,
    "checkpoint_minutes": 0,
    "keep_checkpoints": 1,
    "max_bad_steps": 1,
    "stall_timeout": 0,
}
_BELOW_ONE = ("label_smoothing", "dropout", "stochastic_depth", "momentum", "ema", "validation")
# Where a run lives and how it is watched, and what computes the same thing elsewhere or faster. The
# data may have moved: the loader's state checks that it is the same set.
FREE_ON_RESUME = {
    "data",
    "loader",
    "workers",
    "prefetch",
    "decode_memory",
    "scan",
    "max_bad",
    "views_engine",
    "kernel",
    "max_steps",
    "eval_every",
    "eval_views",
    "tta",
    "device",
    "compile",
    "out",
    "resume",
    "log_every",
    "checkpoint_every",
    "checkpoint_minutes",
    "keep_checkpoints",
    "max_bad_steps",
    "stall_timeout",
    "profile",
    "debug",
}
