"""From serialized records to examples: decoded, mapped, and changed at random by a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from pipelines.format.decode import decode
from pipelines.format.feature import Feature

#: What to make of one example, a dictionary of arrays.
MapFn = Callable[[dict[str, tf.Tensor]], Any]
#: What to make of a map's result at random, with a seed, int32 `(2,)`, for stateless operations.
AugmentFn = Callable[[Any, tf.Tensor], Any]


@dataclass(frozen=True, eq=False)
class ExampleMaker:
    """What becomes of a record.

    Attributes:
        features: of the record.
        decode_images: whether images become pixels.
        map_fn: what to make of the features, always the same.
        augment_fn: what to make of that at random.
    """

    features: Sequence[Feature]
    decode_images: bool
    map_fn: MapFn | None
    augment_fn: AugmentFn | None

    @property
    def needs_single_examples(self) -> bool:
        """Whether a function takes examples one by one; decoding alone takes whole batches too."""
        return self.map_fn is not None or self.augment_fn is not None

    def mapped(self, serialized: tf.Tensor) -> Any:
        """The example of a serialized record before `augment_fn`: what can be kept."""
        example = decode(serialized, self.features, decode_images=self.decode_images)
        return self.map_fn(example) if self.map_fn else example

    def augmented(self, mapped: Any, seed: tf.Tensor) -> Any:
        """What `augment_fn` makes of a mapped example; the example itself where there is none."""
        return self.augment_fn(mapped, seed) if self.augment_fn else mapped

    def made(self, serialized: tf.Tensor, seed: tf.Tensor) -> Any:
        """The example of a serialized record."""
        return self.augmented(self.mapped(serialized), seed)

    def made_with_seed(self, serialized: tf.Tensor, seed: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """The same, with the seed beside it."""
        return self.made(serialized, seed), seed

    def augmented_with_seed(self, mapped: Any, seed: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """What `augment_fn` makes of a mapped example, with the seed beside it."""
        return self.augmented(mapped, seed), seed
