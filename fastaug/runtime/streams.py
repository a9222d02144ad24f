"""A GPU stream for work that runs while the training does, and what that work still reads."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class SideStream:
    """A stream of a GPU, next to the one that torch's operators use.

    Its handle names the GPU, unlike that of the default stream, which is 0 on every GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        # What this stream reads or copies, until an event shows that it has. The owner of that
        # memory may not know about this stream (DALI's lists do not): released earlier, it could be
        # overwritten while it is read.
        self._in_use: deque[tuple[torch.cuda.Event, Any]] = deque()

    def keep(self, owner: Any) -> torch.cuda.Event:
        """Keep `owner` until the work so far is done; the event that shows it."""
        event = self.stream.record_event()
        self._in_use.append((event, owner))
        return event

    def release(self) -> None:
        """Release what is not in use any more."""
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()
