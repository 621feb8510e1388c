"""The classes of ImageNet's validation images, from the development kit of ILSVRC 2012.

The kit numbers the classes in an order of its own; `meta.mat` maps these numbers to WordNet ids.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from pipelines.errors import DataError

_ARCHIVE = "ILSVRC2012_devkit_t12.tar.gz"
_GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_META = "ILSVRC2012_devkit_t12/data/meta.mat"


def validation_wnids(folder: Path, num_images: int) -> list[str]:
    """The WordNet id of each validation image, in the order of the images' names.

    Args:
        folder: holds the kit, packed or unpacked.
        num_images: how many there have to be.

    Raises:
        DataError: the kit is missing or lists another number of images.
    """
    # scikit-learn brings SciPy; it is slow to import, and needed for these images alone.
    from scipy.io import loadmat

    numbers = [int(line) for line in _read(folder, _GROUND_TRUTH).split()]
    if len(numbers) != num_images:
        raise DataError(
            f"{folder}: {_GROUND_TRUTH} lists {len(numbers)} images, found {num_images}; some are "
            "missing, or of another set"
        )
    synsets = loadmat(io.BytesIO(_read(folder, _META)), squeeze_me=True)["synsets"]
    wnids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
    return [wnids[number] for number in numbers]


def files(folder: Path) -> list[Path]:
    """Those of the kit that are there and tell the classes."""
    return [path for name in (_GROUND_TRUTH, _META, _ARCHIVE) if (path := folder / name).is_file()]


def _read(folder: Path, name: str) -> bytes:
    if (folder / name).is_file():
        return (folder / name).read_bytes()
    if not (folder / _ARCHIVE).is_file():
        raise DataError(
            f"{folder}: the classes of images without class folders are in {_ARCHIVE}; put it "
            "beside them"
        )
    try:
        with tarfile.open(folder / _ARCHIVE) as archive:
            member = archive.extractfile(name)
            return member.read() if member else b""
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(f"{folder / _ARCHIVE}: not the development kit: {error}") from None
