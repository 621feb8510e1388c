"""A worker that beats but makes no steps, without TensorFlow: FOLDER RANK FAULT VICTIM."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tfdist.watchdog.heartbeat import Beats
from tfdist.watchdog.verdict import State

SIZE, SECONDS = 3, 4.0
_FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def main(folder: Path, rank: int, fault: str, victim: int) -> None:
    """Works in step with the others until something happens to one of them."""

    def share(text: str) -> str:
        place = folder / "place"
        if rank == 0:
            (folder / "half").write_text(text)
            (folder / "half").rename(place)
        while not place.exists():
            time.sleep(0.05)
        return place.read_text()

    beats = Beats(rank, SIZE, share, ["203.0.113.1", "127.0.0.1"])  # the first leads nowhere
    beats.pulse.enter("fit", SECONDS)
    while not (known := beats.rows()) or any(row.state is State.UNHEARD for row in known):
        time.sleep(0.05)
    beats.pulse.move("step 7")
    beats.tell()
    if rank == victim:
        if number := _FAULTS.get(fault):
            os.kill(os.getpid(), number)
        if fault == "failing":
            beats.pulse.leave(State.FAILED, "ValueError: cursed")
            beats.tell()
            return
        if fault == "leaving":
            beats.pulse.leave(State.OUTSIDE)
            beats.tell()
            return
        time.sleep(3600)
    beats.pulse.move("step 7 and its callbacks")
    if fault == "leaving":
        for i in range(round(2 * SECONDS)):  # nobody waits for who is done
            beats.pulse.move(f"part {i} of the model saved")
            time.sleep(1)
        beats.pulse.leave(State.OUTSIDE)
        beats.tell()
        return
    time.sleep(3600)  # the exchange that never ends


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
