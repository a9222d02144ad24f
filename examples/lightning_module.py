"""PyTorch Lightning: fastaug's loader and loss in a LightningModule.

    pip install lightning
    python examples/lightning_module.py                # the built-in shapes, on a CPU or GPUs
    python examples/lightning_module.py --data FOLDER  # any data that --data of fastaug.train takes

On several GPUs, Lightning starts the ranks and DDP averages the gradients. All views of an image
stay on one rank, so the loss needs no communication.
"""

import argparse

import lightning
import torch

import fastaug
from fastaug.data.sources import DataSource


class MultiViewClassifier(lightning.LightningModule):
    def __init__(self, config, model="wrn-10-1"):
        super().__init__()
        self.config = config
        self.source = DataSource(config.data)
        self.model = fastaug.build_model(model, num_classes=len(self.source.train.classes))
        self.loss = fastaug.MultiViewLoss(config.view.views, kl_weight=1.0)

    def train_dataloader(self):
        return fastaug.build_loader(self.config, self.source.train, **self._place())

    def val_dataloader(self):
        return fastaug.build_evaluation_loader(self.config, self.source.test(), **self._place())

    def _place(self):
        return {"rank": self.trainer.global_rank, "ranks": self.trainer.world_size}

    def training_step(self, batch, _):
        terms = self.loss.terms(self.model(batch.flat), batch.labels)
        values = {"loss": terms.loss, "nll": terms.nll.mean(), "kl": terms.kl.mean()}
        self.log_dict(values, batch_size=len(batch.labels), prog_bar=True)
        return terms.loss

    def validation_step(self, batch, _):
        hits = (self.model(batch.flat).argmax(1) == batch.labels).float()
        self.log("top1", hits.mean(), batch_size=len(hits), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="shapes", help="as for fastaug.train")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="views of a step on all ranks")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args(args)
    config = fastaug.TrainConfig.from_flat(
        data=args.data,
        loader="dali",
        views=4,
        size=24,
        crop_area=(0.5, 1),
        batch_size=args.batch_size,
        epochs=args.epochs,
    )
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        precision="bf16-mixed" if args.bf16 else "32-true",
        gradient_clip_val=2.0,
        use_distributed_sampler=False,  # build_loader divides the images among the ranks
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(MultiViewClassifier(config))
    return trainer.callback_metrics["top1"].item()


if __name__ == "__main__":
    main()
