"""The data of a recipe, chosen by `--data`: real data, a small substitute, or noise."""

from tfdist.data.data_set import SYNTHETIC, DataSet, Small, describe
from tfdist.data.drawn import drawn_images, png
from tfdist.data.imagenet import imagenet
from tfdist.data.noise import Noise
from tfdist.data.reading import folder, read

__all__ = [
    "SYNTHETIC",
    "DataSet",
    "Noise",
    "Small",
    "describe",
    "drawn_images",
    "folder",
    "imagenet",
    "png",
    "read",
]
