"""What a run folder contains, checked before a run writes to it: it may come from a stranger."""

from __future__ import annotations

from pathlib import Path

from fastaug.runs.checkpoint_writer import FOLDER
from fastaug.runtime.folder_files import check_entries

FILES = frozenset(
    {
        *("config.json", "metrics.jsonl", "summary.json", "views.png", "trace.json", "output.txt"),
        *("last.pt", "best.pt", "best.safetensors", "bad-batch.pt", "bad-images.txt", "stall.txt"),
        *("wandb.json", "mlflow.json", "mlflow.db", "trackio.json"),
    }
)
"""Names of files that a run writes."""


def check_contents(folder: Path) -> None:
    """Raise ConfigError for a link, a pipe or a device in a run folder or among its checkpoints,
    and for a folder in place of a file: a run would write, rename or delete files elsewhere, or
    wait for ever."""
    check_entries(folder, files=FILES, folders={FOLDER})
    kept = folder / FOLDER
    check_entries(kept, files={path.name for path in kept.glob("*.pt")})
