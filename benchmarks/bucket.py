"""`python -m benchmarks bucket`: reading from an S3 server beside reading local files."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeFloat, PositiveInt

from tfdist.tools.bench import harness

DESCRIPTION = "reading images and text from an S3 server beside reading local files"
_HEADER = ("records", "source", "records/s", "relative to local", "CPU time relative to local")
_NUM_LINES = 10  # of text per image, to have about as many bytes
#: Kinds of records.
_DECODED, _BYTES, _TEXT = _RECORDS = ("decoded images", "image bytes", "lines of text")
_NUM_KINDS, _PIXELS, _NUM_SHARDS, _SHUFFLE_BUFFER = 16, 128, 8, 5000
#: Sizes of the requests of a download alone, and of all bytes that it keeps.
_RANGE_BYTES, _LIMIT_BYTES = 4 << 20, 512 << 20
_LOCAL, _CACHED = "local", "bucket, cached"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--images", type=PositiveInt, default=20_000, metavar="N", help="images of 128x128 pixels"
    )
    parser.add_argument("--batch", type=PositiveInt, default=256, metavar="N", help="batch size")
    parser.add_argument(
        "--epochs", type=PositiveInt, default=3, metavar="N",
        help="epochs of a measurement, after one that is not measured",
    )  # fmt: skip
    parser.add_argument(
        "--records", nargs="+", choices=_RECORDS, default=list(_RECORDS), help="kinds to read"
    )
    parser.add_argument(
        "--latencies", nargs="+", type=NonNegativeFloat, default=[0.0, 5.0, 20.0, 80.0],
        metavar="MS", help="milliseconds that a proxy adds to each request",
    )  # fmt: skip
    parser.add_argument(
        "--with-model", action="store_true",
        help="instead, measure how long a model on one core waits for images from the server",
    )  # fmt: skip
    harness.add_arguments(parser, rounds=5, table=True)


def run(
    images: int,
    batch: int,
    epochs: int,
    records: Sequence[str],
    latencies: Sequence[float],
    with_model: bool,
    rounds: int,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    The server and its proxy run on the last core, and the reader on the others, so that the reader
    has the same cores for local files. The server is `s3rver` from npm if it is on the PATH, or
    else `moto`, which is slower. Images are read with and without decoding, because decoding may
    take all cores and hide the cost of reading.
    """
    from benchmarks import delay_proxy
    from tests.support import buckets

    if smoke:
        images, epochs, latencies, rounds = 600, 1, latencies[:1], 1
    os.environ.update(buckets.ENVIRONMENT)
    program = "s3rver" if shutil.which("s3rver") else "moto"
    *others, last = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        with harness.on_cores([last]):
            server = stack.enter_context(buckets.running(program, Path(name) / "server"))
            addresses = stack.enter_context(delay_proxy.running(server.address, latencies))
        _use(server.address)
        buckets.create_bucket(server.address, "bucket")
        endpoints = dict(zip(latencies, addresses, strict=True))
        if with_model:
            _show_waits(_waits(endpoints, Path(name), images, rounds), output)
            return
        stack.enter_context(harness.on_cores(others or [last]))
        results = []
        for kind in records:
            folder, url = Path(name) / kind, f"s3://bucket/{kind}".replace(" ", "-")
            _write(folder, images, kind)
            _use(server.address)
            buckets.upload(folder, url)
            results += _compare(folder, url, kind, endpoints, (batch, epochs, rounds))
    title = f"{images} JPEG images of {_PIXELS}x{_PIXELS} pixels, {_NUM_LINES * images} lines of "
    title += f"text, {epochs} epochs, batch {batch}, {program}, {rounds} rounds"
    output.show(_HEADER, [_cells(row) for row in results], title)
    output.conclude(results, _NOTE)


_NOTE = f"{harness.NOTE} CPU time is that of the reader; other processes include the server."


def _use(address: str) -> None:
    """Makes a server the endpoint of this process."""
    from pipelines import object_store

    os.environ["AWS_ENDPOINT_URL"] = address
    object_store.store_of.cache_clear()


def _compare(
    folder: Path,
    url: str,
    kind: str,
    endpoints: dict[float, str],
    sizes: tuple[int, int, int],
) -> list[dict[str, Any]]:
    """Reads the same records from each source in turns, and returns a row for each of them."""
    import pipelines

    batch, epochs, num_rounds = sizes
    measure = functools.partial(_measure, batch=batch, kind=kind, epochs=epochs)
    cached = pipelines.Tuning(cache_dir=folder.parent / f"cache of {kind}")
    contenders: dict[str, Callable[[], tuple[float, float]]] = {
        _LOCAL: functools.partial(measure, folder),
        **{
            f"bucket, {latency:g} ms": functools.partial(measure, url, address)
            for latency, address in endpoints.items()
        },
        _CACHED: functools.partial(measure, url, list(endpoints.values())[-1], tuning=cached),
    }
    if kind != _DECODED:
        contenders |= {
            f"bucket, {latency:g} ms, download alone": functools.partial(
                _download, url, address, epochs
            )
            for latency, address in endpoints.items()
        }
    for contender in (contenders[_LOCAL], contenders[_CACHED]):
        contender()  # warms up; fills the cache
    samples = harness.run_in_turns(contenders, num_rounds)
    rates = {
        source: [rate for rate, _ in samples_of_source]
        for source, samples_of_source in samples.items()
    }
    cpu = {
        source: [seconds for _, seconds in samples_of_source]
        for source, samples_of_source in samples.items()
    }
    return [
        {
            "records": kind,
            "source": source,
            "records_per_s": harness.spread(rates[source]),
            "ratio": harness.ratio(rates[source], rates[_LOCAL]),
            "cpu_ratio": harness.ratio(cpu[source], cpu[_LOCAL]),
            "samples": samples[source],
        }
        for source in samples
    ]


def _waits(
    endpoints: dict[float, str], folder: Path, num_images: int, num_rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Trains a model on photographs from each source in turns."""
    from tests.support import buckets
    from tfdist.tools.bench import input_readers, photographs

    images = photographs.create(folder, num_images)
    buckets.upload(images.shards, "s3://bucket/photographs")
    remote = images._replace(shards="s3://bucket/photographs")  # type: ignore[arg-type]

    def wait(latency: float) -> dict[str, float]:
        _use(endpoints[latency])
        return input_readers.measure_wait(remote)

    contenders = {_LOCAL: functools.partial(input_readers.measure_wait, images)} | {
        f"bucket, {latency:g} ms": functools.partial(wait, latency) for latency in endpoints
    }
    return harness.run_in_turns(contenders, num_rounds)


def _show_waits(waits: dict[str, list[dict[str, float]]], output: harness.Output) -> None:
    rows = []
    for source, samples in waits.items():
        spread = harness.spread([100 * one["data_wait"] for one in samples])
        steps = statistics.median(one["step_ms"] for one in samples)
        alone = statistics.median(one["batch_ms"] for one in samples)
        rows.append((source, harness.as_text(spread), f"{steps:.0f}", f"{alone:.0f}"))
    header = ("source", "waiting for data, %", "step, ms", "input alone, ms per batch")
    output.show(header, rows, "A model on one core, its input on another")
    output.conclude(waits, _NOTE)


def _write(folder: Path, num_images: int, kind: str) -> None:
    import pipelines

    shape = (_PIXELS, _PIXELS, 3)
    feature = pipelines.Feature(name="image", dtype="uint8", shape=shape, encoding="jpeg")
    records: Iterator[Mapping[str, object]] = images(num_images)
    if kind == _TEXT:
        feature = pipelines.Feature(name="text", dtype="string", encoding="bytes")
        lines = (f"line {i} " + "of the text " * 40 for i in range(_NUM_LINES * num_images))
        records = ({"text": line} for line in lines)
    pipelines.write_shards(records, folder, (feature,), num_shards=_NUM_SHARDS, source=kind)


def images(number: int) -> Iterator[dict[str, bytes]]:
    """Returns examples with the bytes of JPEG images."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (_NUM_KINDS, 16, 16, 3), np.uint8)
    encoded = []
    for pixels in coarse:
        file = io.BytesIO()
        Image.fromarray(pixels).resize((_PIXELS, _PIXELS)).save(file, "jpeg", quality=90)
        encoded.append(file.getvalue())
    for i in range(number):
        yield {"image": encoded[i % _NUM_KINDS]}


def _measure(
    where: Any,
    endpoint: str = "",
    *,
    batch: int,
    kind: str,
    epochs: int,
    tuning: Any = None,
) -> tuple[float, float]:
    """Reads some epochs after a first one, which opens files and connections.

    Returns:
        Records per second, and seconds of CPU time of this process.
    """
    import pipelines

    _use(endpoint)
    dataset = pipelines.read(
        where,
        batch,
        shuffle_buffer=_SHUFFLE_BUFFER,
        seed=1,
        decode_images=kind == _DECODED,
        tuning=tuning or pipelines.Tuning(),
    )
    cpu = begin = 0.0
    count = 0
    for number, one in enumerate(dataset.repeat(1 + epochs)):
        if number == dataset.cardinality():  # the second epoch begins
            cpu, begin, count = time.process_time(), time.perf_counter(), 0
        count += int(next(iter(one.values())).shape[0])
    return count / (time.perf_counter() - begin), time.process_time() - cpu


def _download(url: str, endpoint: str, epochs: int) -> tuple[float, float]:
    """Downloads the shards as the reader does, without splitting them. Returns as `_measure`."""
    import pipelines
    from pipelines.reading import read_ahead, remote_reader

    _use(endpoint)
    index = pipelines.load_index(url)
    ranges = [
        read_ahead.Range(f"{url}/{shard.name}", begin, min(begin + _RANGE_BYTES, shard.num_bytes))
        for shard in index.shards
        for begin in range(0, shard.num_bytes, _RANGE_BYTES)
    ]
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(epochs):
        for _ in read_ahead.read_ahead(ranges, remote_reader.fetch_range, _LIMIT_BYTES):
            pass
    rate = epochs * index.num_records / (time.perf_counter() - begin)
    return rate, time.process_time() - cpu


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["records"],
        row["source"],
        harness.as_text(row["records_per_s"], ",.0f"),
        harness.as_text(row["ratio"]),
        harness.as_text(row["cpu_ratio"]),
    )
