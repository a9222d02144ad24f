"""A GPU that hangs: the run ends with exit code 75, although its weights cannot be copied.

Null mode: the copy is torch's own, which must wait without Python's lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fastaug.config import TrainConfig

STAND_INS = {"devices": 1}
PROGRAM = """
import sys
from pathlib import Path
import nullgpu_client as gpu
from fastaug.config import TrainConfig
from fastaug.engine.trainer import Trainer
from fastaug.runtime import watchdog

watchdog._LAST_RESORT = 2.0
trainer = Trainer(TrainConfig.from_flat(**{settings!r}))
update = trainer.learner.update

def update_and_hang(*arguments, **options):
    if trainer.step == 2:
        gpu.hang()
    return update(*arguments, **options)

trainer.learner.update = update_and_hang
trainer.fit()
"""


def test_a_run_on_a_gpu_that_hangs_ends(tiny: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = tiny(device="cuda", kernel="reference", stall_timeout=4.0)
    program = PROGRAM.format(settings=config.to_flat())
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 75, ended.stderr[-3000:]
    stalled, not_saved = (line for line in ended.stderr.splitlines() if line.startswith("error:"))
    assert "--stall-timeout" in stalled
    assert "2 s" in not_saved
    assert not (Path(config.run.out) / "last.pt").exists()
