"""Plain PyTorch: a Dataset of your own, views made in the DataLoader's workers, autocast.

    python examples/plain_torch.py                # the built-in shapes
    python examples/plain_torch.py --data FOLDER  # FOLDER/train/CLASS/*.jpg, FOLDER/test/...

Each image is decoded once. The collate function turns it into K views, so the network's batch is
[B*K, 3, S, S] while the labels stay [B].
"""

import argparse

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import fastaug
from fastaug.data.shapes import ensure_shapes


class Photos(ImageFolder):
    """Items are (index, image [H, W, 3] uint8, label). No transforms: collate makes the views."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return index, torch.from_numpy(np.array(image)), label


class CollateViews:
    """A batch of items to views [B*K, 3, S, S], image by image, and labels [B]."""

    def __init__(self, **options):
        self.options, self.epoch = options, 0

    def __call__(self, items):
        indices, images, labels = zip(*items, strict=True)
        # A view depends only on (seed, epoch, index, number of the view).
        plan = fastaug.plan_views(images, indices=indices, epoch=self.epoch, **self.options)
        views = fastaug.make_views(images, plan, threads=1)  # the workers are the threads
        return views.flatten(0, 1), torch.tensor(labels)


def main(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="has train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--test", default="test", help="the folder of the test images, such as val")
    parser.add_argument("--views", type=int, default=4, help="views of an image")
    parser.add_argument("--size", type=int, default=24, help="side of a view")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=32, help="images in a batch")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    args = parser.parse_args(args)
    data = args.data or ensure_shapes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train, test = Photos(f"{data}/train"), Photos(f"{data}/{args.test}")
    collate = CollateViews(views=args.views, size=args.size, crop_area=(0.5, 1))
    center = CollateViews(views=1, size=args.size, augment="none")
    options = {"batch_size": args.images, "num_workers": 2, "pin_memory": device.type == "cuda"}
    loader = DataLoader(train, shuffle=True, drop_last=True, collate_fn=collate, **options)
    test_loader = DataLoader(test, collate_fn=center, **options)

    model = fastaug.build_model("wrn-10-1", num_classes=len(train.classes)).to(device)
    loss_function = fastaug.MultiViewLoss(args.views, kl_weight=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(args.epochs):
        collate.epoch = epoch  # the workers start with each epoch, and get it
        model.train()
        for views, labels in loader:
            views, labels = views.to(device), labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = model(views)  # [B*K, C]
            loss = loss_function(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch + 1}: last loss {loss.item():.3f}, top-1 {accuracy:.3f}")
    return accuracy


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    hits = [model(views.to(device)).argmax(1).cpu() == labels for views, labels in loader]
    return torch.cat(hits).float().mean().item()


if __name__ == "__main__":
    main()
