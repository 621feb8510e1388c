"""`python -m benchmarks bucket`: reading from an S3 server beside reading local files."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeFloat, PositiveInt

from tfdist.bench import harness

DESCRIPTION = "reading images and text from an S3 server beside reading local files"
_HEADER = ("source", "added latency", "records", "records/s", "CPU s", "requests")
_NUM_LINES = 10  # of text per image, to have about as many bytes
#: Kinds of records.
_DECODED, _BYTES, _TEXT = _RECORDS = ("decoded images", "image bytes", "lines of text")
_NUM_KINDS, _PIXELS, _NUM_SHARDS, _SHUFFLE_BUFFER = 16, 128, 8, 5000


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--images", type=PositiveInt, default=20_000, metavar="N", help="images of 128x128 pixels"
    )
    parser.add_argument("--batch", type=PositiveInt, default=256, metavar="N", help="batch size")
    parser.add_argument(
        "--latencies", nargs="+", type=NonNegativeFloat, default=[0.0, 5.0, 20.0, 80.0],
        metavar="MS", help="milliseconds that a proxy adds to each request",
    )  # fmt: skip
    harness.add_arguments(parser, table=True)


def run(
    images: int,
    batch: int,
    latencies: Sequence[float],
    json: str | None,
    table: str | None,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    The server, its proxy and the reader share the cores of this machine. Images are read with and
    without decoding, because decoding may take all cores and hide the cost of reading.
    """
    import pipelines
    from pipelines import object_store
    from tests.support import buckets

    output = harness.Output("bucket", json, table)
    if smoke:
        images, latencies = 600, latencies[:1]
    os.environ.update(buckets.ENVIRONMENT)
    results = []
    with tempfile.TemporaryDirectory() as name, buckets.s3_server() as address:
        proxy = buckets.Proxy(address)
        os.environ["AWS_ENDPOINT_URL"] = address
        buckets.create_bucket(address, "bucket")
        for records in _RECORDS:
            folder, url = Path(name) / records, f"s3://bucket/{records}".replace(" ", "-")
            _write(folder, images, records)
            pipelines.read(folder, batch)  # writes the offsets
            buckets.upload(folder, url)
            results.append(_measure("local", folder, batch, records))
            results.append(_measure("S3", url, batch, records))
            cached = pipelines.Tuning(cache_dir=f"{name}/cache of {records}")
            _measure("S3", url, batch, records, cached)
            results.append(_measure("S3, cached", url, batch, records, cached))
            for latency in latencies:
                proxy.delay, before = latency / 1000, proxy.num_requests
                os.environ["AWS_ENDPOINT_URL"] = proxy.address
                object_store.store_of.cache_clear()
                row = _measure("S3 by proxy", url, batch, records)
                row |= {"latency_ms": latency, "requests": proxy.num_requests - before}
                results.append(row)
                os.environ["AWS_ENDPOINT_URL"] = address
                object_store.store_of.cache_clear()
        proxy.close()
    title = f"{images} JPEG images of {_PIXELS}x{_PIXELS} pixels, {_NUM_LINES * images} lines of "
    title += f"text, batch {batch}"
    output.show(_HEADER, [_cells(row) for row in results], title)
    output.conclude(results)


def _write(folder: Path, num_images: int, records: str) -> None:
    import pipelines

    shape = (_PIXELS, _PIXELS, 3)
    feature = pipelines.Feature(name="image", dtype="uint8", shape=shape, encoding="jpeg")
    examples = _examples(num_images)
    if records == _TEXT:
        feature = pipelines.Feature(name="text", dtype="string", encoding="bytes")
        lines = (f"line {i} " + "of the text " * 40 for i in range(_NUM_LINES * num_images))
        examples = ({"text": line} for line in lines)
    pipelines.write_shards(examples, folder, (feature,), num_shards=_NUM_SHARDS, source=records)


def _examples(num_images: int) -> Iterator[dict[str, object]]:
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (_NUM_KINDS, 16, 16, 3), np.uint8)
    encoded = []
    for pixels in coarse:
        file = io.BytesIO()
        Image.fromarray(pixels).resize((_PIXELS, _PIXELS)).save(file, "jpeg", quality=90)
        encoded.append(file.getvalue())
    for number in range(num_images):
        yield {"image": encoded[number % _NUM_KINDS]}


def _measure(source: str, where: Any, batch: int, records: str, tuning: Any = None) -> dict:
    """Reads one epoch and returns its throughput and the CPU time of this process."""
    import pipelines

    dataset = pipelines.read(
        where,
        batch,
        shuffle_buffer=_SHUFFLE_BUFFER,
        seed=1,
        decode_images=records == _DECODED,
        tuning=tuning or pipelines.Tuning(),
    )
    cpu, begin, count = time.process_time(), time.perf_counter(), 0
    for one in dataset:
        count += int(next(iter(one.values())).shape[0])
    return {
        "source": source,
        "records": records,
        "records_per_s": count / (time.perf_counter() - begin),
        "cpu_s": time.process_time() - cpu,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["source"],
        f"{row['latency_ms']:g} ms" if "latency_ms" in row else "",
        row["records"],
        f"{row['records_per_s']:,.0f}",
        f"{row['cpu_s']:.2f}",
        str(row.get("requests", "")),
    )
