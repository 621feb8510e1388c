"""TensorFlow's own estimate of a graph's memory: Grappler's cost model."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.grappler import cluster, item


def peak_memory(graph: tf.Graph) -> int:
    """Returns the peak memory of a function's graph, in bytes, on one device.

    `cluster.Cluster.DeterminePeakMemoryUsage` and `item.Item`: there is no public way to ask.

    Args:
        graph: The graph of a function without further calls; its shapes are known.
    """
    definition = graph.as_graph_def()
    for node in definition.node:
        node.attr.pop("_class", None)  # colocation with variables outside of the graph
    with tf.Graph().as_default() as plain:
        tf.graph_util.import_graph_def(definition, name="")
        for tensor in graph.outputs:
            if tensor.dtype not in (tf.resource, tf.variant):
                # Grappler keeps what these need.
                plain.add_to_collection("train_op", plain.get_tensor_by_name(tensor.name))
        meta_graph = tf.compat.v1.train.export_meta_graph(graph=plain)
    properties = device_properties_pb2.DeviceProperties(type="CPU", num_cores=1, frequency=1000)
    device = device_properties_pb2.NamedDevice(name="/device:CPU:0", properties=properties)
    usage = cluster.Cluster(devices=[device]).DeterminePeakMemoryUsage(item.Item(meta_graph))
    return max(num_bytes for num_bytes, _ in usage.values())
