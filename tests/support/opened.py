"""Round trips of sources: opened, pickled for a worker, encoded and decoded."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from pipelines.format.examples import decode, encode
from pipelines.sources import open_source
from pipelines.sources.source import Options, Source


def source(location: Path | str, kind: str = "auto", **options: Any) -> Source:
    """Opens a source, and returns it as a worker process receives it."""
    opened = open_source(str(location), kind, Options(**options))
    again: Source = pickle.loads(pickle.dumps(opened))
    return again


def examples(opened: Source, numbers: list[int] | None = None) -> list[dict[str, Any]]:
    """Encodes and decodes examples, and returns their NumPy values by feature."""
    wanted = range(len(opened)) if numbers is None else numbers
    records = [encode(example, opened.features) for example in opened.examples(list(wanted))]
    return [
        {name: value.numpy() for name, value in decode(tf.constant(r), opened.features).items()}
        for r in records
    ]


def features(opened: Source) -> dict[str, tuple[object, ...]]:
    """Returns the dtype, shape and encoding of each feature by name."""
    return {f.name: (f.dtype, f.shape, f.encoding) for f in opened.features}


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    """Writes a tar file, and returns its path."""
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path
