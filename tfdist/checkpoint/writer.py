"""A thread that writes, so that training waits for the copy of its state only."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writer:
    """Runs one job at a time, in order; the next waits for the last."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        """Starts a job when the one before has ended.

        Raises:
            Exception: Of the one before.
        """
        self.wait()

        def run() -> None:
            try:
                job()
            except Exception as error:  # raised again where somebody hears of it
                self._error = error

        # Not a daemon: an interpreter that exits lets it end its file.
        self._thread = threading.Thread(target=run, name="tfdist checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the job under way.

        Raises:
            Exception: What it raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
