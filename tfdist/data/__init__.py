"""The data of a recipe, chosen by `--data`: real data, a small substitute, or noise."""

from tfdist.data.data_set import SMALL, SYNTHETIC, DataSet, Small, check_features, describe
from tfdist.data.imagenet import imagenet
from tfdist.data.reading import cache_name, folder, read, with_flags
from tfdist.data.synthetic import Noise, drawn_images, png

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
