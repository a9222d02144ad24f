"""Settings of a run: seed, device, precision, run folder, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.errors import ConfigError, suggest
from fastaug.settings import Settings, setting, typed

LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")
NO_LOGGER = "none"


@dataclass(frozen=True)
class RunConfig(Settings):
    """The run: device, precision, run folder, checkpoints, logging."""

    recipe: str = ""
    """Named set of defaults for all other flags: one for each experiment of the paper, small
    versions for a CPU, and finetune; --list-recipes shows them. Default: shapes on the built-in
    data set, none on other data."""
    seed: int = setting(0, at_least=0, below=2**32)
    """Seed of the initial weights, the image order, the views and dropout."""
    device: str = setting("auto", free_on_resume=True, free_on_ranks=True)
    """auto, cpu, cuda, or cuda:N."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of the network; the last layer and the loss are always fp32. tf32: convolutions and
    matrix products in TF32 on a GPU, as fp32 on a CPU; bf16, fp16: autocast."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = setting(
        "off", free_on_resume=True
    )
    """Compile the network with torch.compile, in this mode; without a value: default.
    reduce-overhead and max-autotune use CUDA graphs: on one GPU, without --accumulate."""
    deterministic: bool = setting(False, free_on_resume=True)
    """Use only deterministic algorithms of torch and cuDNN on a GPU, so that a run can be repeated
    bit for bit; slower. Does not cover JPEGs that DALI decodes on the GPU."""
    cuda_graph: bool = setting(False, free_on_resume=True)
    """Launch each step as CUDA graphs, captured after 3 ordinary steps: for small networks, whose
    kernels take less time than their launches. Takes more memory; one GPU, without --compile."""
    out: str = setting("", free_on_resume=True, free_on_ranks=True)
    """Run folder; default: runs/RECIPE-DATE-TIME-PROCESS."""
    resume: str = setting("", free_on_resume=True, free_on_ranks=True)
    """Run folder or checkpoint to continue from; auto: --out if given, else the newest in runs/."""
    progress_every: float = setting(
        30.0, at_least=0, at_most=1e9, free_on_resume=True, free_on_ranks=True
    )
    """Print a progress line every N seconds where there is no terminal, such as in a cluster's log;
    0: off."""
    log: tuple[str, ...] = setting(("tensorboard",), free_on_resume=True, free_on_ranks=True)
    """Where to log besides metrics.jsonl: any of tensorboard, wandb, mlflow, trackio, and your own
    as package.module:attribute; none: nowhere else."""
    log_every: int = setting(20, at_least=1, free_on_resume=True)
    """Log the training metrics every N steps; each reading waits for the device."""
    checkpoint_every: int = setting(0, at_least=0, free_on_resume=True)
    """Write a checkpoint every N steps, besides the one after each epoch; 0: off."""
    checkpoint_minutes: float = setting(10.0, at_least=0, free_on_resume=True)
    """Write a checkpoint every N minutes, besides the one after each epoch; 0: off."""
    keep_checkpoints: int = setting(3, at_least=1, free_on_resume=True)
    """Number of checkpoints to keep: if the newest is damaged, the previous one is used."""
    max_bad_steps: int = setting(20, at_least=1, free_on_resume=True)
    """Stop after this many consecutive steps with a non-finite loss or gradient; each of them is
    skipped and logged."""
    stall_timeout: float = setting(
        1200.0, at_least=0, at_most=1e9, free_on_resume=True, free_on_ranks=True
    )
    """End the run after this many seconds without progress, with the stack of every thread; 0:
    never."""
    profile: bool = setting(False, free_on_resume=True, free_on_ranks=True)
    """Write a Chrome trace of a few steps to trace.json in the run folder, with named ranges (and
    NVTX ranges on a GPU). DALI's own threads are not in it."""
    debug: bool = setting(False, free_on_resume=True, free_on_ranks=True)
    """Print the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graph and self.compile != "off":
            raise ConfigError(
                f"--cuda-graph cannot be combined with --compile, got {self.compile}; "
                "use --compile reduce-overhead, or one of the two"
            )
        self._check_log()

    def _check_log(self) -> None:
        for name in self.log:
            if name not in (*LOGGERS, NO_LOGGER) and ":" not in name:
                hint = suggest(name, (*LOGGERS, NO_LOGGER))
                raise ConfigError(
                    f"--log cannot be {name!r}: {hint} (your own: package.module:attribute)"
                )
        if len(set(self.log)) < len(self.log) or (NO_LOGGER in self.log and len(self.log) > 1):
            raise ConfigError(
                f"--log takes each name once, and none only by itself, got {typed(self.log)}"
            )

    @property
    def compiles_to_graphs(self) -> bool:
        """True if torch.compile uses CUDA graphs."""
        return self.compile in ("reduce-overhead", "max-autotune")
