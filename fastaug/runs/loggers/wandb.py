"""Weights & Biases. Project, entity and mode come from WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from PIL.Image import Image

from fastaug.errors import ConfigError
from fastaug.runs.loggers.base import PROJECT, ServiceRun


class WandbLogger:
    """A run of Weights & Biases, in RUN/wandb until it is uploaded."""

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb
        # Else wandb.init would ask for a key, in a thread and behind a progress bar. Not verified:
        # a run must also start, or be started again, while the server cannot be reached.
        is_online = wandb.setup().settings.mode in ("online", "shared")
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "--log wandb: not logged in; run wandb login, or set WANDB_API_KEY, or "
                "WANDB_MODE=offline to upload later with wandb sync"
            )

    def start(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> str | None:
        self._state = ServiceRun(folder / "wandb.json", resumed=resume_step is not None)
        if not self._state.id:
            self._state.keep(ServiceRun.new_id())
        files = Path(os.environ.get("WANDB_DIR", folder))
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=self._state.id,
            resume="allow",
            dir=str(files),
            config=config,
            reinit="create_new",  # a run of whoever calls this trainer stays as it is
            settings=self._wandb.Settings(console="off", quiet=True, silent=True),
        )
        if resume_step is not None:
            self._run.config.update(config, allow_val_change=True)
        if self._run.offline:
            return f"{files / 'wandb'}, offline; wandb sync uploads it"
        return self._run.url

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._state.is_new(step, values):
            self._run.log(values, step=step)

    def picture(self, name: str, picture: Image) -> None:
        self._run.log({name: self._wandb.Image(picture)}, step=0)

    def close(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            numbers = {n: v for n, v in summary.items() if isinstance(v, (int, float))}
            self._run.summary.update(numbers)
        self._run.finish(exit_code=1 if summary is None else 0)
