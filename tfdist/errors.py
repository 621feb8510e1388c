"""Exceptions of tfdist. Each message says what happened, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Exit code of a run that was preempted and has saved its state: run the same command again. It is
#: 128 plus the number of SIGUSR1. Kubeflow's training operator restarts pods with codes from 128.
REQUEUE = 138


class Preempted(KeyboardInterrupt, SystemExit):
    """Raised after a complete step when a scheduler takes the machine back (SIGTERM or SIGUSR1).

    It is a `KeyboardInterrupt`: code that handles Ctrl-C handles it too. A script that does not
    catch it exits with the code `REQUEUE`.
    """

    def __init__(self) -> None:
        SystemExit.__init__(self, REQUEUE)


class TfdistError(Exception):
    """Base class of the errors that users can fix. Commands print them without a traceback.

    Example:
        >>> try:
        ...     tfdist.Trainer(build_model, strategy="mirored")
        ... except tfdist.errors.TfdistError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        No strategy is called 'mirored'; choose one of ... Did you mean mirrored?
    """


class ConfigurationError(TfdistError, ValueError):
    """An option, or a combination of options, is invalid or not supported."""


class DeviceError(TfdistError, RuntimeError):
    """A device does not exist, or can no longer be created in this process."""


class OutOfMemoryError(DeviceError):
    """A step does not fit into the memory of its device."""


class DataError(TfdistError, ValueError):
    """The data do not fit the model, the batch size or the number of replicas."""


class UnsupportedModelError(TfdistError, TypeError):
    """A model that cannot be trained on several replicas with the results of one device."""


class MissingError(TfdistError, ImportError):
    """A library that an option needs is not installed."""


class NonFiniteError(TfdistError, ArithmeticError):
    """The loss became NaN or infinite."""


class ClusterError(TfdistError, RuntimeError):
    """The workers do not form a valid cluster, or cannot reach each other."""


class InstallError(TfdistError, RuntimeError):
    """An installation needs something that this machine does not have, or a build failed."""


class LaunchError(TfdistError, RuntimeError):
    """A process could not be started, or failed."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Returns a question for the end of a message, or an empty text if no known word is similar."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""
