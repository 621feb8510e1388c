"""How many shards to write where nobody says."""

from __future__ import annotations

import math

from pipelines.format.encode import encode
from pipelines.sources.source import Source

_NUM_SAMPLES = 32
_LARGE, _SMALL = 100e6, 10e6  # bytes


def num_shards(source: Source) -> int:
    """Shards of 100 MB; of less, down to 10 MB, where there would be fewer than ten.

    The rule is that of https://www.tensorflow.org/tutorials/load_data/tfrecord: files enough to
    read several at once, "each file should be at least 10 MB+ and ideally 100 MB+". The size
    follows from a sample, the same one every time.

    Raises:
        DataError: an example of the sample cannot be read.
    """
    count = len(source)
    sample = list(range(0, count, -(-count // _NUM_SAMPLES)))
    sizes = [len(encode(example, source.features)) for example in source.examples(sample)]
    num_bytes = sum(sizes) / len(sizes) * count
    wanted = max(math.ceil(num_bytes / _LARGE), min(10, int(num_bytes / _SMALL)), 1)
    return min(wanted, count)
