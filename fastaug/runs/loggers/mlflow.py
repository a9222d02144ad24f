"""MLflow. The store comes from MLFLOW_TRACKING_URI, the experiment from MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import logging
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL.Image import Image

from fastaug.errors import ConfigError
from fastaug.runs.loggers.base import PROJECT, ServiceRun
from fastaug.settings import typed

_MOST_PARAMS = 100
"""Parameters that MLflow takes in one call."""
_SQLITE = "sqlite:///"


class MlflowLogger:
    """A run of MLflow: on the server that its own variables name, else in RUN/mlflow.db."""

    def __init__(self) -> None:
        import mlflow

        self._mlflow = mlflow
        for name in ("alembic", "mlflow.store.db.utils"):  # every table that a new store makes
            logging.getLogger(name).setLevel(logging.WARNING)
        self._server = os.environ.get("MLFLOW_TRACKING_URI", "")
        # mlflow-skinny comes without them.
        if not self._server and not (find_spec("sqlalchemy") and find_spec("alembic")):
            raise ConfigError(
                "--log mlflow: a store in the run folder needs sqlalchemy and alembic; pip install "
                "'fastaug[loggers]', or set MLFLOW_TRACKING_URI to a server"
            )
        if self._server and urlsplit(self._server).scheme in ("", "file"):
            self._check_plain_files()

    def _check_plain_files(self) -> None:
        """MLflow 3 refuses to write its older plain files, unless a variable of its own is set."""
        allowed = getattr(self._mlflow.environment_variables, "MLFLOW_ALLOW_FILE_STORE", None)
        if allowed is not None and not allowed.get():
            raise ConfigError(
                f"--log mlflow: MLflow does not write plain files, got MLFLOW_TRACKING_URI="
                f"{self._server}; use sqlite:///runs/mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true"
            )

    def start(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> str:
        self._uri = self._server or f"{_SQLITE}{folder.absolute() / 'mlflow.db'}"
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        self._state = ServiceRun(folder / "mlflow.json", resumed=resume_step is not None)
        if known := self._known_run():
            self._client.update_run(self._state.id, status="RUNNING")
            for name, value in config.items():
                # Parameters of a run cannot be changed.
                if known.data.params.get(name) != typed(value):
                    key = f"{name} from step {resume_step}"
                    self._client.set_tag(self._state.id, key, typed(value))
        else:
            run = self._client.create_run(self._experiment(), run_name=folder.name)
            self._state.keep(run.info.run_id)
            params = [self._mlflow.entities.Param(n, typed(v)) for n, v in config.items()]
            for first in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._state.id, params=params[first : first + _MOST_PARAMS])
        return self._where()

    def _where(self) -> str:
        if self._uri.startswith(_SQLITE):
            file = self._uri.removeprefix(_SQLITE)
            return f"{file} (mlflow ui --backend-store-uri {self._uri})"
        parts = urlsplit(self._uri)  # it may have a password
        return f"{parts.scheme}://{parts.hostname}" if parts.hostname else self._uri

    def _known_run(self) -> Any:
        """The run that is continued; None if there is none, also if another store is used now."""
        try:
            return self._client.get_run(self._state.id) if self._state.id else None
        except self._mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if known := self._client.get_experiment_by_name(name):
            return known.experiment_id
        beside = None
        if self._uri.startswith(_SQLITE):  # by default its pictures would be in the current folder
            file = Path(self._uri.removeprefix(_SQLITE).partition("?")[0])
            beside = file.absolute().with_suffix("").as_uri()
        return self._client.create_experiment(name, artifact_location=beside)

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._state.is_new(step, values):
            now = int(1000 * time.time())
            metrics = [self._mlflow.entities.Metric(n, v, now, step) for n, v in values.items()]
            self._client.log_batch(self._state.id, metrics=metrics)

    def picture(self, name: str, picture: Image) -> None:
        self._client.log_image(self._state.id, picture, artifact_file=f"{name}.png")

    def close(self, summary: dict[str, Any] | None) -> None:
        status = "KILLED" if summary is None else "FINISHED"
        self._client.set_terminated(self._state.id, status)
