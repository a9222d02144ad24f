"""Trackio: wandb's interface, with local storage. TRACKIO_DIR says where, TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL name a Space or a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from PIL.Image import Image

from fastaug.runs.loggers.base import PROJECT, ServiceRun


class TrackioLogger:
    """A run of Trackio. It has the folder's name and an id, because runs are resumed by name."""

    def __init__(self) -> None:
        import trackio

        self._trackio = trackio

    def start(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        self._state = ServiceRun(folder / "trackio.json", resumed=resume_step is not None)
        if not self._state.id:
            self._state.keep(ServiceRun.new_id())
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{folder.name}-{self._state.id}",
            config=config,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._state.is_new(step, values):
            self._run.log(values, step=step)

    def picture(self, name: str, picture: Image) -> None:
        self._run.log({name: self._trackio.Image(picture)}, step=0)

    def close(self, summary: dict[str, Any] | None) -> None:
        self._run.finish()
