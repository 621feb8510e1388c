"""Measures the contenders on one model, in turns, a process each, and returns plain data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tfdist.bench.interleave import ratio, spread

CONTENDERS = ("tfdist", "Keras")
_TIMEOUT_SECONDS = 3600


def model(name: str, replicas: Sequence[int], num_rounds: int) -> dict[str, Any]:
    """Returns, by number of replicas and contender, the spread of what was measured.

    Args:
        name: Of `models.MODELS`.
        replicas: Numbers of them.
        num_rounds: Processes of each contender and number.

    Returns:
        Numbers, strings, lists and dicts, as they go into JSON. `one_ratio` is the time to that
        for the first number, `tfdist_ratio` tfdist's time to the contender's.
    """
    taken: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(num_rounds):
        for number in replicas:
            for contender in CONTENDERS:
                measured = _first_fit(contender, name, number)
                taken.setdefault((number, contender), []).append(measured)

    def seconds(number: int, contender: str) -> list[float]:
        return [one["cpu_s"] for one in taken[number, contender]]

    cases = []
    for (number, contender), samples in taken.items():
        spreads = {key: spread([one[key] for one in samples])._asdict() for key in samples[0]}
        own = seconds(number, contender)
        cases.append(
            {"replicas": number, "contender": contender, "samples": samples}
            | spreads
            | {
                "one_ratio": ratio(own, seconds(replicas[0], contender))._asdict(),
                "tfdist_ratio": ratio(seconds(number, "tfdist"), own)._asdict(),
            }
        )
    return {"model": name, "rounds": num_rounds, "cases": cases}


def _first_fit(contender: str, name: str, number: int) -> dict[str, float]:
    """Runs one process; see `first_fit`."""
    command = [sys.executable, "-m", "tfdist.bench.start.first_fit", contender, name, str(number)]
    done = subprocess.run(
        command,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
