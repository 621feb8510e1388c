"""What is to be packed, and how: all that the shards follow from."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import numpy as np

from pipelines.format.compression import Compression
from pipelines.sources.source import Source


@dataclass(frozen=True)
class Plan:
    """What is to be packed and how; the records follow from it to the last bit.

    Attributes:
        source: of the examples.
        num_shards: files to deal them out to.
        seed: of the order in which they are dealt out, or None for the order of the source.
        compression: of the files.
    """

    source: Source
    num_shards: int
    seed: int | None
    compression: Compression

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The numbers of the examples in the order in which they are dealt out."""
        numbers = np.arange(len(self.source))
        # PCG64 by name: NumPy may change what default_rng is.
        if self.seed is not None:
            np.random.Generator(np.random.PCG64(self.seed)).shuffle(numbers)
        return numbers

    def numbers(self, shard: int) -> np.ndarray:
        """The numbers of the examples of one shard."""
        return self.order[shard :: self.num_shards]

    @property
    def description(self) -> str:
        """Goes into the index: differs whenever the records would."""
        order = "in order" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"{self.source.description}; {order}"

    def to_json(self) -> str:
        """Equal texts are plans that write the same shards."""
        wanted = self.wanted() | {"features": [f.model_dump() for f in self.source.features]}
        return json.dumps(wanted)

    def wanted(self) -> dict[str, object]:
        """What the index of a folder packed by this plan holds."""
        return {
            "source": self.description,
            "features": self.source.features,
            "num_shards": self.num_shards,
            "compression": self.compression,
        }
