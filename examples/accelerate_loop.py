"""Hugging Face Accelerate: fastaug's loader and loss in a loop that Accelerate distributes.

    pip install accelerate
    python examples/accelerate_loop.py
    accelerate launch --num_processes 8 examples/accelerate_loop.py --data FOLDER --batch-size 1024

`--batch-size` counts the views of a step on all processes. The loader divides them itself and puts
its batches on the process's GPU, so it is not given to `accelerator.prepare`.
"""

import argparse

import torch
from accelerate import Accelerator

import fastaug
from fastaug.data.sources import DataSource


def main(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="shapes", help="as for fastaug.train")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--mixed-precision", default="no", choices=("no", "bf16", "fp16"))
    args = parser.parse_args(args)

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    place = {"rank": accelerator.process_index, "ranks": accelerator.num_processes}
    config = fastaug.TrainConfig.from_flat(
        data=args.data,
        loader="dali",
        views=4,
        size=24,
        crop_area=(0.5, 1),
        batch_size=args.batch_size,
        epochs=args.epochs,
        device=str(accelerator.device),
    )
    source = DataSource(config.data)
    loader = fastaug.build_loader(config, source.train, **place)
    test_loader = fastaug.build_evaluation_loader(config, source.test(), **place)

    model = fastaug.build_model("wrn-10-1", num_classes=len(source.train.classes))
    loss_function = fastaug.MultiViewLoss(config.view.views, kl_weight=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:  # one pass is one epoch
            terms = loss_function.terms(model(batch.flat), batch.labels)
            accelerator.backward(terms.loss)
            accelerator.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, test_loader)
        kl = accelerator.reduce(terms.kl.mean(), "mean").item()
        accelerator.print(f"epoch {epoch + 1}: KL {kl:.4f}, top-1 {accuracy:.3f}")
    return accuracy


@torch.inference_mode()
def evaluate(accelerator, model, loader):
    model.eval()
    counts = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        hits = model(batch.flat).argmax(1) == batch.labels
        counts += torch.stack([hits.sum(), torch.tensor(len(hits), device=hits.device)])
    correct, total = accelerator.reduce(counts, "sum").tolist()
    return correct / total


if __name__ == "__main__":
    main()
