"""Images of a set in memory, on the device that makes their views."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np
import torch

from fastaug.errors import ConfigError


class DeviceArray:
    """An array [N, H, W, 3] uint8 as a tensor on a device."""

    def __init__(self, array: np.ndarray, device: torch.device) -> None:
        self.array = array
        if device.type == "cuda":
            _check_room(array.nbytes, device)
        self.tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)


def array_on(device: torch.device, array: np.ndarray) -> DeviceArray:
    """The array on a device: one copy, shared by all loaders, for as long as one of them exists."""
    key = (id(array), device)
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = DeviceArray(array, device)
    return found


_shared: WeakValueDictionary[tuple[int, torch.device], DeviceArray] = WeakValueDictionary()
"""By the id of an array, which the value keeps alive, so that no other array gets it."""


def _check_room(needed: int, device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ConfigError(
            f"the images take {needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB of "
            "free memory; use --loader torch, which leaves them in host memory, or store them as "
            "image files"
        )
