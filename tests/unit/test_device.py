"""What is done before training on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
