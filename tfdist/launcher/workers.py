"""The workers of a synchronous run: each is told of the others as TensorFlow and Horovod want it.

Both are told to every worker, because the launcher does not know what its command will use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfdist.cluster import gpus
from tfdist.cluster.ports import check_free, free_ports
from tfdist.launcher import horovod
from tfdist.launcher.plan import LOCAL, Process, Slot, tf_config


class Plan(NamedTuple):
    """What is to be started.

    Attributes:
        processes: The workers, by rank.
        rendezvous: `"host:port"` where Horovod's workers find each other.
    """

    processes: list[Process]
    rendezvous: str


def plan(
    command: Sequence[str],
    slots: Sequence[Slot],
    *,
    first_port: int | None = None,
    interface: str = "",
    gpus_per_worker: int = 0,
    places: Sequence[int] = (),
    here: str = LOCAL,
) -> Plan:
    """Returns the workers of a run.

    Args:
        command: What each of them runs.
        slots: The place of each.
        first_port: Where the ports of every host begin: one for the rendezvous, one for each
            worker. None: free ports; all workers are on this host.
        interface: The network interface by which they reach each other; empty: found out.
        gpus_per_worker: How many GPUs of its host each worker sees; 0: all, which the workers of a
            host divide among themselves.
        places: By rank, whose GPUs on its host a worker has; empty: its number there.
        here: This host's name among the slots. Its workers get some of the GPUs that this process
            sees; those of other hosts begin with GPU 0.

    Raises:
        ConfigurationError: This host has too few GPUs.
    """
    first = slots[0].host
    if first_port is None:
        ports = free_ports(1 + len(slots))
    else:
        ports = [first_port, *(first_port + 1 + slot.local_rank for slot in slots)]
    rendezvous, *own = ports
    tasks = {"worker": [f"{slot.host}:{port}" for slot, port in zip(slots, own, strict=True)]}
    processes = []
    for slot in slots:
        told = tf_config(tasks, "worker", slot.rank)
        if horovod.installed():
            card = "lo" if first == LOCAL else interface
            told |= horovod.environ(slot, first, rendezvous, card)
        if gpus_per_worker:
            place = places[slot.rank] if places else slot.local_rank
            first_gpus = range((place + 1) * gpus_per_worker)
            elsewhere = {gpus.VISIBLE: ",".join(map(str, first_gpus))}
            told |= gpus.assigned(
                gpus_per_worker, place, os.environ if slot.host == here else elsewhere
            )
        processes.append(Process(str(slot.rank), tuple(command), told, slot.host))
    return Plan(processes, f"{first}:{rendezvous}")


@contextlib.contextmanager
def rendezvous(made: Plan, slots: Sequence[Slot]) -> Iterator[None]:
    """Runs the server on this host, within the block, by which Horovod's workers find each other.

    Raises:
        ClusterError: The port is in use.
    """
    if not horovod.installed():
        yield
        return
    check_free(made.rendezvous)
    with horovod.serving(slots, int(made.rendezvous.rpartition(":")[2])):
        yield
