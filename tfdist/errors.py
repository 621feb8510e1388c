"""What tfdist raises: each message says what was expected, what came, and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: The exit code by which a run asks to be started again with the same command: it was preempted,
#: and has saved what it had. 128 and the number of SIGUSR1, as a process has it that dies of that
#: signal; Kubeflow's training operator restarts what ends with 128 or more.
REQUEUE = 138


class Preempted(KeyboardInterrupt, SystemExit):
    """A scheduler wants the machine back (SIGTERM, SIGUSR1): the run stopped after a whole step.

    Whoever minds a KeyboardInterrupt minds this; a script that minds neither ends with `REQUEUE`.
    """

    def __init__(self) -> None:
        SystemExit.__init__(self, REQUEUE)


class TfdistError(Exception):
    """Base of all errors that a user of tfdist can mend; commands print it without a traceback."""


class ConfigurationError(TfdistError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""


class DeviceError(TfdistError, RuntimeError):
    """A device that does not exist, or cannot be made any more in this process."""


class OutOfMemoryError(DeviceError):
    """A step that finds no room on its device."""


class DataError(TfdistError, ValueError):
    """Data that does not fit the model, the batch size or the number of replicas."""


class UnsupportedModelError(TfdistError, TypeError):
    """A model that several replicas cannot train to the numbers of one device."""


class MissingError(TfdistError, ImportError):
    """A library that is not installed and that an option needs."""


class NonFiniteError(TfdistError, ArithmeticError):
    """A loss that is NaN or infinite where training starts."""


class ClusterError(TfdistError, RuntimeError):
    """Workers that do not add up to one cluster, or do not find each other."""


class InstallError(TfdistError, RuntimeError):
    """Something that an installation needs is not on this machine, or a build failed."""


class LaunchError(TfdistError, RuntimeError):
    """A process that cannot be started, or that failed."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Returns a question for the end of a message, or nothing where no known word is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""
