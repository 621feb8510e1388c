"""Exceptions of tfdist. Each message says what happened, why, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: Exit code of a run that was preempted and has saved its state: run the same command again. It is
#: 128 plus the number of SIGUSR1. Kubeflow's training operator restarts pods with codes from 128.
REQUEUE = 138
#: Number of letters from which a part of a word is a hint, and the most words of one hint.
_LEAST_PART, _MOST_WORDS = 3, 3


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
    """Returns a question for the end of a message, or an empty text if no known word is similar.

    Similar are words with few other letters (`miror`), words of which it is a part (`resnet50` of
    `imagenet_resnet50`), and words that it abbreviates (`--lr` for `--learning-rate`).
    """
    given, words = str(word), list(known)
    similar = difflib.get_close_matches(given, words, n=1, cutoff=0.7)
    if not similar:
        similar = [one for one in words if given.lstrip("-") == _initials(one)][:_MOST_WORDS]
    if not similar and len(given) >= _LEAST_PART:
        similar = [one for one in words if given in one][:_MOST_WORDS]
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def _initials(word: str) -> str:
    """Returns the initials of the parts of a flag or a name."""
    return "".join(part[:1] for part in re.split("[-_]", word))
