"""A worker that sends heartbeats without TensorFlow or training: FOLDER RANK FAULT VICTIM."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tfdist.cluster.watchdog.heartbeat import Heartbeat
from tfdist.cluster.watchdog.status import State

SIZE, SECONDS = 3, 4.0
_FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def main(folder: Path, rank: int, fault: str, victim: int) -> None:
    """Proceeds in step with the other workers until a fault occurs."""

    def barrier(point: str) -> None:
        """Waits for all workers, because a busy machine starts processes seconds apart."""
        (folder / f"{point}-{rank}").touch()
        while len(list(folder.glob(f"{point}-*"))) < SIZE:
            time.sleep(0.05)

    def broadcast(text: str) -> str:
        place = folder / "place"
        if rank == 0:
            (folder / "half").write_text(text)
            (folder / "half").rename(place)
        while not place.exists():
            time.sleep(0.05)
        return place.read_text()

    barrier("started")
    hosts = ["host.invalid", "127.0.0.1"]  # the first name does not resolve (RFC 6761)
    heartbeat = Heartbeat(rank, SIZE, broadcast, hosts)
    heartbeat.status.enter("fit", SECONDS)
    # Rank 0 receives reports of all ranks, the other ranks only of rank 0.
    while not (known := heartbeat.reports()) or any(r.state is State.UNKNOWN for r in known):
        time.sleep(0.05)
    barrier("heard")
    heartbeat.status.passed("step 7")
    heartbeat.send()
    if rank == victim:
        if number := _FAULTS.get(fault):
            os.kill(os.getpid(), number)
        if fault == "failing":
            heartbeat.leave(State.FAILED, "ValueError: cursed")
            return
        if fault == "leaving":
            heartbeat.leave(State.OUTSIDE)
            return
        time.sleep(3600)
    if fault == "failing":
        time.sleep(1)  # so that the victim's exit is reported first
    heartbeat.status.passed("step 7 and its callbacks")
    if fault == "leaving":
        for i in range(round(2 * SECONDS)):  # others do not wait for it
            heartbeat.status.passed(f"part {i} of the model saved")
            time.sleep(1)
        heartbeat.leave(State.OUTSIDE)
        return
    time.sleep(3600)  # a collective that never completes


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
