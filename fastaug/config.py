"""TrainConfig: all settings of a run, one dataclass per component, each declared beside its owner.

Settings that depend on another component's are checked here; all other checks are in the
components.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Self, get_type_hints

from fastaug.data.config import DataConfig
from fastaug.engine.config import FUSED, EvalConfig, OptimConfig
from fastaug.errors import ConfigError, shown, suggest
from fastaug.kernels.config import LossConfig
from fastaug.models.config import ModelConfig
from fastaug.runs.config import RunConfig
from fastaug.settings import flag, plain, typed
from fastaug.views.config import ViewConfig

HALF_PRECISIONS = ("bf16", "fp16")
_RENAMED = {"optimiser": "optimizer", "normalise": "normalize"}
"""Settings of earlier versions, and what they are called now."""
_COMPILE = {False: "off", True: "default"}
"""--compile of earlier versions, which was a switch."""


@dataclass(frozen=True)
class TrainConfig:
    """Train an image classifier on K random views of every image at once."""

    data: DataConfig = field(default_factory=DataConfig)
    view: ViewConfig = field(default_factory=ViewConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        view, loader, precision = self.view, self.data.loader, self.run.precision
        if view.views_dtype in HALF_PRECISIONS and precision not in HALF_PRECISIONS:
            raise ConfigError(
                f"--views-dtype {view.views_dtype} needs --precision fp16 or bf16, got {precision}"
            )
        if loader != "dali" and view.views_engine != "auto":
            raise ConfigError(
                f"--views-engine {view.views_engine} needs --loader dali, got --loader {loader}; "
                "add --dali"
            )
        if loader != "dali" and view.uses_dali_policy:
            raise ConfigError(
                f"--randaugment-policy dali needs --loader dali, got --loader {loader}; add --dali"
            )
        if self.run.compiles_to_graphs and self.optim.accumulate > 1:
            raise ConfigError(
                f"--compile {self.run.compile} overwrites gradients that are accumulated, got "
                f"--accumulate {self.optim.accumulate}; use --compile default"
            )
        if self.run.cuda_graph and self.optim.optimizer not in FUSED:
            raise ConfigError(
                f"--cuda-graph needs --optimizer sgd, adam or adamw, got {self.optim.optimizer}; "
                "omit it"
            )
        self.images_per_part()

    @property
    def resolved_view(self) -> ViewConfig:
        """The settings of the views, with the dtype that --views-dtype auto stands for."""
        if self.view.views_dtype != "auto":
            return self.view
        precision = self.run.precision
        # The network would cast them anyway, to the same values.
        dtype: Any = precision if precision in HALF_PRECISIONS else "fp32"
        return replace(self.view, views_dtype=dtype)

    @property
    def images_per_step(self) -> int:
        """Unique images in an optimizer step over all ranks."""
        return self.optim.batch_size // self.view.views

    def images_per_part(self, ranks: int = 1) -> int:
        """Unique images in one forward pass of one rank."""
        batch_size, views, accumulate = (
            self.optim.batch_size,
            self.view.views,
            self.optim.accumulate,
        )
        unit = views * accumulate * ranks
        below = batch_size // unit * unit
        if below != batch_size:
            factors = f"--views ({views})"
            factors += f" x --accumulate ({accumulate})" if accumulate > 1 else ""
            factors += f" x ranks ({ranks})" if ranks > 1 else ""
            nearest = " or ".join(str(size) for size in (below, below + unit) if size > 0)
            raise ConfigError(
                f"--batch-size counts views, so it must be a multiple of {factors}; "
                f"got {batch_size}, nearest: {nearest}"
            )
        return batch_size // unit

    # --- settings by their flag names ---

    @classmethod
    def from_flat(cls, **settings: Any) -> Self:
        """A config from settings by their flag names: from_flat(views=8, lr=0.1)."""
        return cls().replace(**settings)

    @classmethod
    def from_saved(cls, settings: Mapping[str, Any]) -> Self:
        """A config from to_flat() of this or an earlier version, as config.json and checkpoints
        have it; ConfigError if it cannot be one."""
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings must be names and values, got {shown(settings)}")
        current = {_RENAMED.get(name, name): value for name, value in settings.items()}
        try:
            if "compile" in current:
                current["compile"] = _COMPILE.get(current["compile"], current["compile"])
            if "layer_decay" not in current:
                current |= _warm_up_of_earlier_versions(current)
            return cls.from_flat(**current)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{error} (written by another version of fastaug?)") from error

    def replace(self, **settings: Any) -> Self:
        """This config with some settings changed, by their flag names."""
        owners = setting_owners(type(self))  # type: ignore[arg-type]
        changes: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name not in owners:
                raise ConfigError(f"unknown setting {shown(name)}: {suggest(name[:100], owners)}")
            given = tuple(value) if isinstance(value, list) else value
            changes.setdefault(owners[name], {})[name] = given
        parts = {owner: replace(getattr(self, owner), **own) for owner, own in changes.items()}
        return replace(self, **parts)

    def to_flat(self) -> dict[str, Any]:
        """The settings by flag name as plain values, for JSON and checkpoints."""
        values = {name: self.get(name) for name in setting_owners(type(self))}  # type: ignore[arg-type]
        return {name: plain(value) for name, value in values.items()}

    def get(self, name: str) -> Any:
        """One setting by its flag name."""
        owner = setting_owners(type(self))[name]  # type: ignore[arg-type]
        return getattr(getattr(self, owner), name)

    def differences(self, other: TrainConfig, *, ignore: Collection[str] = ()) -> list[str]:
        """The settings that a resumed run must keep and that differ, with both values."""
        return [
            f"{flag(name)} {typed(self.get(name)) or 'not given'} "
            f"(here: {typed(other.get(name)) or 'not given'})"
            for name in setting_owners()
            if name not in free_on_resume()
            and name not in ignore
            and self.get(name) != other.get(name)
        ]


def _warm_up_of_earlier_versions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Only one schedule, warmup-cosine, had a warm-up: of 5 epochs unless given."""
    if settings.get("schedule") != "warmup-cosine":
        return {"warmup_epochs": 0.0}
    return {"schedule": "cosine", "warmup_epochs": settings.get("warmup_epochs", 5.0)}


@cache
def setting_owners(kind: type[TrainConfig] = TrainConfig) -> Mapping[str, str]:
    """Setting -> the component that has it, in the order of the components."""
    hints = get_type_hints(kind)
    owners = [(own.name, f.name) for own in fields(kind) for f in fields(hints[own.name])]
    return {name: owner for owner, name in owners}


@cache
def free_on_resume() -> frozenset[str]:
    """Settings that a resumed run may change."""
    return _marked("free_on_resume")


@cache
def free_on_ranks() -> frozenset[str]:
    """Settings in which the ranks of a run may differ."""
    return _marked("free_on_ranks")


def _marked(mark: str) -> frozenset[str]:
    hints = get_type_hints(TrainConfig)
    own = [f for part in fields(TrainConfig) for f in fields(hints[part.name])]
    return frozenset(f.name for f in own if f.metadata.get(mark))
