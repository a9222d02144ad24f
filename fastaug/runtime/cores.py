"""How many threads or processes the work on images gets."""

import os


def core_count() -> int:
    """Cores that this process may use."""
    # Containers limit the affinity, not the count; macOS has no affinity.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(workers: int) -> int:
    """--workers as given, or one less than this rank's share of the cores, 1 to 8."""
    return workers if workers >= 0 else min(8, max(1, core_count() // _ranks_here() - 1))


def _ranks_here() -> int:
    """Ranks of this machine, as torchrun says: they all see the same cores."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1
