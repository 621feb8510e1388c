"""The training process of a trial, and the metrics that it has reported so far."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.errors import ConfigurationError, did_you_mean
from tfdist.tools.runs import folders

_GRACE_SECONDS = 20.0


class TrialProcess:
    """A training run in a separate process.

    Args:
        command: Program and arguments.
        folder: The run folder; the output goes to the file `FOLDER.log` beside it.
        environ: Environment variables to add to those of this process.
    """

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._log = folder.with_name(f"{folder.name}.log")
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the search, which stops its trials
            )

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._popen.poll()

    def values(self, metric: str) -> dict[int, float]:
        """Returns the metric by epoch, counted from 1; NaN if it is not finite.

        Raises:
            ConfigurationError: The run does not report the metric.
        """
        values = {}
        for line in folders.read_epochs(self.folder):
            if metric not in line:
                metrics = [name for name in line if name not in folders.NOT_METRICS]
                raise ConfigurationError(
                    f"--metric {metric}: expected one of {', '.join(metrics)}."
                    f"{did_you_mean(metric, metrics)}"
                )
            value = line[metric]
            values[int(line["epoch"] or 0)] = math.nan if value is None else value
        return values

    def preempt(self) -> None:
        """Sends SIGTERM, so that the run saves a checkpoint and ends."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Waits for the process to end, and kills it after `_GRACE_SECONDS`."""
        try:
            self._popen.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def last_error(self) -> str:
        """Returns the last error in the output, and the path of the log file."""
        error = last_error(self._log.read_text(errors="replace"))
        return f"{error or f'exit code {self.code}'} ({self._log})"


def last_error(output: str) -> str:
    """Returns the last error of a program's output, or its last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")
