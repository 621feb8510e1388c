"""In which order a stage computes the micro-batches: control dependencies, noted while tracing.

Without them TensorFlow starts all micro-batches at once on the first stage, and nothing overlaps.
`"gpipe"`: all forward passes, then all backward passes (Huang et al. 2019). `"1f1b"`: a stage
begins a micro-batch when it has finished the backward pass of an earlier one, so that it keeps no
more of them than there are stages behind it (Narayanan et al. 2019, "PipeDream").

What is waited for has been traced before: so no order is a circle. Where the loss or BatchNorm
exchanges sums in a forward pass, all micro-batches have to be there, and `"1f1b"` is `"gpipe"`.
"""

from __future__ import annotations

import tensorflow as tf


class Order:
    """What the stages have computed in the graph that is being traced.

    Args:
        name: `"gpipe"` or `"1f1b"`.
        num_stages: Of the pipeline.
        num_micro_batches: Of a batch.
    """

    def __init__(self, name: str, num_stages: int, num_micro_batches: int) -> None:
        self._name, self._num_stages = name, num_stages
        self._last_micro_batch = num_micro_batches - 1
        self._forward: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._backward: dict[tuple[int, int], list[tf.Tensor]] = {}

    def before_forward(self, stage: int, micro_batch: int) -> list[tf.Tensor]:
        """Returns what has to be there before a stage begins a micro-batch."""
        before = self._forward.get((stage, micro_batch - 1), [])
        if self._name == "1f1b":
            earlier = micro_batch - (self._num_stages - stage)
            before = before + self._backward.get((stage, earlier), [])
        return before

    def before_backward(self, stage: int, micro_batch: int) -> list[tf.Tensor]:
        """Returns what has to be there before a stage begins the way back of a micro-batch."""
        before = self._backward.get((stage, micro_batch - 1), [])
        if not before and self._name == "gpipe":
            return self._forward.get((stage, self._last_micro_batch), [])
        return before

    def has_gone_forward(self, stage: int, micro_batch: int, outputs: list[tf.Tensor]) -> None:
        """Notes what a stage computed last of a micro-batch."""
        self._forward[stage, micro_batch] = outputs

    def has_gone_back(self, stage: int, micro_batch: int, gradients: list[tf.Tensor]) -> None:
        """Notes gradients that a stage computed of a micro-batch."""
        self._backward.setdefault((stage, micro_batch), []).extend(gradients)

    def turns(self) -> dict[tuple[int, int, bool], list[tf.Tensor]]:
        """Returns what ends each turn: of a stage, of a micro-batch, and whether it is back."""
        forward = {(*key, False): own for key, own in self._forward.items()}
        return forward | {(*key, True): own for key, own in self._backward.items()}
