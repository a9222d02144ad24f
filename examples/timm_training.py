"""timm's own pieces: its model, loader with augmentation splits, optimizer, schedule and EMA.

    python examples/timm_training.py
    python examples/timm_training.py --data FOLDER --model resnet50 --size 224 --pretrained

An augmentation split is a view: timm's batch has all images of the first split, then all images of
the second one, and so on, which is `order="views"`. timm's first split has no augmentation but the
crop and the flip, and all splits of an image share that crop. (fastaug.make_views draws a crop for
each view, and is faster: see plain_torch.py.)
"""

import argparse

import timm
import torch
from timm.data import AugMixDataset, ImageDataset, create_loader, resolve_model_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3

import fastaug
from fastaug.data.shapes import ensure_shapes


def main(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="has train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--test", default="test", help="the folder of the test images, such as val")
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--splits", type=int, default=3, help="views of an image")
    parser.add_argument("--size", type=int, default=64, help="side of a view")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=32, help="images in a batch")
    args = parser.parse_args(args)
    data = args.data or ensure_shapes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train, test = ImageDataset(f"{data}/train"), ImageDataset(f"{data}/{args.test}")
    classes = len(train.reader.class_to_idx)
    model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=classes)
    model.to(device)
    numbers = resolve_model_data_config(model)
    options = {"input_size": (3, args.size, args.size), "batch_size": args.images}
    options |= {name: numbers[name] for name in ("mean", "std", "interpolation")}
    options |= {"device": device, "num_workers": 2, "persistent_workers": False}
    loader = create_loader(
        AugMixDataset(train, num_splits=args.splits),
        is_training=True,
        num_aug_splits=args.splits,
        auto_augment="rand-m5-n2",
        **options,
    )
    test_loader = create_loader(test, **options)

    loss_function = fastaug.MultiViewLoss(args.splits, kl_weight=1.0, order="views")
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05)
    schedule, epochs = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=args.epochs,
        warmup_epochs=1,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    ema, step = ModelEmaV3(model, decay=0.95, use_warmup=True), 0
    for epoch in range(epochs):
        model.train()
        for views, targets in loader:  # [K*B, 3, S, S], [K*B]: timm repeats the targets
            loss = loss_function(model(views), targets[: len(targets) // args.splits])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            ema.update(model, step=step)
            schedule.step_update(step)
        accuracy = evaluate(ema, test_loader)
        print(f"epoch {epoch + 1}: last loss {loss.item():.3f}, top-1 of the EMA {accuracy:.3f}")
    return accuracy


@torch.inference_mode()
def evaluate(model, loader):
    model.eval()
    hits = [model(images).argmax(1) == targets for images, targets in loader]
    return torch.cat(hits).float().mean().item()


if __name__ == "__main__":
    main()
