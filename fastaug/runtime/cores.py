"""Numbers of cores and of loader workers."""

import os


def core_count() -> int:
    """Cores that this process may use."""
    # Containers limit the affinity, not os.cpu_count(); macOS has no affinity.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(workers: int) -> int:
    """--workers; -1: one fewer than this rank's share of the cores, 1 to 8."""
    return workers if workers >= 0 else min(8, max(1, core_count() // _local_ranks() - 1))


def _local_ranks() -> int:
    """Ranks on this machine, which share its cores."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1
