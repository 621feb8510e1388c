"""Grappler, with a virtual GPU in its cluster, fuses BatchNorm with what lies around it."""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.framework import op_def_registry
from tensorflow.python.grappler import cluster, tf_optimizer

import tfdist
from tests.gpu_paths.kernel_coverage import gpus_listed, not_optimized
from tests.support.training import building
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream.tensorflow_graphs import graphs_run_by

_HOST = "/job:localhost/replica:0/task:0/device:"
#: Blocks of a convolution, BatchNorm and a ReLU.
_DEPTH = 3


def as_on_gpu(graph: Any) -> graph_pb2.GraphDef:
    """Returns a placed graph of a step on `CPU:1` as Grappler would get it with a GPU there."""
    copy = graph_pb2.GraphDef.FromString(graph.SerializeToString())
    for node in copy.node:
        node.device = node.device.replace("CPU:1", "GPU:0")
        node.attr.pop("_class", None)
    return copy


def optimized(graph: graph_pb2.GraphDef) -> collections.Counter[str]:
    """Returns the number of operations of each type on the virtual GPU after Grappler."""
    named = device_properties_pb2.NamedDevice
    properties = device_properties_pb2.DeviceProperties
    h100 = {"architecture": "9.0", "cuda": "12050", "cudnn": "9300"}
    devices = [
        named(name=_HOST + "CPU:0", properties=properties(type="CPU", num_cores=16)),
        named(
            name=_HOST + "GPU:0",
            properties=properties(type="GPU", vendor="NVIDIA", num_cores=132, environment=h100),
        ),
    ]
    session = config_pb2.ConfigProto()
    session.graph_options.rewrite_options.meta_optimizer_timeout_ms = -1
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph)
    kept = [
        node.name
        for node in graph.node
        if (kind := op_def_registry.get(node.op)) is None
        or (kind.is_stateful and node.op not in ("ReadVariableOp", "VarHandleOp"))
        or "Ret" in node.op
    ]
    meta_graph.collection_def["train_op"].node_list.value.extend(kept)
    virtual = cluster.Cluster(devices=devices, allow_soft_placement=True)
    nodes = tf_optimizer.OptimizeGraph(session, meta_graph, cluster=virtual).node
    return collections.Counter(node.op for node in nodes if "GPU" in node.device)


@pytest.fixture(scope="module")
def step_graph() -> graph_pb2.GraphDef:
    def build_layers() -> list[Any]:
        kinds = (lambda: layers.Conv2D(8, 3), layers.BatchNormalization, layers.ReLU) * _DEPTH
        head = [layers.GlobalAveragePooling2D(), layers.Dense(1)]
        return [keras.Input((12, 12, 3)), *(make() for make in kinds), *head]

    build = building(build_layers, optimizer="sgd")
    x, y = np.zeros((8, 12, 12, 3), "float32"), np.zeros((8, 1), "float32")
    with gpus_listed(), not_optimized():
        trainer = tfdist.Trainer(build, strategy=OneDevice("CPU:1"), precision="mixed_float16")
        data = tf.data.Dataset.from_tensors((x, y)).repeat()
        graphs = graphs_run_by(lambda: trainer.fit(data, steps_per_epoch=2, verbose=0))
    loop = max(graphs, key=lambda graph: len(graph.post_optimization_graph.node))
    return as_on_gpu(loop.post_optimization_graph)


def test_gradients_of_batch_norm_and_relu_are_one_kernel(
    step_graph: graph_pb2.GraphDef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    kinds = optimized(step_graph)
    assert kinds["_FusedBatchNormGradEx"] == _DEPTH, kinds
    assert kinds["ReluGrad"] == 0


def test_biases_before_batch_norm_are_not_added(step_graph: graph_pb2.GraphDef) -> None:
    kinds = optimized(step_graph)
    assert kinds["BiasAdd"] == 0, kinds
