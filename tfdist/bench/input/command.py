"""The flags of `python -m tfdist.bench input`, and what it does. Imports no TensorFlow at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.config import default_data_dir

DESCRIPTION = "images per second of the input pipeline, beside the limit and other readers"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--num-images", type=PositiveInt, default=5000, metavar="N", help="JPEGs to make and read"
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=5, metavar="N", help="measurements of each contender"
    )
    parser.add_argument(
        "--data-dir",
        default=default_data_dir(),
        metavar="DIR",
        help="where the images are made, once",
    )
    parser.add_argument(
        "--large", action="store_true", help="photographs of 2000x1500 pixels, not of 500x375"
    )
    parser.add_argument(
        "--with-model",
        action="store_true",
        help="instead, how long a model on one core waits for an input on another",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument(
        "--smoke", action="store_true", help="few images, once, to see that it works"
    )


def run(
    num_images: int, rounds: int, data_dir: str, large: bool, with_model: bool, json: str | None,
    smoke: bool,
) -> None:  # fmt: skip
    """Measures and prints a table; the arguments are the flags.

    Raises:
        DeviceError: Fewer than two cores to keep model and input apart.
    """
    from tfdist.bench.input import photographs, report
    from tfdist.bench.machine import OthersLoad

    if smoke:
        num_images, rounds = 96, 1
    made = photographs.make(Path(data_dir) / "bench", num_images, large)
    load = OthersLoad()
    results: dict[str, Any] = {"images": num_images, "large": large}
    if with_model:
        from tfdist.bench.input import waiting

        results["with_model"] = waiting.measure(made)
        report.show_waiting(results["with_model"])
    else:
        from tfdist.bench.input import contenders, measure

        results["rounds"] = rounds
        results["contenders"] = measure.compare(contenders.available(), made, num_images, rounds)
        sides = "2000x1500" if large else "500x375"
        report.show(results["contenders"], f"{num_images} JPEGs of {sides}", rounds)
    report.conclude(results, load.fraction(), json)
