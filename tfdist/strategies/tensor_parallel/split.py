"""How a layer is split.

By `"column"` each device computes some of the outputs from all inputs, by `"row"` a term of all
outputs from some of the inputs (Shoeybi et al. 2019, "Megatron-LM", section 3), by `"channels"`
outputs from their own inputs alone (the groups of a convolution: the columns of AlexNet), by
`"heads"` the heads of an attention, by `"vocabulary"` what is looked up in its rows of a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from tfdist.strategies.tensor_parallel.division import AlongAxis


class Cut(NamedTuple):
    """A variable and how it is cut."""

    variable: keras.Variable
    division: AlongAxis


class Split(NamedTuple):
    """How a layer is split.

    Attributes:
        layer: Which.
        kind: `"column"`, `"row"`, `"channels"`, `"heads"` or `"vocabulary"`.
        cuts: Of its variables; the first is that of a kernel.
        inputs: Along which axis the inputs are cut, into which sizes; None: they are not.
        outputs: Likewise of the outputs.
    """

    layer: Any
    kind: str
    cuts: list[Cut]
    inputs: AlongAxis | None = None
    outputs: AlongAxis | None = None
