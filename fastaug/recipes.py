"""Recipes: a run is a function that returns a TrainConfig. Flags change single values of it.

The paper's ("Regularising for invariance to data augmentation improves supervised learning") are
single points of its grids (fastaug/experiments/grids.py), at the largest K. What the paper leaves
open is chosen here; the docstring gives the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.errors import ConfigError, suggest


def shapes() -> TrainConfig:
    """The built-in data set on any machine, in under a minute on two CPU cores.

    Chosen on held-out training images, over several seeds; clipping was added last, because a
    training diverged.
    - Views of 24 pixels still show the shapes and cost less than 32.
    - Nesterov momentum: with plain momentum a seed ended at 73%, as SkipInit networks start slowly.
    - Half an epoch of warm-up, and gradients clipped: without, single spikes threw some seeds back
      for an epoch, and one without the regularizer diverged.
    - Crops of at least half the area: 0.35 needs more epochs, and 0.08, as on ImageNet, would miss
      half of the shapes.
    - The moving average of the weights makes the learning curve smooth.
    """
    return TrainConfig.from_flat(
        recipe="shapes",
        size=24,
        crop_area=(0.5, 1.0),
        epochs=8,
        lr=0.05,
        schedule="cosine",
        warmup_epochs=0.5,
        nesterov=True,
        clip_norm=2.0,
        ema=0.99,
    )


# --- CIFAR-100 ---


def cifar100_wrn_16_4() -> TrainConfig:
    """WRN-16-4 with SkipInit on CIFAR-100 at K=16 (Fig. results_*, Tab. 1).

    Open in the paper, and chosen:
    - rate and epochs: from the middle of its grids, which are meant to be swept;
    - the first halving comes at E/2 and there are ten: the strict reading of "every E/20 epochs for
      the remainder of training";
    - no decay on biases and SkipInit scalars, as the same group's code does for its networks;
    - plain momentum: the paper says "SGD with momentum 0.9", not Nesterov;
    - 4 pixels of reflected padding and the constants of the wide ResNets' own code, which the paper
      follows for its augmentation;
    - no label smoothing and no dropout: not mentioned for this network;
    - fp32: no precision is mentioned.
    """
    return TrainConfig.from_flat(
        recipe="cifar100-wrn-16-4",
        data="",
        model="wrn-16-4",
        crop="pad",
        normalize="cifar",
        views=16,
        batch_size=64,
        epochs=128,
        lr=2**-10,
        lr_scaling="unique-images",
        schedule="halving",
        tta=16,
    )


def cifar100_wrn_16_4_no_da() -> TrainConfig:
    """WRN-16-4 on CIFAR-100 without augmentation, K=1: the black cross of Fig. results_no_kl.

    Open in the paper, and chosen: K=1 (all views would be the same), and that its invariance is
    measured on the crops and flips of the others, as there is nothing else to measure.
    """
    return cifar100_wrn_16_4().replace(
        recipe="cifar100-wrn-16-4-no-da",
        augment="none",
        views=1,
        kl_weight=0.0,
    )


def _wider_or_deeper(model: str) -> TrainConfig:
    return cifar100_wrn_16_4().replace(recipe=f"cifar100-{model}", model=model)


def cifar100_wrn_16_8() -> TrainConfig:
    """WRN-16-8, twice as wide (Fig. cifar_wrn_wXdY).

    Open choices as cifar100-wrn-16-4.
    """
    return _wider_or_deeper("wrn-16-8")


def cifar100_wrn_16_16() -> TrainConfig:
    """WRN-16-16, four times as wide (Fig. cifar_wrn_wXdY).

    Open choices as cifar100-wrn-16-4.
    """
    return _wider_or_deeper("wrn-16-16")


def cifar100_wrn_22_4() -> TrainConfig:
    """WRN-22-4, deeper (Fig. cifar_wrn_wXdY).

    Open choices as cifar100-wrn-16-4.
    """
    return _wider_or_deeper("wrn-22-4")


def cifar100_wrn_28_4() -> TrainConfig:
    """WRN-28-4, deeper still (Fig. cifar_wrn_wXdY).

    Open choices as cifar100-wrn-16-4.
    """
    return _wider_or_deeper("wrn-28-4")


def cifar100_resnet18() -> TrainConfig:
    """ResNet-18 with batch norm on CIFAR-100 at K=16 (Fig. app:resnet18).

    Open in the paper, and chosen: the CIFAR form of the network (3x3 stem, no pooling), which is
    what "the ResNet18 of Nabarro et al." must be on 32 pixels; no decay on the norms' scales and
    offsets, by the rule of the other networks. Statistics are taken over all views of a step, as
    the paper says: on several ranks that needs --batch-norm sync.
    """
    return cifar100_wrn_16_4().replace(
        recipe="cifar100-resnet18",
        model="resnet18",
        batch_size=528,
        epochs=304,
        lr=2**-10,
        schedule="cosine",
    )


# --- ImageNet ---


def imagenet_nf_resnet50() -> TrainConfig:
    """NF-ResNet-50 on ImageNet at K=8 (Tab. app:results).

    Open in the paper, and chosen:
    - rate and epochs: from the middle of its grids, which are meant to be swept;
    - bf16 with the last layer and the loss in fp32: no precision is mentioned, and the same group's
      NFNets were trained so;
    - crops drawn as TensorFlow does and resized bicubically without antialiasing, as in DeepMind's
      NFNet code;
    - no warm-up: none is stated; plain momentum; no decay on gains and biases;
    - dropout and stochastic depth are drawn for each view on its own, so the regularizer sees them.
    """
    return TrainConfig.from_flat(
        recipe="imagenet-nf-resnet50",
        data="",
        model="nf_resnet50",
        dropout=0.25,
        stochastic_depth=0.1,
        size=224,
        crop_area=(0.08, 1.0),
        crop_sampling="tf",
        views=8,
        batch_size=1024,
        label_smoothing=0.1,
        epochs=128,
        lr=2**-2,
        schedule="cosine",
        precision="bf16",
        tta=8,
    )


def imagenet_nf_resnet101() -> TrainConfig:
    """NF-ResNet-101 on ImageNet at K=8 (Fig. introduction, results_*, Tab. 1).

    Open choices as imagenet-nf-resnet50.
    """
    return imagenet_nf_resnet50().replace(recipe="imagenet-nf-resnet101", model="nf_resnet101")


def imagenet_nf_resnet101_no_da() -> TrainConfig:
    """NF-ResNet-101 on ImageNet without augmentation, K=1: the cross of Fig. results_no_kl.

    Open in the paper, and chosen: that it was run on ImageNet at all, with the other settings as
    they are; the view is the central crop.
    """
    return imagenet_nf_resnet101().replace(
        recipe="imagenet-nf-resnet101-no-da",
        augment="none",
        views=1,
        kl_weight=0.0,
    )


def imagenet_nf_resnet101_randaugment() -> TrainConfig:
    """NF-ResNet-101 on ImageNet with RandAugment at K=8 (Fig. resnet_randaugment).

    Open in the paper, and chosen: 4 operations a view. It gives the magnitude, 5, "following
    NFNet-F0", whose published settings are 4 operations of magnitude 5.
    """
    return imagenet_nf_resnet101().replace(
        recipe="imagenet-nf-resnet101-randaugment",
        augment="randaugment",
    )


def imagenet_nfnet_f0() -> TrainConfig:
    """NFNet-F0 on ImageNet with RandAugment at K=8 (Fig. resnet_randaugment, Tab. 1).

    Without AGC, CutMix and Mixup, at 224 pixels in training and test. Open in the paper, and
    chosen: 4 operations a view (as imagenet-nf-resnet101-randaugment); the test crop of the other
    networks rather than NFNet's squashed one; the rest as imagenet-nf-resnet50.
    """
    return imagenet_nf_resnet50().replace(
        recipe="imagenet-nfnet-f0",
        model="nfnet_f0",
        dropout=0.2,
        stochastic_depth=0.25,
        augment="randaugment",
        epochs=180,
        lr=0.4,
        schedule="cosine",
        warmup_epochs=5.0,
        weight_decay=2e-5,
    )


# --- your own images ---


def finetune() -> TrainConfig:
    """timm's pretrained ResNet-50 on a small folder of your own, at K=4.

    Any timm model (--model timm/NAME) or other weights (--weights FILE) can take its place.
    - AdamW at 3e-4: a rate that suits both ResNets and transformers; SGD's would differ by family.
    - Layer-wise decay of 0.9: early layers, whose filters serve most photos, move less; the stem of
      a ResNet-50 has a sixth of the rate. Transformers are often tuned with 0.65 to 0.75.
    - One epoch of warm-up and clipping: the first gradients come from a random head.
    - 224 pixels, which most of timm's weights were trained for; crops of at least 0.35 of the area,
      because smaller ones often miss the object, and a small folder cannot average that out.
    - K=4: a step of 64 views still has 16 different images.
    - Label smoothing of 0.1, as in most of timm's own trainings.
    - No moving average: a few hundred images give too few steps for one.
    - TF32, which is fp32 on a CPU; --precision bf16 is faster on a GPU.
    """
    return TrainConfig.from_flat(
        recipe="finetune",
        data="",
        model="timm/resnet50",
        pretrained=True,
        size=224,
        crop_area=(0.35, 1.0),
        views=4,
        batch_size=64,
        label_smoothing=0.1,
        epochs=20,
        optimizer="adamw",
        lr=3e-4,
        layer_decay=0.9,
        schedule="cosine",
        warmup_epochs=1.0,
        weight_decay=0.05,
        clip_norm=1.0,
        precision="tf32",
        tta=8,
    )


# --- small versions, for a CPU ---


def mini_cifar() -> TrainConfig:
    """WRN-10-1 on 500 images of a CIFAR-like folder at K=4: about 90 seconds on one core.

    It shows how a sweep and its report work, in ten minutes. Differences between its settings are
    as large as those between seeds: small-cifar is the one that can decide. Few images and many
    epochs, so that they are fitted; a fifth of the folder's training images is held out.
    """
    return cifar100_wrn_16_4().replace(
        recipe="mini-cifar",
        model="wrn-10-1",
        train_images=500,
        validation=0.2,
        views=4,
        batch_size=32,
        epochs=40,
        lr=2**-8,
        schedule="cosine",
        tta=8,
        eval_every=20,
        eval_views=0,
        workers=1,
    )


def mini_shapes() -> TrainConfig:
    """WRN-10-1 on 500 images of the built-in set at K=4: about 90 seconds on one core.

    As mini-cifar, and for machines without any data. Crops of at least 0.35 of the area, which keep
    most of a shape; a quarter of the training images is held out, as many as the test images.
    """
    return mini_cifar().replace(
        recipe="mini-shapes",
        data="shapes",
        validation=0.25,
        crop="resized",
        normalize="imagenet",
    )


def small_cifar() -> TrainConfig:
    """WRN-10-2 on 1,024 images of CIFAR-10 at 16 px, at K=8: three to ten minutes on one core.

    The experiment that decides which of the paper's effects fastaug reproduces without a GPU:
    docs/paper.md has its results, docs/design/paper-small.md the reason for each setting.
    """
    return cifar100_wrn_16_4().replace(
        recipe="small-cifar",
        model="wrn-10-2",
        size=16,
        train_images=1024,
        validation=0.5,
        views=8,
        epochs=80,
        lr=2**-8,
        schedule="cosine",
        precision="bf16",
        tta=8,
        eval_every=40,
        eval_views=0,
        workers=0,
    )


def _small(model: str) -> TrainConfig:
    return small_cifar().replace(recipe=f"small-cifar-{model}", model=model, views=4)


def small_cifar_wrn_10_1() -> TrainConfig:
    """WRN-10-1 in place of WRN-10-2, at K=4: half as wide.

    All else as small-cifar.
    """
    return _small("wrn-10-1")


def small_cifar_wrn_16_2() -> TrainConfig:
    """WRN-16-2 in place of WRN-10-2, at K=4: deeper.

    All else as small-cifar.
    """
    return _small("wrn-16-2")


def small_cifar_resnet18() -> TrainConfig:
    """ResNet-18 with batch norm, a quarter as wide, in place of WRN-10-2, at K=4.

    All else as small-cifar; the statistics of the norms are over the 64 views of a step.
    """
    return _small("resnet18-16")


def small_cifar_4096() -> TrainConfig:
    """small-cifar with 4,096 training images, at K=4.

    With the 1,024 images of small-cifar, long runs of several views fit all images.
    """
    return small_cifar().replace(recipe="small-cifar-4096", train_images=4096, views=4)


def small_cifar_randaugment() -> TrainConfig:
    """small-cifar with RandAugment, at K=4.

    Two operations a view where the paper has four: 16 pixels hold less that can be distorted.
    """
    return small_cifar().replace(
        recipe="small-cifar-randaugment",
        views=4,
        augment="randaugment",
        randaugment_layers=2,
    )


def small_cifar_finetune() -> TrainConfig:
    """Fine-tuning on 256 images of five classes of CIFAR-10, at K=4, from --weights.

    The weights are those of a small-cifar run on the other five classes.
    """
    return small_cifar().replace(
        recipe="small-cifar-finetune",
        train_images=256,
        views=4,
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    make().run.recipe: make
    for make in (
        shapes,
        cifar100_wrn_16_4,
        cifar100_wrn_16_4_no_da,
        cifar100_wrn_16_8,
        cifar100_wrn_16_16,
        cifar100_wrn_22_4,
        cifar100_wrn_28_4,
        cifar100_resnet18,
        imagenet_nf_resnet50,
        imagenet_nf_resnet101,
        imagenet_nf_resnet101_no_da,
        imagenet_nf_resnet101_randaugment,
        imagenet_nfnet_f0,
        finetune,
        mini_cifar,
        mini_shapes,
        small_cifar,
        small_cifar_wrn_10_1,
        small_cifar_wrn_16_2,
        small_cifar_resnet18,
        small_cifar_4096,
        small_cifar_randaugment,
        small_cifar_finetune,
    )
}


def get_recipe(name: str) -> TrainConfig:
    """The settings of a recipe; "": the plain defaults."""
    if not name:
        return TrainConfig()
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}: {suggest(name, RECIPES)}")
    return RECIPES[name]()


def default_recipe(data: str) -> str:
    """The recipe of a run that names none: that of the built-in data set is tuned for it."""
    return "shapes" if data in ("", DataConfig.data) else ""


def first_line(name: str) -> str:
    """What a recipe is, in a line: the first of its docstring."""
    return (RECIPES[name].__doc__ or "").partition("\n")[0].rstrip(".")


def recipe_rows() -> list[tuple[str, str]]:
    """The name of each recipe, what it is, and the settings that set it apart."""
    rows = []
    for name in RECIPES:
        config = get_recipe(name)
        settings = f"{config.model.model}, K={config.view.views}, batch {config.optim.batch_size}, "
        settings += f"{config.optim.epochs} epochs, lr {_as_power(config.optim.lr)}"
        settings += " x unique images" if config.optim.lr_scaling == "unique-images" else ""
        warmup = config.optim.warmup_epochs
        settings += f", {config.optim.schedule}" + (
            f" after {warmup:g} epochs of warm-up" if warmup else ""
        )
        rows.append((name, f"{first_line(name)}\n{settings}"))
    return rows


def _as_power(rate: float) -> str:
    """The paper's rates are powers of two."""
    exponent = math.log2(rate)
    return f"2^{exponent:g}" if exponent == round(exponent) else f"{rate:g}"
