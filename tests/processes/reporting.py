"""A worker that reports but makes no steps, without TensorFlow: FOLDER RANK FAULT VICTIM."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tfdist.watchdog.heartbeat import Heartbeat
from tfdist.watchdog.status import State

SIZE, SECONDS = 3, 4.0
_FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def main(folder: Path, rank: int, fault: str, victim: int) -> None:
    """Works in step with the others until something happens to one of them."""

    def come_to(point: str) -> None:
        """Waits for all to come: a busy machine starts processes seconds apart."""
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

    come_to("started")
    hosts = ["203.0.113.1", "127.0.0.1"]  # the first leads nowhere
    heartbeat = Heartbeat(rank, SIZE, broadcast, hosts)
    heartbeat.status.enter("fit", SECONDS)
    # Rank 0 hears all the others; these hear rank 0.
    while not (known := heartbeat.reports()) or any(r.state is State.UNHEARD for r in known):
        time.sleep(0.05)
    come_to("heard")
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
        time.sleep(1)  # its end is what is over first
    heartbeat.status.passed("step 7 and its callbacks")
    if fault == "leaving":
        for i in range(round(2 * SECONDS)):  # nobody waits for who is done
            heartbeat.status.passed(f"part {i} of the model saved")
            time.sleep(1)
        heartbeat.leave(State.OUTSIDE)
        return
    time.sleep(3600)  # the exchange that never ends


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
