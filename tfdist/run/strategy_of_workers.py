"""Finds the strategy of launched workers: from their command line, or the one that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tfdist.console import settings_file
from tfdist.console.settings_file import Setting
from tfdist.errors import ConfigurationError
from tfdist.launcher.options import Options
from tfdist.strategies import STRATEGIES, current_name
from tfdist.strategies.mesh import parse as parse_mesh


def with_strategy(options: Options) -> Options:
    """Returns the options with the strategy, as far as the launcher can know it.

    If neither a flag nor a file of the training command names a strategy or a mesh, a flag is
    added. Other programs choose for themselves.

    Raises:
        ConfigurationError: Each worker would train alone, or a file or a mesh cannot be read.
    """
    found = _named(options)
    declared = STRATEGIES.get(current_name(found.strategy))
    by_tensorflow = "tensorflow" in _values(found.command, "--process-group")[-1:]
    by_horovod = declared is not None and declared.by_horovod and not by_tensorflow
    return replace(found, by_horovod=by_horovod)


def _named(options: Options) -> Options:
    """The same, without what follows from the name."""
    flags = _values(options.command, "--strategy")
    if not options.is_training_command:
        return replace(options, strategy=flags[-1] if flags else "")
    mesh = _values(options.command, "--mesh")
    if mesh and not flags:
        process_group = (_values(options.command, "--process-group") or ["auto"])[-1]
        strategy = parse_mesh(mesh[-1]).strategy(process_group, options.num_workers)
        return replace(options, strategy=strategy)
    named = Setting(flags[-1], "--strategy") if flags else _in_files(options.command)
    if named is None and options.num_workers + options.num_ps > 1:
        fitting = _fitting(options)
        return replace(options, command=(*options.command, "--strategy", fitting), strategy=fitting)
    if named is None:
        return options
    _check(options, named)
    return replace(options, strategy=str(named.value))


def _in_files(command: Sequence[str]) -> Setting | None:
    """Returns the strategy from the files of a command line; the last file has precedence."""
    # One that is not here may be where the workers are: they miss it otherwise.
    files = [path for path in map(Path, _values(command, "--config")) if path.exists()]
    found = [layer["strategy"] for layer in map(settings_file.read, files) if "strategy" in layer]
    return found[-1] if found else None


def _values(command: Sequence[str], flag: str) -> list[str]:
    """The values of a flag, given as `--flag value` or `--flag=value`."""
    values = []
    for word, following in zip(command, (*command[1:], ""), strict=True):
        name, is_one, value = word.partition("=")
        if name == flag:
            values.append(value if is_one else following)
    return values


def _fitting(options: Options) -> str:
    if options.num_ps:
        return "parameter_server"
    if options.via in ("mpirun", "horovodrun") or options.print_k8s == "mpijob":
        return "horovod"
    return "multi_worker"


def _check(options: Options, named: Setting) -> None:
    """Refuses several workers with a strategy that trains in one process."""
    declared = STRATEGIES.get(current_name(str(named.value)))
    if declared is None or declared.joins_processes or options.num_workers + options.num_ps == 1:
        return
    by_flag = named.place == "--strategy"
    cure = "leave it out" if by_flag else f"add --strategy {_fitting(options)}"
    raise ConfigurationError(
        f"{named.place} {named.value!r} would train in each of {options.num_workers} workers by "
        f"itself: {cure}, or train in one process with python -m tfdist.train."
    )
