"""Exceptions of tfdist. Each message says what happened, why, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: Exit code of a run that was preempted and has saved a checkpoint; running the same command again
#: resumes it. It is 128 plus the number of SIGUSR1. Kubeflow's training operator restarts pods that
#: exit with a code of at least 128.
REQUEUE = 138
#: Exit code of a run that was preempted before it had a checkpoint, so that running it again would
#: not continue it. It is 128 plus the number of SIGTERM.
TERMINATED = 143
#: Exit code of a process that did not fail itself, but needs one that is lost.
PEER_LOST = 75
#: Minimum number of letters to suggest words with this part, and maximum number of suggestions.
_MIN_PART, _MAX_WORDS = 3, 3


class Preempted(KeyboardInterrupt, SystemExit):
    """Raised after a complete step when the run is preempted (SIGTERM, SIGUSR1 or SIGHUP).

    It is a `KeyboardInterrupt`, so code that handles Ctrl-C handles it too. A script that does not
    catch it exits with the code `REQUEUE` if the trainer has saved a checkpoint, or resumed from
    one; otherwise with the code `TERMINATED`. A script that saves its state itself raises
    `SystemExit(tfdist.errors.REQUEUE)`.

    Example:
        >>> trainer = tfdist.Trainer(build_model)
        >>> try:
        ...     history = trainer.fit(x, y, verbose=0)
        ... except tfdist.errors.Preempted:
        ...     print("stopped after a complete step")  # and now save what the script needs
        ...     raise SystemExit(tfdist.errors.REQUEUE)

    Args:
        exit_code: The exit code.
    """

    def __init__(self, exit_code: int = REQUEUE) -> None:
        SystemExit.__init__(self, exit_code)
        self.exit_code = exit_code


def exit_code(returncode: int) -> int:
    """Returns the exit code of a process as in a shell: 128 plus the number of a signal.

    For a process that SIGUSR1 killed, it is `TERMINATED`, because 138 says that a run has saved.

    Example:
        >>> tfdist.errors.exit_code(-9)
        137

    Args:
        returncode: As of `subprocess.Popen`: negative for a signal.
    """
    code = returncode if returncode >= 0 else 128 - returncode
    return TERMINATED if code == REQUEUE and returncode < 0 else code


class TfdistError(Exception):
    """Base class of the errors that users can fix. Commands print them without a traceback.

    Example:
        >>> try:
        ...     tfdist.Trainer(build_model, strategy="mirored")
        ... except tfdist.errors.TfdistError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        There is no strategy 'mirored'. Choose one of ... Did you mean mirrored?

    Attributes:
        exit_code: The exit code of a command that ends with this error.
    """

    exit_code = 1


class ConfigurationError(TfdistError, ValueError):
    """An option, or a combination of options, is invalid or not supported.

    Example:
        >>> try:
        ...     tfdist.Trainer(build_model, accumulate=0)
        ... except tfdist.errors.ConfigurationError as error:
        ...     print(error)
        accumulate=0: expected an integer of at least 1.
    """


class DeviceError(TfdistError, RuntimeError):
    """A device does not exist, or can no longer be created in this process.

    Example:
        >>> try:
        ...     tfdist.Trainer(build_model, devices=0)
        ... except tfdist.errors.DeviceError as error:
        ...     print(error)
        devices=0: expected at least 1.
    """


class OutOfMemoryError(DeviceError):
    """A step does not fit into the memory of its device.

    Example:
        >>> trainer = tfdist.Trainer(build_model)
        >>> try:
        ...     history = trainer.fit(x, y, batch_size=512, verbose=0)
        ... except tfdist.errors.OutOfMemoryError as error:
        ...     print(error)  # suggests changes: a smaller batch, accumulate=, remat=
    """


class DataError(TfdistError, ValueError):
    """The data is incompatible with the model, the batch size or the number of replicas.

    Example:
        >>> try:
        ...     tfdist.Trainer(build_model).fit(x[:, :60], y, verbose=0)
        ... except tfdist.errors.DataError as error:
        ...     print(str(error).splitlines()[-1])
        Check the shapes of the inputs against the model, and of the labels against the loss.
    """


class UnsupportedModelError(TfdistError, TypeError):
    """The model cannot be trained on several replicas with single-device results.

    Example:
        >>> class Scaled(keras.Model):
        ...     def __init__(self, scale):
        ...         super().__init__()
        ...         self.dense, self.scale = keras.layers.Dense(10), scale
        ...
        ...     def call(self, inputs):
        ...         return self.dense(inputs * self.scale)
        >>> model = Scaled(np.ones(64))
        >>> model.compile("sgd", "mse")
        >>> try:
        ...     tfdist.Trainer(model)
        ... except tfdist.errors.UnsupportedModelError as error:
        ...     print(str(error).rpartition(": ")[2])
        pass a function that builds it instead of the model.
    """


class MissingError(TfdistError, ImportError):
    """A library that an option needs is not installed.

    Example:
        >>> try:
        ...     trainer = tfdist.Trainer(build_model, strategy="mirrored")
        ... except tfdist.errors.MissingError as error:  # for example with strategy="horovod"
        ...     print(error)  # names the library and the command that installs it
    """


class NonFiniteError(TfdistError, ArithmeticError):
    """The loss became NaN or infinite.

    Example:
        >>> try:
        ...     tfdist.Trainer(build_model).fit(x * np.nan, y, verbose=0)
        ... except tfdist.errors.NonFiniteError as error:
        ...     print(str(error).rpartition(". ")[2])
        2048 values of a batch are NaN or infinite: clean the data.
    """


class LossSpikeError(TfdistError, ArithmeticError):
    """The loss left the band of its recent values; see `callbacks.loss_spikes`.

    Example:
        >>> issubclass(tfdist.errors.LossSpikeError, tfdist.errors.TfdistError)
        True

    Attributes:
        steps: The first and the last of the steps that have this loss, from 1.
    """

    steps: tuple[int, int] = (0, 0)


class ClusterError(TfdistError, RuntimeError):
    """The workers do not form a valid cluster, or cannot reach each other.

    Example:
        >>> try:
        ...     tfdist.cluster.discover({"TF_CONFIG": '{"cluster": {}}'})
        ... except tfdist.errors.ClusterError as error:
        ...     print(str(error).partition(";")[0])
        TF_CONFIG: task: Field required
    """


class TooFewDevicesError(DeviceError, ClusterError):
    """A strategy needs more devices than this process has, or its workers more than their host.

    Example:
        >>> try:
        ...     tfdist.Trainer(build_model, strategy="tensor_parallel", devices=1)
        ... except tfdist.errors.TooFewDevicesError as error:
        ...     print(str(error)[:60])
        strategy 'tensor_parallel' splits layers over devices, but g
    """


class VerificationError(TfdistError, ArithmeticError):
    """The first step of a training does not give the numbers of plain Keras on one device.

    Example:
        >>> issubclass(tfdist.errors.VerificationError, ArithmeticError)  # see `Trainer.verify`
        True
    """


class InstallError(TfdistError, RuntimeError):
    """A requirement of an installation is missing on this machine, or a build failed.

    Example:
        >>> issubclass(tfdist.errors.InstallError, RuntimeError)
        True
    """


class LaunchError(TfdistError, RuntimeError):
    """A process could not be started, or failed.

    Example:
        >>> try:
        ...     tfdist.notebook_launch(tfdist.rank, num_workers=0)
        ... except tfdist.errors.LaunchError as error:
        ...     print(error)
        num_workers=0: expected at least 1.
    """


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message; the name of its type if it has no message.

    Example:
        >>> tfdist.errors.first_line(ValueError("two lines\nof text"))
        'two lines'
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__


def summary(error: BaseException) -> str:
    r"""Returns the type of an error and the first line of its message.

    Example:
        >>> tfdist.errors.summary(ValueError("two lines\nof text"))
        'ValueError: two lines'
    """
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Returns a suggestion to append to a message, or an empty text if no known word is similar.

    Similar words differ in few letters (`miror`), contain the word (`imagenet_resnet50` for
    `resnet50`), or are abbreviated by it (`--learning-rate` for `--lr`).
    """
    given, words = str(word), list(known)
    similar = difflib.get_close_matches(given, words, n=1, cutoff=0.7)
    if not similar:
        similar = [
            w
            for w in words
            if given.lstrip("-") == "".join(part[:1] for part in re.split("[-_]", w))
        ][:_MAX_WORDS]
    if not similar and len(given) >= _MIN_PART:
        similar = [w for w in words if given in w][:_MAX_WORDS]
    return f" Did you mean {' or '.join(similar)}?" if similar else ""
