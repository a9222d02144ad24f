"""Hugging Face Trainer: `compute_loss` with MultiViewLoss, views made by the data collator.

    pip install transformers accelerate
    python examples/hf_trainer.py
    python examples/hf_trainer.py --data FOLDER  # FOLDER/train/CLASS/*.jpg, FOLDER/test/CLASS/*.jpg

The model is a small ResNet without weights. `AutoModelForImageClassification.from_pretrained(...)`
takes its place for fine-tuning; give its mean and deviation to make_views as `normalize=`.
"""

import argparse
import tempfile

import torch
import transformers
from plain_torch import CollateViews, Photos

import fastaug
from fastaug.data.shapes import ensure_shapes


class Collator(CollateViews):
    """plain_torch.py's collate function, with the names that Trainer and the model expect."""

    def __call__(self, items):
        views, labels = super().__call__(items)
        return {"pixel_values": views, "labels": labels}


class SetEpoch(transformers.TrainerCallback):
    def __init__(self, collator):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **_):
        self.collator.epoch = round(state.epoch)


class MultiViewTrainer(transformers.Trainer):
    def __init__(self, *args, views, **options):
        super().__init__(*args, **options)
        self.multi_view_loss = fastaug.MultiViewLoss(views, kl_weight=1.0)

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(pixel_values=inputs["pixel_values"])
        loss_function = self.multi_view_loss
        if not model.training:  # an evaluation has one central crop of each image
            loss_function = fastaug.MultiViewLoss(1)
        loss = loss_function(outputs.logits.float(), inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def main(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="has train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--test", default="test", help="the folder of the test images, such as val")
    parser.add_argument("--views", type=int, default=4, help="views of an image")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=52, help="images in a batch of a device")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args(args)
    data = args.data or ensure_shapes()
    train, test = Photos(f"{data}/train"), Photos(f"{data}/{args.test}")
    collator = Collator(views=args.views, size=32, crop_area=(0.5, 1))
    network = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[1, 1, 1],
        layer_type="basic",
        num_labels=len(train.classes),
    )
    trainer = MultiViewTrainer(
        transformers.ResNetForImageClassification(network),
        transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            save_strategy="no",
            report_to="none",
            per_device_train_batch_size=args.images,
            dataloader_drop_last=True,
            dataloader_num_workers=2,
            remove_unused_columns=False,
            num_train_epochs=args.epochs,
            learning_rate=3e-3,
            bf16=args.bf16,
            use_cpu=not torch.cuda.is_available(),
        ),
        views=args.views,
        data_collator=collator,
        callbacks=[SetEpoch(collator)],
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=lambda found: {
            "top1": (found.predictions.argmax(1) == found.label_ids).mean()
        },
    )
    trainer.train()
    trainer.data_collator = Collator(views=1, size=32, augment="none")
    accuracy = float(trainer.evaluate()["eval_top1"])
    print(f"top-1 {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
