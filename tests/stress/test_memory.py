"""Memory of a whole process: pages that are kept, and a loader that must not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from fastaug.config import TrainConfig

LOADER_SIZES = """
import json, sys, fastaug
from fastaug.config import TrainConfig
loader = fastaug.build_loader(TrainConfig.from_saved(json.loads(sys.argv[1])))
sizes = []
for epoch in range(20):
    assert sum(1 for batch in loader) == len(loader)
    sizes.append(int(open("/proc/self/statm").read().split()[1]))
print(sizes[1], sizes[-1])
"""


def test_dalis_operators_do_not_grow_from_epoch_to_epoch(tiny: Callable[..., TrainConfig]) -> None:
    """Resident pages after 20 epochs, against those after the second."""
    config = tiny(loader="dali", views_engine="dali", augment="randaugment", size=64)
    command = [sys.executable, "-c", LOADER_SIZES, json.dumps(config.to_flat())]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    second, last = map(int, result.stdout.split())
    assert last < 1.05 * second, (second, last)


FAULTS = """
import resource, torch
from fastaug.runtime.device import keep_freed_memory
keep_freed_memory(torch.device({device!r}))
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
counts = []
for _ in range(20):
    before = faults()
    tensor = torch.ones(16_000_000)
    del tensor
    counts.append(faults() - before)
print(sum(counts[10:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("device", "variables", "kept"),
    [("cpu", {}, True), ("cuda", {}, False), ("cpu", {"MALLOC_MMAP_MAX_": "65536"}, False)],
    ids=["cpu", "gpu", "decided by the user"],
)
def test_freed_memory_is_kept(device: str, variables: dict[str, str], kept: bool) -> None:
    """The system hands out a page at its first touch: 10 tensors of 64 MB are 156,000 of them.

    The first ten are not counted: small blocks find their places among the large ones.
    """
    others = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(device=device)],
        capture_output=True,
        text=True,
        check=True,
        env=others | variables,
    )
    faults = int(done.stdout)
    # Large pages of 2 MB, where the system gives them unasked, would be 300.
    assert faults < 100 if kept else faults > 100
