"""Operations that a step has for each weight: on a GPU, each is a kernel that the host queues."""

from __future__ import annotations

import collections
import functools
from typing import Any

import keras
from keras import layers

from tests.gpu_paths.step_graph import step_graphs
from tests.support.training import building
from tfdist.strategies.one_device import OneDevice

_sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
#: Operations by which overflows are looked for and gradients are unscaled.
_OF_SCALING = ("IsFinite", "All", "RealDiv", "SelectV2", "ConcatV2")
#: The weights of a layer of `operations`: a kernel, a bias, gamma and beta.
_WEIGHTS_PER_LAYER = 4


def operations(num_layers: int) -> collections.Counter[str]:
    """Returns the number of operations of each type in a step with loss scaling."""

    def build_layers() -> list[Any]:
        kinds = (lambda: layers.Conv2D(8, 1), layers.BatchNormalization) * num_layers
        as_image = [keras.Input((4,)), layers.Reshape((2, 2, 1))]
        return [*as_image, *(make() for make in kinds), layers.Flatten(), layers.Dense(1)]

    build = building(build_layers, optimizer=_sgd)
    graphs = step_graphs(OneDevice(), build, precision="mixed_float16")
    return collections.Counter(node.op for node in graphs.nodes())


def test_weights_are_updated_by_one_operation_and_checked_together() -> None:
    few, many = operations(1), operations(3)
    assert {kind: many[kind] - few[kind] for kind in _OF_SCALING} == dict.fromkeys(_OF_SCALING, 0)
    kind = "ResourceApplyKerasMomentum"
    assert many[kind] - few[kind] == 2 * _WEIGHTS_PER_LAYER
    assert many["AssignAddVariableOp"] == few["AssignAddVariableOp"]
