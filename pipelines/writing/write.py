"""Writing a folder of shards from Python, record by record, so that it is whole or not there.

A killed process leaves its hidden folder (`.NAME.writing-*`) behind, which nobody reads.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pipelines.format.encode import encode
from pipelines.format.feature import Feature
from pipelines.format.index import Index, Shard
from pipelines.writing.publish import found_in, publish
from pipelines.writing.shard_file import ShardWriter, shard_name


def write_shards(
    examples: Iterable[Mapping[str, object]],
    directory: str | Path,
    features: Sequence[Feature],
    *,
    num_shards: int,
    source: str,
) -> Index:
    """Writes examples as TFRecord shards, or re-uses the folder where it already holds them.

    Record `i` goes to shard `i % num_shards`, so shards differ by one record at most and a source
    sorted by class is spread over all of them.

    Args:
        examples: each a value per feature; consumed once, and only if there is something to write.
        directory: the folder to make; its parents are made too.
        features: of every record.
        num_shards: number of files.
        source: what the examples are and how they were made. A folder with the same source,
            features and number of shards is taken to hold the same examples.

    Returns:
        The index of the folder.

    Raises:
        DataError: an example does not fit the features, or the folder holds something else.
        ValueError: `num_shards` is below one.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards: expected at least 1, got {num_shards}")
    directory = Path(directory).absolute()
    features = tuple(features)
    wanted = {"source": source, "features": features, "num_shards": num_shards}
    if found := found_in(directory, wanted):
        return found
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder_beside(directory) as folder:
        shards = _write_files(examples, folder, features, num_shards)
        index = Index(source=source, features=features, shards=shards)
        return publish(folder, directory, index, wanted)


def _write_files(
    examples: Iterable[Mapping[str, object]],
    folder: Path,
    features: Sequence[Feature],
    num_shards: int,
) -> tuple[Shard, ...]:
    paths = [folder / shard_name(i, num_shards) for i in range(num_shards)]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(ShardWriter(path)) for path in paths]
        for example, writer in zip(examples, itertools.cycle(writers), strict=False):
            writer.write(encode(example, features))
    return tuple(writer.shard for writer in writers)


@contextlib.contextmanager
def _hidden_folder_beside(directory: Path) -> Iterator[Path]:
    """A new folder on the same file system, removed at the end if it is still there."""
    folder = directory.with_name(f".{directory.name}.writing-{uuid.uuid4().hex}")
    folder.mkdir()  # tempfile.mkdtemp would let in nobody else, and the mode outlives the rename
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
