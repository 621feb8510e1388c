"""Published measurements of scaling, and what `tfdist plan scaling` computes for them.

Nothing is fitted: a row's plan follows from the network's parameters, the published speed of one
GPU, the rate of the hosts' links and the latencies that NCCL assumes of each kind of link.

Sources:

- Sergeev and Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow", and
  the benchmarks page of Horovod's documentation: 4 Pascal GPUs per server, RoCE at 25 Gb/s.
- Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour": 8 P100 per server
  with NVLink, Ethernet at 50 Gb/s; 29 hours on 8 GPUs and one hour on 256.
- TensorFlow's benchmarks page of May 2017: images per second of one P100, and of up to 64 K80 with
  parameter servers on p2.8xlarge instances (10 Gb/s).
- Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
  Parallelism", section 5.1, table 1 and figure 5: GPT-2 on servers with 16 V100 (DGX-2H), where a
  GPU has 300 GB/s through NVSwitch in both directions together, and a server 8 adapters of 100 Gb/s
  (100 GB/s). One GPU attains 39 TFLOP/s. A replica has 8 sequences of 1024 tokens, and 64 replicas
  have the batch of 512. Section 3: two all-reduces of activations for a layer in each pass.
- Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM", equation 3: the operations of a step, with activation checkpointing.
- NCCL 2.7, `src/graph/tuning.cc`: latencies of a message of a ring, which are 1.9 times as long
  for large buffers over several hosts.
"""

from __future__ import annotations

from typing import NamedTuple

from tfdist.tools.plan.exchange import PAYLOAD, Link, Profile, Wires, ring, step

_PLATEAU = 1.9
_NVLINK, _PCIE, _NETWORK = (_PLATEAU * microseconds * 1e-6 for microseconds in (3.4, 5.7, 9.6))
#: Horovod's fusion buffer, in bytes. Its size is close to that of Goyal's largest buffers.
_BUCKET = 64 * 2**20
#: Trainable parameters of the networks.
_PARAMETERS = {
    "Inception V3": 23.83e6, "ResNet-50": 25.56e6, "ResNet-101": 44.55e6, "ResNet-152": 60.19e6,
    "VGG-16": 138.36e6,
}  # fmt: skip


def _link(gigabits: float, latency: float) -> Link:
    return Link(PAYLOAD * gigabits * 1e9 / 8, latency)


class Row(NamedTuple):
    """A published efficiency, and what it was measured on.

    Attributes:
        network: Name of the network.
        exchange: A name out of `tfdist.tools.plan.exchange.EXCHANGES`.
        workers: Number of workers that exchange gradients.
        wires: The network between them.
        seconds: Compute time of a worker's step.
        efficiency: The published efficiency, compared with a single worker.
        gradient_bytes: Bytes of the gradients of a worker; 0: float32 for all `_PARAMETERS`.
        bucket_bytes: As for `tfdist.tools.plan.exchange.step`.
        devices: Devices of a worker, of which `workers` counts one.
        tensor_seconds: Communication time of tensor parallelism between the devices of a worker.
    """

    source: str
    network: str
    exchange: str
    workers: int
    wires: Wires
    seconds: float
    efficiency: float
    gradient_bytes: float = 0.0
    bucket_bytes: float = _BUCKET
    devices: int = 1
    tensor_seconds: float = 0.0

    def planned(self) -> float:
        """Returns the efficiency that `tfdist plan scaling` computes."""
        gradient_bytes = self.gradient_bytes or 4 * _PARAMETERS[self.network]
        profile = Profile(self.seconds + self.tensor_seconds, gradient_bytes)
        one = step(self.exchange, profile, self.workers, self.wires, self.bucket_bytes)
        assert one is not None
        return self.seconds / one.seconds


_HOROVOD = Wires(_link(25, _NETWORK), Link(12e9, _PCIE), per_host=4)
_BIG_BASIN = Wires(_link(50, _NETWORK), Link(40e9, _NVLINK), per_host=8)
#: Compute times of 64 images on a P100. ResNet-101 has none: it lies between ResNet-50 (4.1 billion
#: multiplications an image, 219 images/s) and ResNet-152 (11.5; 91.8) by its 7.8 billion.
_P100 = {
    "Inception V3": 64 / 142,
    "VGG-16": 64 / 154,
    "ResNet-101": 64 * (1 / 219 + (7.8 - 4.1) / (11.5 - 4.1) * (1 / 91.8 - 1 / 219)),
}


def _horovod(network: str, workers: int, efficiency: float) -> Row:
    seconds = _P100[network]
    return Row("Horovod", network, "ring", workers, _HOROVOD, seconds, efficiency)


def _servers(network: str, hosts: int, servers: int, batch: int, one: float, images: float) -> Row:
    """A row of TensorFlow's page: the hosts exchange gradients, each with 8 GPUs."""
    wires = Wires(_link(10, 0.0), Link(12e9, 0.0), num_servers=servers)
    seconds = 8 * batch / one
    efficiency = images / (hosts * one)
    return Row("TensorFlow", network, "parameter_server", hosts, wires, seconds, efficiency)


#: Sequences of a replica, their tokens, and the size of the vocabulary. GPUs of a server.
_SEQUENCES, _TOKENS, _VOCABULARY, _PER_SERVER = 8, 1024, 51200, 16
_NVSWITCH, _SERVER_RATE, _ATTAINED = Link(150e9, _NVLINK), 100e9, 39e12


def _megatron(
    billions: float, devices: int, layers: int, hidden: int, replicas: int, efficiency: float
) -> Row:
    """A GPT-2 in float16, whose layers are split over the devices of a replica.

    The all-reduces of activations, two for a layer in each of the forward pass, its repetition and
    the backward pass, do not overlap with anything. Neither do the gradients of the replicas, whose
    rings, one for each device of a replica, share the adapters of the servers.
    """
    tokens = _SEQUENCES * _TOKENS
    operations = 96.0 * tokens * layers * hidden**2
    operations *= 1 + _TOKENS / (6 * hidden) + _VOCABULARY / (16 * layers * hidden)
    inside = Wires(_NVSWITCH, _NVSWITCH, per_host=devices)
    a_sum = ring(2 * tokens * hidden, devices, inside) if devices > 1 else 0.0
    wires = Wires(
        Link(_SERVER_RATE / devices, _NETWORK), _NVSWITCH, per_host=_PER_SERVER // devices
    )
    return Row(
        "Megatron-LM", f"GPT-2 {billions}B", "ring", replicas, wires,
        operations / devices / _ATTAINED, efficiency,
        gradient_bytes=2 * billions * 1e9 / devices, bucket_bytes=0, devices=devices,
        tensor_seconds=6 * layers * a_sum,
    )  # fmt: skip


ROWS = (
    _horovod("Inception V3", 512, 0.90),
    _horovod("ResNet-101", 512, 0.90),
    _horovod("VGG-16", 128, 0.79),
    _horovod("VGG-16", 512, 0.68),
    # 90 epochs of 1.28 million images in 29 hours are 0.232 s for a step of 8 x 32 images.
    Row("Goyal et al.", "ResNet-50", "ring", 256, _BIG_BASIN, 0.232, 29 / 32),
    _servers("Inception V3", 2, 2, 64, 229, 459),
    _servers("Inception V3", 4, 4, 64, 229, 902),
    _servers("Inception V3", 8, 6, 64, 229, 1783),
    _servers("ResNet-50", 2, 2, 64, 378, 751),
    _servers("ResNet-50", 4, 4, 64, 378, 1388),
    _servers("ResNet-50", 8, 8, 64, 378, 2744),
    _servers("ResNet-152", 2, 2, 32, 146, 291),
    _servers("ResNet-152", 4, 4, 32, 146, 565),
    _servers("ResNet-152", 8, 4, 32, 146, 981),
    _megatron(2.5, 2, 54, 1920, 1, 0.95),
    _megatron(4.2, 4, 64, 2304, 1, 0.82),
    _megatron(8.3, 8, 72, 3072, 1, 0.77),
    _megatron(1.2, 1, 40, 1536, 64, 0.96),
    _megatron(2.5, 2, 54, 1920, 64, 0.83),
    _megatron(4.2, 4, 64, 2304, 64, 0.79),
    _megatron(8.3, 8, 72, 3072, 64, 0.74),
)
