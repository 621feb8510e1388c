"""`python -m tfdist.script train.py`: runs an unchanged Keras script on all devices."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tfdist import cluster
from tfdist.checkpoint.settings import Checkpoints
from tfdist.console import command, tracebacks
from tfdist.errors import ConfigurationError, TfdistError
from tfdist.loops import interrupts
from tfdist.script import Options
from tfdist.strategies import AUTO, STRATEGIES

_PROGRAM = "python -m tfdist.script"
_DESCRIPTION = (
    "Runs a Keras script that does not mention tfdist, and trains its models on several devices "
    "with the numbers of one device."
)
#: Words of a script that may act differently on each rank.
_KNOWS_RANK = re.compile(r"TF_CONFIG|task_id|task_type|cluster_resolver|is_chief")

_LEGACY = re.compile(r"TF_USE_LEGACY_KERAS|^\s*(?:import|from)\s+tf_keras\b", re.MULTILINE)
_IDLE = (
    "tfdist: nothing was distributed, because the script called no method such as fit of a Keras "
    "model. A loop over tf.GradientTape runs on one device, in every process alike."
)


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command, and returns its exit code: 0, or as `tfdist.console.command.run`."""
    values = command.parse(_parser(), arguments)
    path = Path(values.script)
    # Whether other processes, or this script after a restart, must draw the same numbers.
    values.repeats = cluster.started_together() is not None or values.checkpoints is not None
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: there is no such script. Give its path from {Path.cwd()}."
        )
    # Python draws an order of sets for each process; this process starts again with a fixed one.
    if values.repeats and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)
    with ExitStack() as stack:
        stack.enter_context(interrupts.preemption_raises())
        try:
            active = _prepare(values, path, stack)
            _execute(path, values.arguments)
            cluster.end()
            if not (active.left_to or active.num_trainers):
                print(_IDLE, file=sys.stderr)
        except TfdistError as error:
            if line := tracebacks.line_of(error):
                print(line, file=sys.stderr)
            raise


def _parser() -> Any:
    parser = command.parser(_PROGRAM, _DESCRIPTION)
    add = parser.add_argument
    add(
        "--strategy",
        choices=(AUTO, *STRATEGIES),
        default=AUTO,
        help="the strategy; auto: mirrored in one process, or what joins the processes of a "
        "launcher, or as a strategy of tf.distribute in the script says",
    )
    add("--devices", metavar="N", help="number of devices, or names like GPU:0,GPU:1; default: all")
    add("--accumulate", type=int, default=1, metavar="N", help="micro-batches per global batch")
    add("--sync-batch-norm", action="store_true", help="BatchNorm with moments of the global batch")
    add("--remat", default="none", metavar="LAYERS", help="none, all, or a regular expression")
    add("--precision", metavar="POLICY", help="dtype policy of the script's layers")
    add("--checkpoints", metavar="DIR", help="folder for the checkpoints of each fit")
    add("--checkpoint-every", default="epoch", metavar="N", help="epoch, a number of steps, or 10m")
    add("--resume", choices=("auto", "never"), default="never", help="resume from --checkpoints")
    add("--seed", type=int, metavar="N", help="with processes or --checkpoints, the default is 0")
    add("--fallback", action="store_true", help="train refused models on one device, and warn")
    add("--log-every", type=int | str, metavar="N", help="steps between rows of metrics-1.jsonl")
    add("--verify", metavar="WHEN", help="check steps with plain Keras: first (default), off, or N")
    add("script", metavar="SCRIPT", help="the script, followed by its own arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _prepare(values: Any, path: Path, stack: ExitStack) -> Any:
    """Installs what the script needs, before it runs, and returns the runner."""
    text = path.read_text(errors="replace")
    if _LEGACY.search(text) or os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ConfigurationError(
            f"{path} uses Keras 2 (tf_keras, TF_USE_LEGACY_KERAS), but tfdist distributes Keras 3. "
            "Run it with python, or move it to Keras 3: https://keras.io/guides/migrating_to_keras_3."
        )
    from tfdist import upstream

    upstream.check_backend()
    import keras

    from tfdist.loops.self_check import VARIABLE, checked_mode
    from tfdist.script import horovod, runner, tf_distribute
    from tfdist.upstream import tensorflow_runtime

    os.environ.setdefault(VARIABLE, "first")
    finder = horovod.Finder()
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)
    names = ("strategy", "accumulate", "sync_batch_norm", "remat", "fallback", "log_every")
    devices = values.devices
    if devices is not None:
        devices = int(devices) if devices.isdecimal() else devices.split(",")
    options = Options(
        **{name: vars(values)[name] for name in names},
        devices=devices,
        checkpoints=_checkpoints(values),
        verify=checked_mode(values.verify),
    )
    active = runner.start(options)
    stack.callback(runner.stop)
    if values.precision:
        keras.config.set_dtype_policy(values.precision)
    if values.seed is not None:
        keras.utils.set_random_seed(values.seed)
    if loop := tf_distribute.custom_loop(path):
        print(
            f"{loop}\nThis custom loop runs under TensorFlow's own strategy, as in plain python: "
            "tfdist distributes fit.",
            file=sys.stderr,
        )
        active.leave("a custom loop over tf.distribute")
        return active
    if re.search(r"^\s*(import|from)\s+horovod\b", text, re.M):
        active.leave("Horovod")
        return active
    active.script_knows_rank = bool(_KNOWS_RANK.search(text))
    if values.seed is None and values.repeats:
        keras.utils.set_random_seed(0)
    if not cluster.is_chief():
        nowhere = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115
        stack.enter_context(redirect_stdout(nowhere))
    # The script can configure devices and threads until TensorFlow's first operation.
    tensorflow_runtime.before_start(active.connect)
    if tensorflow_runtime.has_started():
        active.connect()
    return active


def _checkpoints(values: Any) -> Checkpoints | None:
    if values.checkpoints is None:
        if values.resume != "never":
            raise ConfigurationError(f"--resume {values.resume} needs --checkpoints DIR.")
        return None
    return Checkpoints(values.checkpoints, every=values.checkpoint_every, resume=values.resume)


def _execute(path: Path, arguments: Sequence[str]) -> None:
    """Runs the script as `python SCRIPT` does: as the module `__main__`, from its folder."""
    module = ModuleType("__main__")
    vars(module).update(__file__=str(path), __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    with suppress(ValueError):
        sys.path.remove(str(Path.cwd()))  # from `python -m`
    sys.path.insert(0, str(path.resolve().parent))
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, vars(module))


if __name__ == "__main__":
    sys.exit(main())
