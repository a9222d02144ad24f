"""Settings of a run: seed, device, precision, run folder, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class RunConfig(Settings):
    """The run: where it computes, what it writes, how it is watched."""

    recipe: str = "shapes"
    """Named defaults of all other flags, one for each experiment of the paper and for its small
    versions; --list-recipes shows them."""
    seed: int = setting(0, at_least=0, below=2**32)
    """Seed of the initial weights, the order of the images and the views."""
    device: str = setting("auto", free_on_resume=True)
    """auto, cpu, cuda, or cuda:N."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the network; the last layer and the loss are always fp32."""
    compile: bool = setting(False, free_on_resume=True)
    """Compile the network with torch.compile."""
    out: str = setting("", free_on_resume=True)
    """Run folder; default: runs/RECIPE-DATE-TIME-PROCESS."""
    resume: str = setting("", free_on_resume=True)
    """Continue from a run folder or checkpoint; auto: from the newest run, or from --out."""
    progress_every: float = setting(30.0, at_least=0, free_on_resume=True)
    """Seconds between two progress lines where there is no terminal, as in a cluster's log; 0:
    none."""
    log_every: int = setting(20, at_least=1, free_on_resume=True)
    """Steps between two readings of the metrics from the device."""
    checkpoint_every: int = setting(0, at_least=0, free_on_resume=True)
    """Steps between two checkpoints, besides the one after every epoch; 0: --checkpoint-minutes
    only."""
    checkpoint_minutes: float = setting(10.0, at_least=0, free_on_resume=True)
    """Minutes between two checkpoints, besides the one after every epoch; 0: off."""
    keep_checkpoints: int = setting(3, at_least=1, free_on_resume=True)
    """Newest checkpoints to keep: if the last one is damaged, the one before it is used."""
    max_bad_steps: int = setting(20, at_least=1, free_on_resume=True)
    """Consecutive steps with a non-finite loss or gradient after which the run stops; each of them
    is skipped and logged."""
    stall_timeout: float = setting(1200.0, at_least=0, free_on_resume=True)
    """Seconds without progress after which the run ends with all threads' stacks; 0: never."""
    profile: bool = setting(False, free_on_resume=True)
    """Write a Chrome trace of a few steps to trace.json in the run folder, with named ranges (NVTX
    too on a GPU). Of DALI it shows what training feeds it and waits for, not its own threads."""
    debug: bool = setting(False, free_on_resume=True)
    """Show the traceback of an error."""
