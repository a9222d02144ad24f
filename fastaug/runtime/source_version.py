"""The commit that a checkout of fastaug is at, so that a result can name the code it came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fastaug

ROOT = Path(fastaug.__file__).parents[1]
RESULTS = "benchmarks/results"
_SECONDS = 10


def source_commit(root: Path = ROOT) -> str:
    """The commit of the checkout that fastaug is imported from, with "-dirty" if files of it other
    than results differ from the commit; empty if it is installed, or git is not."""
    if not (root / ".git").exists():
        return ""
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        # Runs write their results into the checkout while others still go on.
        changes = _git(root, "diff", "HEAD", "--", ".", f":(exclude){RESULTS}")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}-dirty" if changes else commit


def _git(root: Path, *words: str) -> str:
    # Without optional locks git writes nothing, also in a checkout that is read-only.
    command = ["git", "--no-optional-locks", "-C", str(root), *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    return found.stdout
