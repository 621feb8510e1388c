"""`python -m benchmarks pack_parts`: packing small images by one and by several processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.tools.bench import harness

DESCRIPTION = "packing small images by one and by several processes, each with its part"
_HEADER = ("parts", "seconds", "images/s", "CPU s", "same bytes")
_NUM_KINDS, _PIXELS, _NUM_CLASSES, _NUM_SHARDS = 64, 32, 10, 16


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--images", type=PositiveInt, default=100_000, metavar="N", help="images of 32x32 pixels"
    )
    parser.add_argument(
        "--parts", nargs="+", type=PositiveInt, default=[1, 2, 4], metavar="N",
        help="numbers of processes that pack at the same time, one part each",
    )  # fmt: skip
    harness.add_arguments(parser, table=True)


def run(images: int, parts: Sequence[int], output: harness.Output, smoke: bool) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    The processes share the cores of this machine, so that a speed-up over one process ends there.
    """
    if smoke:
        images, parts = 200, [1, 2]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "images"
        _write_images(source, images)
        for number in parts:
            target = Path(name) / f"packed-{number}"
            seconds, cpu = _pack(source, target, number)
            results.append(
                {
                    "parts": number,
                    "seconds": seconds,
                    "cpu_s": cpu,
                    "images_per_s": images / seconds,
                    "sha256": _digest(target),
                }
            )
    first = results[0]["sha256"]
    rows = [
        (
            str(row["parts"]),
            f"{row['seconds']:.1f}",
            f"{row['images_per_s']:,.0f}",
            f"{row['cpu_s']:.1f}",
            "yes" if row["sha256"] == first else "NO",
        )
        for row in results
    ]
    output.show(_HEADER, rows, f"{images} PNG images of {_PIXELS}x{_PIXELS} pixels")
    output.conclude(results)


def _write_images(folder: Path, num_images: int) -> None:
    import io

    import numpy as np
    from PIL import Image

    encoded = []
    for pixels in np.random.default_rng(0).integers(
        0, 256, (_NUM_KINDS, _PIXELS, _PIXELS, 3), np.uint8
    ):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        encoded.append(file.getvalue())
    for number in range(_NUM_CLASSES):
        (folder / f"class-{number}").mkdir(parents=True)
    for number in range(num_images):
        path = folder / f"class-{number % _NUM_CLASSES}" / f"{number:07d}.png"
        path.write_bytes(encoded[number % _NUM_KINDS])


def _pack(source: Path, target: Path, num_parts: int) -> tuple[float, float]:
    """Packs with one process per part, and returns wall and CPU seconds of all together."""
    before, began = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "pipelines.pack", str(source), str(target)]
    command += ["--num-shards", str(_NUM_SHARDS), "--num-workers", "1"]
    processes = [
        subprocess.Popen([*command, "--part", f"{part}/{num_parts}"], stdout=subprocess.DEVNULL)
        for part in range(1, num_parts + 1)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"{command} ended with exit codes {codes}")
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return time.perf_counter() - began, cpu


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.tfrecord*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
