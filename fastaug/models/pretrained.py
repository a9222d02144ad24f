"""Trained weights into a new network: names and shapes are matched, the head may be replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fastaug.errors import CheckpointError, few
from fastaug.models.head import head_parameters
from fastaug.models.timm_weights import convert_for_timm

NEEDED_SHARE = 0.9
"""Share of a network's weights without its head that a file must have. Batch norms and 3x3
convolutions of a ResNet-50 also fit into a ResNet-18: half of its weights, in most of its layers.
Files of the same network miss less than 1%. The network must also have this share of the file's
weights: those of a ResNet-18 are in every ResNet-34."""
REPLACED = "replaced"
"""Begins the line of the report about a head that is new."""
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""Added to names by DDP, torch.compile, and the modules that contain a network."""


@dataclass(frozen=True)
class WeightMatch:
    """What of a state dict fits into a network."""

    fitting: dict[str, Tensor]
    """By the network's names."""
    replaced: list[str]
    """Head weights that keep their new values, with both shapes."""
    misshapen: list[str]
    """Other weights whose shape differs, with both shapes."""
    missing: list[str]
    unused: list[str]
    matched: int
    """Number of matching weights of the network, without its head."""
    total: int
    """Number of its weights, without its head."""
    extra: int
    """Number of weights in the file that the network lacks, in modules that it has."""
    given: int
    """Number of weights in the file, in modules that the network has, without the head."""

    @property
    def is_complete(self) -> bool:
        return not self.misshapen and not self.missing

    def check(self, name: str, model: str) -> None:
        """Refuse weights of another network."""
        if self.matched < NEEDED_SHARE * self.total:
            raise CheckpointError(
                f"{name}: not the weights of a {model}: {self.matched:,} of its {self.total:,} "
                f"weights match by name and shape; choose the --model that they were trained with"
            )
        if self.extra > (1 - NEEDED_SHARE) * self.given:
            raise CheckpointError(
                f"{name}: the file is of a larger network: {self.extra:,} of its {self.given:,} "
                f"weights are not in a {model}; choose its --model"
            )
        for key, weight in self.fitting.items():
            if weight.is_floating_point() and not weight.isfinite().all():
                raise CheckpointError(f"{name}: {key} has non-finite values; use another file")

    def report(self) -> list[str]:
        """A line for each kind of weight that was not simply loaded."""
        kinds = {
            REPLACED: self.replaced,
            "other shape, starts from random values": self.misshapen,
            "not in the file, starts from random values": self.missing,
            "in the file, not in the network": self.unused,
        }
        return [f"{kind}: {few(names)}" for kind, names in kinds.items() if names]


def match_weights(
    model: nn.Module, weights: Mapping[str, Tensor], name: str, *, keep_head: bool = True
) -> WeightMatch:
    """Compare a state dict with a network, which may be on the meta device.

    name: of the model, as --model has it. keep_head: False if the head is for other classes.
    """
    own = model.state_dict()
    named = _without_prefixes(weights, own)
    head = head_parameters(model)
    found = _compare(own, named, head, keep_head)
    if not found.is_complete and name.lower().startswith("timm/"):
        converted = convert_for_timm(model, named, name.lower().removeprefix("timm/"))
        better = _compare(own, converted, head, keep_head)
        found = better if better.matched >= found.matched else found
    return found


def load_weights(model: nn.Module, match: WeightMatch) -> None:
    """Copy the fitting weights into the network; the others keep their values."""
    model.load_state_dict(match.fitting, strict=False)


def _without_prefixes(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict:
    """The weights by names without the prefixes that wrappers add, unless the network has them."""
    named: dict[str, Tensor] = {}
    for given, weight in weights.items():
        name = _without_prefix(given, own)
        named.setdefault(name if name in own else given, weight)
    return named


def _without_prefix(name: str, own: Mapping[str, Tensor]) -> str:
    while name not in own and (prefix := next(filter(name.startswith, _PREFIXES), "")):
        name = name.removeprefix(prefix)
    return name


def _compare(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], head: set[str], keep_head: bool
) -> WeightMatch:
    fitting: dict[str, Tensor] = {}
    replaced: list[str] = []
    misshapen: list[str] = []
    missing: list[str] = []
    for name, mine in own.items():
        theirs = weights.get(name)
        if theirs is None:
            # Counts are missing in files from before torch 1.0, and do not matter.
            if not name.endswith("num_batches_tracked"):
                (replaced if name in head else missing).append(name)
        elif name in head and (not keep_head or theirs.shape != mine.shape):
            replaced.append(f"{name} {list(theirs.shape)} -> {list(mine.shape)}")
        elif theirs.shape != mine.shape or theirs.is_floating_point() != mine.is_floating_point():
            misshapen.append(f"{name} {list(theirs.shape)} -> {list(mine.shape)}")
        else:
            fitting[name] = theirs
    body = {name: weight.numel() for name, weight in own.items() if name not in head}
    given = _weights_in_modules_of(own, head, weights)
    return WeightMatch(
        fitting=fitting,
        replaced=replaced,
        misshapen=misshapen,
        missing=missing,
        unused=[name for name in weights if name not in own],
        matched=sum(count for name, count in body.items() if name in fitting),
        total=sum(body.values()),
        extra=sum(count for name, count in given.items() if name not in own),
        given=sum(given.values()),
    )


def _weights_in_modules_of(
    own: Mapping[str, Tensor], head: set[str], weights: Mapping[str, Tensor]
) -> dict[str, int]:
    """Name -> number of values of the weights in a file that belong to a network of this family.

    By the top-level modules of the network without that of its head, as layer# for layer1. Other
    modules in the file do not make it a larger network: copies of it, other heads, decoders.
    """
    modules = {_module(name) for name in own} - {_module(name) for name in head}
    return {
        name: weight.numel()
        for name, weight in weights.items()
        if weight.is_floating_point() and _module(_without_prefix(name, own)) in modules
    }


def _module(name: str) -> str:
    return re.sub(r"\d+", "#", name.partition(".")[0])
