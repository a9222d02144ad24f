"""What a run prints about its optimizer when it starts: rates, frozen parameters, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from fastaug.config import TrainConfig
from fastaug.engine.learner import Learner
from fastaug.engine.optim import peak_rate
from fastaug.models.head import head_parameters
from fastaug.recipes import RECIPES, get_recipe
from fastaug.settings import flag, typed


def describe_optimizer(learner: Learner, *, head_is_new: bool) -> Iterator[str]:
    """The lines about the optimizer, frozen parameters, and settings that may be mistakes.

    head_is_new: the weights that the run started from have no head for its classes.
    """
    yield _summary(learner)
    if learner.frozen is not None:
        yield str(learner.frozen)
    yield from _rate_warnings(learner.config)
    yield from _freeze_warnings(learner, head_is_new)
    yield from _unused_settings(learner)


def _summary(learner: Learner) -> str:
    config, optimizer = learner.config.optim, learner.optimizer
    parts: list[str] = [config.optimizer]
    if "momentum" in optimizer.defaults:
        kind = "Nesterov momentum" if optimizer.defaults.get("nesterov") else "momentum"
        parts[0] += f" with {kind} {optimizer.defaults['momentum']:g}"
    peak = peak_rate(config, learner.config.images_per_step)
    scales = {id(p): g.get("lr_scale", 1.0) for g in optimizer.param_groups for p in g["params"]}
    head = head_parameters(learner.model)
    body = [
        scales[id(parameter)]
        for name, parameter in learner.model.named_parameters()
        if id(parameter) in scales and name not in head
    ]
    others = []
    if config.head_lr:
        others.append(f"head {peak * config.head_lr / config.lr:.3g}")
    if config.layer_decay != 1 and body:
        which = "first trained layer" if config.freeze else "first layer"
        others.append(f"{which} {peak * min(body):.3g}")
    parts.append(f"lr {peak:.3g}" + (f" ({', '.join(others)})" if others else ""))
    parts.append(f"weight decay {config.weight_decay:g}")
    epochs = config.warmup_epochs
    warmup = f" after {epochs:g} epoch{'s' * (epochs != 1)} of warm-up" if epochs else ""
    return ", ".join([*parts, f"{config.schedule} schedule{warmup}"])


def _rate_warnings(config: TrainConfig) -> Iterator[str]:
    optim = config.optim
    peak = peak_rate(optim, config.images_per_step)
    if peak > 0.02 and optim.optimizer not in ("sgd", "sgdw", "lars", "apex"):
        high = f"--lr {peak:g} is high for --optimizer {optim.optimizer}"
        yield f"warning: {high}; usual: 0.0001 to 0.003"
    if optim.lr == 0:
        yield "warning: --lr 0: no weight is trained"
    if optim.layer_decay == 0:
        yield "warning: --layer-decay 0: only the head is trained; --freeze backbone costs less"


def _freeze_warnings(learner: Learner, head_is_new: bool) -> Iterator[str]:
    if learner.frozen is None:
        return
    names = f"--freeze {' '.join(learner.frozen.names)}"
    model = learner.config.model
    trained = {name for name, p in learner.model.named_parameters() if p.requires_grad}
    if not (model.weights or model.pretrained):
        yield f"warning: {names} freezes random weights; start from --weights or --pretrained"
    elif head_is_new and head_parameters(learner.model) - trained:
        yield f"warning: {names} freezes the head, which is new and has random weights"


def _unused_settings(learner: Learner) -> Iterator[str]:
    """--momentum and --nesterov without effect, unless they are the recipe's."""
    config = learner.config
    usual = get_recipe(config.run.recipe if config.run.recipe in RECIPES else "").optim
    for name in ("momentum", "nesterov"):
        value = getattr(config.optim, name)
        if value != getattr(usual, name) and name not in learner.optimizer.defaults:
            given = flag(name) if value is True else f"{flag(name)} {typed(value)}"
            yield f"warning: {given} has no effect with --optimizer {config.optim.optimizer}"
