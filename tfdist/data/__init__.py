"""The data of a recipe, chosen by `--data`: real data, a small substitute, or noise."""

from tfdist.data.data_set import SMALL, SYNTHETIC, DataSet, Small, describe
from tfdist.data.drawn import drawn_images, png
from tfdist.data.imagenet import imagenet
from tfdist.data.noise import Noise
from tfdist.data.reading import cache_name, folder, read, with_flags
from tfdist.data.required_features import check_features

__all__ = [
    "SMALL",
    "SYNTHETIC",
    "DataSet",
    "Noise",
    "Small",
    "cache_name",
    "check_features",
    "describe",
    "drawn_images",
    "folder",
    "imagenet",
    "png",
    "read",
    "with_flags",
]
