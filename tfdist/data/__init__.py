"""A recipe's data: the real ones, a small set that stands in, or noise, as `--data` says."""

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
