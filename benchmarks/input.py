"""`python -m benchmarks input`: `tfdist bench input` with readers of other libraries."""

from __future__ import annotations

from typing import Any

from tfdist.tools.bench import input as input_benchmark

DESCRIPTION = "images per second of tfds, PyTorch's DataLoader and grain, where installed"

add_arguments = input_benchmark.add_arguments


def run(**flags: Any) -> None:
    """See `tfdist.tools.bench.input.run`."""
    from benchmarks import input_peers

    input_benchmark.run(more_readers=input_peers.available(), **flags)
