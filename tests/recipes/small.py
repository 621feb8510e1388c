"""Flags of the training command that make each recipe small."""

from __future__ import annotations

_CNN = ["--model=cnn", "--set=filters=[4, 8]", "--set=units=8", "--batch-size=6"]

#: Flags by recipe.
SMALL: dict[str, list[str]] = {
    "digits": ["--batch-size=6"],
    "cifar10_resnet": ["--data=small", "--set=width=4", "--set=num_blocks=[1]", "--batch-size=6"],
    "imagenet_resnet50": ["--data=small", *_CNN, "--set=image_size=16"],
    "celeba_attributes": ["--data=small", "--set=image_size=16", "--set=filters=[4, 8]"],
    "unet_segmentation": [
        "--data=small", "--set=image_size=16", "--set=filters=2", "--set=depth=1", "--batch-size=6"
    ],
    "xception_cats": ["--data=small", *_CNN, "--set=image_size=16", "--set=frozen_epochs=1"],
    "gpt_text": ["--data=small", "--set=size=tiny", "--set=length=8", "--batch-size=6"],
    "finetune": ["--data=small", "--set=length=16", "--batch-size=6"],
    "mnist_autoencoder": ["--data=small", "--set=filters=[2, 2]", "--batch-size=6"],
    "vit_small": [
        "--data=small", "--set=size=micro", "--set=patch=8", "--set=image_size=16",
        "--set=randaugment=1", "--batch-size=6",
    ],
    "image_folder": ["--data=small", *_CNN, "--set=image_size=16", "--set=mixup=0.2"],
    "table": ["--data=synthetic", "--set=units=[4]", "--batch-size=6"],
    "text_classifier": ["--data=small", "--set=length=8", "--set=width=4", "--batch-size=6"],
    "central_storage_big_embedding": ["--set=num_items=100", "--set=num_ratings=1000"],
}  # fmt: skip
