"""The commit that a checkout of fastaug is at, so that a result can name the code it came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fastaug

ROOT = Path(fastaug.__file__).parents[1]
_SECONDS = 10


def source_commit(root: Path = ROOT) -> str:
    """The commit of the checkout that fastaug is imported from, with "-dirty" if files of it differ
    from the commit; empty if it is installed, or git is not."""
    if not (root / ".git").exists():
        return ""
    # Without optional locks git writes nothing, also in a checkout that is read-only.
    git = ["git", "--no-optional-locks", "-C", str(root)]
    command = [*git, "describe", "--always", "--exclude=*", "--abbrev=12"]
    try:
        found = subprocess.run(
            [*command, "--dirty"], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
