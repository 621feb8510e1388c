"""TensorFlow's strategy of all workers, told who they are and how long to wait for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdist import cluster
from tfdist.cluster import Cluster, gpus, liveness
from tfdist.devices import asked_gpus, resolve, use_gpus
from tfdist.errors import ClusterError
from tfdist.upstream.tensorflow import has_started
from tfdist.upstream.tensorflow_workers import bound_waiting, workers_on
from tfdist.watchdog import start_up

#: Seconds for which a worker waits for the others to come.
JOIN_SECONDS = 120
#: Seconds without a sign of life after which TensorFlow gives a worker up.
HEARTBEAT_SECONDS = 20

#: Bytes of one of TensorFlow's collectives over gRPC. It takes 100 MB at once three times as long
#: as pieces of 2 to 8 MB (1.9 s, 0.6 s; at 16 MB 0.10 s, 0.07 s; two processes of a busy host), and
#: by itself packs all the gradients of a step into one.
PIECE_BYTES = 1 << 22


@functools.cache
def tf_strategy(
    devices: tuple[str, ...], communication: str, workers: Cluster
) -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy: one a process, since its collectives are numbered.

    Args:
        devices: Of this worker.
        communication: `"ring"` or `"nccl"`.
        workers: All of them, with their addresses.

    Raises:
        ClusterError: The workers do not come together, or TensorFlow has started already.
    """
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=getattr(
            tf.distribute.experimental.CommunicationImplementation, communication.upper()
        ),
        bytes_per_pack=PIECE_BYTES if communication == "ring" else 0,
    )
    if workers.size == 1:
        # Of no cluster: what TF_CONFIG may say of one worker would be another way of the same.
        nobody = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        with workers_on(devices):
            return tf.distribute.MultiWorkerMirroredStrategy(nobody, options)
    _check_not_started()
    leader = "chief" if workers.has_chief else "worker"
    bound_waiting(workers.tasks(), leader, JOIN_SECONDS, HEARTBEAT_SECONDS)
    waiting = start_up.waiting(workers.rank, workers.size, functools.partial(silent, workers))
    try:
        with waiting, workers_on(devices):
            return tf.distribute.MultiWorkerMirroredStrategy(_resolver(workers), options)
    except (tf.errors.OpError, RuntimeError) as error:
        raise ClusterError(
            f"Rank {workers.rank} did not come together with the other workers within "
            f"{JOIN_SECONDS} s: {_first_line(error)}\nStart all of {', '.join(workers.addresses)}, "
            "let each reach the others' ports, and give each a rank of its own."
        ) from error


def meet(
    workers: Cluster, devices: int | str | Sequence[str] | None, communication: str
) -> tuple[Cluster, list[str]]:
    """Brings all workers together before TensorFlow starts, and divides the GPUs they share.

    Workers that see the same GPUs, as those of one host do unless their launcher gave each its own,
    divide them by rank.

    Args:
        workers: As discovered; with addresses where the launcher told them.
        devices: As for `tfdist.devices.resolve`: a number counts devices of each worker.
        communication: With `"ring"` several workers may use one GPU where there are too few.

    Returns:
        The workers with their addresses, and the names of this worker's devices.

    Raises:
        ClusterError: Workers are missing or disagree, or there are fewer GPUs than workers.
        DeviceError: There are no such devices.
    """
    if workers.size == 1:
        return workers, resolve(devices, 1)
    asked = asked_gpus(devices)
    names = gpus.identifiers(len(tf.config.get_visible_devices("GPU"))) if asked else []
    whole = cluster.exchange_addresses(
        workers,
        JOIN_SECONDS,
        gpus=[names[i] for i in asked],
        share_gpus=communication == "ring",
    )
    met_before = whole is workers
    cluster.use(whole)
    if not met_before and len(whole.gpus) < len(asked):
        _check_not_started()
        use_gpus([asked[i] for i in whole.gpus])
        devices = devices if isinstance(devices, int) else None
    return whole, resolve(devices, 1)


def _check_not_started() -> None:
    if has_started():
        raise ClusterError(
            "TensorFlow has started in this process, which can no longer join other workers: call "
            "tfdist.strategies.create('multi_worker') before the first operation (building a model "
            "is one) and pass what it returns to the Trainer; or create the Trainer first, with "
            "the function that builds the model."
        )


def silent(workers: Cluster) -> list[int]:
    """Returns the ranks of the others whose server does not answer."""
    others = {i: place for i, place in enumerate(workers.addresses) if i != workers.rank}
    return liveness.silent(others)


def _resolver(workers: Cluster) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Tells TensorFlow who all are, and who this process is."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(workers.tasks()),
        task_type="chief" if workers.has_chief and workers.rank == 0 else "worker",
        task_id=workers.index,
        rpc_layer="grpc",
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
