"""Cold epochs from an S3 server, read by `pipelines` and by other libraries.

    python -m benchmarks.bucket_peers write READER FOLDER IMAGES
    python -m benchmarks.bucket_peers read READER

Both run in a process of their own: a reader should not find anything ready, and PyTorch, which some
readers import, crashes beside TensorFlow.
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import bucket
from pipelines import object_store
from pipelines.console.quiet import quieten_tensorflow

_BATCH_SIZE, _SHUFFLE_BUFFER, _NUM_SHARDS = 256, 5000, 8
_NUM_DOWNLOADS = 8
_TIMEOUT_SECONDS = 600

Examples = Iterator[dict[str, Any]]


class _Peer(NamedTuple):
    """A library.

    Attributes:
        imports: What has to be installed, and is imported before the time is taken.
        format: Name of the folder with its files.
        write: Writes examples with JPEG bytes as `"image"` to a folder.
        read: Returns an iterator over sizes of batches.
    """

    imports: tuple[str, ...]
    format: str
    write: Callable[[Examples, Path], None]
    read: Callable[[], Iterator[int]]


def measure(reader: str, address: str) -> dict[str, float]:
    """Reads one epoch of what `upload` wrote.

    Returns:
        The number of images, seconds until the first and the last batch without imports, and
        seconds of processor time.
    """
    return dict(json.loads(_in_new_process(address, "read", reader).splitlines()[-1]))


def available() -> list[str]:
    """Returns the readers whose packages are installed."""
    found = importlib.util.find_spec
    return [name for name, peer in _PEERS.items() if all(found(name) for name in peer.imports)]


def upload(num_images: int, folder: Path) -> None:
    """Writes images in the formats of all available readers to a folder, and uploads them."""
    from tests.support import buckets

    for reader in available():
        path = folder / _PEERS[reader].format
        if not path.exists():
            _in_new_process("", "write", reader, str(path), str(num_images))
            buckets.upload(path, f"s3://bucket/{path.name}")


def _in_new_process(address: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        # Libraries have different variables for the address of the server.
        env=os.environ | {"AWS_ENDPOINT_URL": address, "S3_ENDPOINT_URL": address},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    ).stdout


def _read_shards(where: str) -> Iterator[int]:
    import pipelines

    dataset = pipelines.read(
        where, _BATCH_SIZE, shuffle_buffer=_SHUFFLE_BUFFER, seed=1, decode_images=False
    )
    return (int(batch["image"].shape[0]) for batch in dataset)


def _download_and_read() -> Iterator[int]:
    """Copies the shards to this machine, several at once, and reads the copies."""
    from pipelines import storage

    remote = storage.RemotePath("s3://bucket/shards")
    with tempfile.TemporaryDirectory() as folder:
        with futures.ThreadPoolExecutor(_NUM_DOWNLOADS) as pool:
            names = remote.sizes()
            list(pool.map(lambda name: (remote / name).download(Path(folder) / name), names))
        yield from _read_shards(folder)


def _write_shards(examples: Examples, folder: Path) -> None:
    import pipelines

    feature = pipelines.Feature(name="image", dtype="uint8", shape=(None, None, 3), encoding="jpeg")
    pipelines.write_shards(examples, folder, (feature,), num_shards=_NUM_SHARDS, source="images")


def _read_tars() -> Iterator[int]:
    """Reads signed URLs with WebDataset, which starts `curl` for each."""
    import obstore
    import webdataset

    store = object_store.store_of("s3://bucket")
    paths = [f"tars/{number}.tar" for number in range(_NUM_SHARDS)]
    urls = obstore.sign(store, "GET", paths, timedelta(seconds=_TIMEOUT_SECONDS))
    dataset: Any = webdataset.WebDataset(urls, shardshuffle=_NUM_SHARDS, seed=1)
    return map(len, dataset.shuffle(_SHUFFLE_BUFFER).batched(_BATCH_SIZE, collation_fn=None))


def _write_tars(examples: Examples, folder: Path) -> None:
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        paths = [folder / f"{number}.tar" for number in range(_NUM_SHARDS)]
        tars = [stack.enter_context(tarfile.open(path, "w")) for path in paths]
        for number, example in enumerate(examples):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(example["image"])
            tars[number % _NUM_SHARDS].addfile(member, BytesIO(example["image"]))


def _read_mds() -> Iterator[int]:
    import streaming

    with tempfile.TemporaryDirectory() as folder:
        dataset: Any = streaming.StreamingDataset(
            remote="s3://bucket/mds", local=folder, shuffle=True, batch_size=_BATCH_SIZE,
            shuffle_block_size=_SHUFFLE_BUFFER,
        )  # fmt: skip
        examples = iter(dataset)
        while batch := list(itertools.islice(examples, _BATCH_SIZE)):
            yield len(batch)


def _write_mds(examples: Examples, folder: Path) -> None:
    import streaming

    columns = {"image": "bytes"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=10_000_000) as writer:
        for example in examples:
            writer.write(example)


_PIPELINES = ("pipelines", "tensorflow")
_PEERS = {
    "pipelines": _Peer(
        _PIPELINES, "shards", _write_shards, lambda: _read_shards("s3://bucket/shards")
    ),
    "downloaded first": _Peer(_PIPELINES, "shards", _write_shards, _download_and_read),
    "WebDataset": _Peer(("webdataset",), "tars", _write_tars, _read_tars),
    "MosaicML StreamingDataset": _Peer(("streaming",), "mds", _write_mds, _read_mds),
}


def main(action: str, reader: str, folder: str = "", num_images: str = "0") -> None:
    """Writes files, or reads them and prints what `measure` returns."""
    quieten_tensorflow()
    peer = _PEERS[reader]
    if action == "write":
        peer.write(bucket.images(int(num_images)), Path(folder))
        return
    for name in peer.imports:
        importlib.import_module(name)
    cpu, began = _cpu_seconds(), time.perf_counter()
    batches = peer.read()
    count = next(batches)
    first = time.perf_counter() - began
    count += sum(batches)
    seconds = time.perf_counter() - began
    measured = {"images": count, "first_s": first, "s": seconds, "cpu_s": _cpu_seconds() - cpu}
    print(json.dumps(measured))


def _cpu_seconds() -> float:
    """Returns the processor time of this process and of its ended children."""
    used = [resource.getrusage(one) for one in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main(*sys.argv[1:])
