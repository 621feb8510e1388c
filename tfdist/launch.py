"""`python -m tfdist.launch`: starts the workers of a run. Imports no TensorFlow."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist.cluster import discover
from tfdist.cluster.environments import slurm
from tfdist.cluster.launcher import manifests, mpirun, plan, processes
from tfdist.cluster.launcher.options import Options, parse
from tfdist.cluster.launcher.plan import Process
from tfdist.cluster.launcher.processes import Streams
from tfdist.cluster.launcher.restarts import Elastic, Failure, Restarts, run_with_restarts
from tfdist.cluster.messages import SECRET, secret_environ
from tfdist.cluster.networks import check_own_name, interface_towards
from tfdist.console import command, settings_file
from tfdist.console.settings_file import Setting
from tfdist.errors import ClusterError, ConfigurationError
from tfdist.strategies import STRATEGIES, current_name
from tfdist.strategies.mesh import parse as parse_mesh

_LOG = logging.getLogger("tfdist.launch")
#: Arguments by which interpreters read a program from standard input.
_INPUTS = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


@command.main
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code: 0; that of the first worker that failed; 1 for an error; 130 for an
        interrupt; `tfdist.errors.REQUEUE` if a scheduler preempted the run, which has saved a
        checkpoint.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    failure = launch(with_strategy(options))
    if failure is None:
        return 0
    print(str(failure) if failure.preempted else f"error: {failure}", file=sys.stderr)
    return failure.code


def launch(options: Options) -> Failure | None:
    """Starts the workers, or prints commands, scripts or manifests.

    Returns:
        The first failure, or None.

    Raises:
        TfdistError: The workers cannot be started.
    """
    _check_reads_no_input(options.command)
    if not (options.hosts or options.dry_run or options.print_slurm or options.print_k8s):
        outer = discover()
        if outer.size > 1 and not slurm.is_interactive(os.environ):
            raise ClusterError(
                f"{outer.source} started {outer.size} processes, and the launcher would start a "
                "separate run in each. Start the training command directly in each of them, "
                "without the launcher; or start the launcher in each with --hosts and --on."
            )
    if options.print_slurm:
        print(manifests.slurm(options.resuming), end="")
    elif options.print_k8s:
        print(manifests.kubernetes(options.resuming), end="")
    elif options.hosts and options.via == "processes" and not (options.on or options.dry_run):
        hosts = ",".join(f"{host}:{number}" for host, number in options.hosts.items())
        given = ["--hosts", hosts, "--port", str(options.port)]
        if options.gpus_per_worker:
            given += ["--gpus-per-worker", str(options.gpus_per_worker)]
        for host in options.hosts:
            line = [sys.executable, "-m", "tfdist.launch", *given, "--on", host, "--"]
            print(f"# on {host}\n{shlex.join([*line, *options.command])}")
    elif options.via == "ray":
        return _run_on_ray(options)
    elif options.elastic:
        return _run_elastic(options, Elastic(*options.elastic))
    else:
        restarts = Restarts(options.max_restarts)
        return run_with_restarts(lambda: _attempt(options, restarts), restarts)
    return None


def with_strategy(options: Options) -> Options:
    """Returns the options with the strategy, if the launcher can infer it.

    If neither a flag nor a configuration file of the training command sets a strategy or a mesh,
    `--strategy` is added. Other programs are not changed.

    Raises:
        ConfigurationError: Each worker would train separately, or a file or mesh is invalid.
    """
    found = _named(options)
    declared = STRATEGIES.get(current_name(found.strategy))
    by_tensorflow = "tensorflow" in settings_file.flag_values(found.command, "--process-group")[-1:]
    by_horovod = declared is not None and declared.by_horovod and not by_tensorflow
    return replace(found, by_horovod=by_horovod)


def _attempt(options: Options, restarts: Restarts) -> Failure | None:
    """Starts all processes on new ports; after a restart they resume from the newest checkpoint."""
    options = options.resuming if restarts.total else options
    if options.via != "processes":
        process, streams = mpirun.process(options), Streams(only=options.via)
        return _run([process], options, streams=streams)
    if options.num_ps:
        servers = plan.with_parameter_servers(
            options.command, options.num_workers, options.num_ps, options.gpus_per_worker
        )
        return _run(servers, options, restarts=restarts)
    return _run_workers(options)


def _run_on_ray(options: Options) -> Failure | None:
    """Runs the workers in a Ray cluster; with `--elastic`, as many as there are resources for."""
    from tfdist.ray.placement import Resources, connect

    connect()
    from tfdist.ray.workers import Job, run

    restarts = Restarts(options.max_restarts)
    resources = Resources(
        options.cpus_per_worker or 1,
        options.gpus_per_worker,
        options.placement,
        options.placement_timeout,
    )
    min_workers, max_workers = options.elastic or (options.num_workers, options.num_workers)

    def attempt() -> Failure | None:
        again = options.resuming if restarts.total else options
        job = Job(
            again.portable_command,
            resources,
            min_workers,
            max_workers,
            options.grace,
            again.by_horovod,
        )
        return run(job)

    return run_with_restarts(attempt, restarts)


def _run_elastic(options: Options, elastic: Elastic) -> Failure | None:
    """Runs a worker in each slot that is not excluded."""
    restarts = Restarts(options.max_restarts)

    def attempt() -> Failure | None:
        again = options.resuming if restarts.total else options
        included = replace(again, num_workers=len(elastic.slots))
        return _run_workers(included, elastic.slots, elastic.seconds)

    return run_with_restarts(attempt, restarts, elastic.note)


def _run(running: Sequence[Process], options: Options, **how: Any) -> Failure | None:
    if options.dry_run:
        for process in running:
            print(f"[{process.name}] {process.line()}")
        return None
    if options.on or not options.hosts:
        interpreter, *words = options.command
        script = next((word for word in words if word != "-u"), "-")
        is_python = re.fullmatch(r"python[\d.]*", Path(interpreter).name)
        if is_python and not script.startswith("-") and not Path(script).exists():
            raise ConfigurationError(
                f"{script}: there is no such script. Give its path from {Path.cwd()}."
            )
    # The launchers of several hosts cannot share a new secret, so users set one.
    secret = {} if options.on else secret_environ()
    return processes.run(running, grace=options.grace, environ=secret, **how)


def _check_reads_no_input(command: Sequence[str]) -> None:
    """Raises an error if an interpreter would read its program from standard input."""
    words = list(command)
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if "=" not in word]
    name = Path(words[0]).name if words else ""
    if re.fullmatch(r"python[\d.]*", name):
        has_program = _has_program(words[1:], _INPUTS, program="cmVh?", with_value="WX")
    elif re.fullmatch(r"(ba|da|k|z)?sh", name):
        has_program = _has_program(words[1:], {*_INPUTS, "-s"}, program="c", with_value="oO")
    else:
        return
    if not has_program:
        raise ConfigurationError(
            f"{shlex.join(command)!r} reads its program from standard input, which workers do not "
            "have. Save the program to a file, and give the path of the file."
        )


def _has_program(
    words: Sequence[str], inputs: Collection[str], program: str, with_value: str
) -> bool:
    """Returns whether the arguments of an interpreter name its program.

    Args:
        words: The arguments.
        inputs: Words that select standard input.
        program: The letters of options that are or replace a program, as in `python -m`.
        with_value: The letters of options that take the next word.
    """
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            if word in ("--version", "--help"):
                return True
        elif word in inputs:
            return False
        elif not word.startswith("-") or set(word) & set(program):
            return True
        elif word[-1] in with_value:
            next(rest, "")
    return False


def _run_workers(
    options: Options, gpu_slots: Sequence[int] = (), seconds: float | None = None
) -> Failure | None:
    """Runs the workers of this host, or prints the workers of all hosts.

    Args:
        options: The launcher's options.
        gpu_slots: By rank, the local rank whose GPUs a worker gets; empty: the worker's local rank.
        seconds: Time after which they are preempted; None: never.
    """
    if options.on and options.by_horovod and not options.dry_run:
        check_own_name(is_alone=len(options.hosts) == 1)
    slots = plan.slots(options.hosts or {plan.LOCAL: options.num_workers})
    planned = plan.workers(
        options.command,
        slots,
        ports=plan.ports_from(options.port, slots) if options.hosts else (),
        interface=interface_towards(slots[0].host) if options.on else "",
        gpus_per_worker=options.gpus_per_worker,
        gpu_slots=gpu_slots,
        here=options.on or plan.LOCAL,
    )
    if options.on and SECRET not in os.environ and not options.dry_run:
        _LOG.warning("Set %s to the same secret on all hosts to authenticate the workers.", SECRET)
    here = [process for process in planned.processes if options.on in (None, process.host)]
    if options.dry_run:
        return _run(here, options)
    serves = options.on in (None, slots[0].host)
    with plan.rendezvous(planned, slots) if serves else nullcontext():
        return _run(here, options, seconds=seconds)


def _named(options: Options) -> Options:
    flags = settings_file.flag_values(options.command, "--strategy")
    if not options.is_training_command:
        return replace(options, strategy=flags[-1] if flags else "")
    mesh = settings_file.flag_values(options.command, "--mesh")
    if mesh and not flags:
        groups = settings_file.flag_values(options.command, "--process-group")
        process_group = groups[-1] if groups else "auto"
        strategy = parse_mesh(mesh[-1]).strategy(process_group, options.num_workers)
        return replace(options, strategy=strategy)
    named = settings_file.setting(options.command, "strategy")
    if named is None and options.num_workers + options.num_ps > 1:
        suitable = _suitable(options)
        return replace(
            options, command=(*options.command, "--strategy", suitable), strategy=suitable
        )
    if named is None:
        return options
    _check(options, named)
    return replace(options, strategy=str(named.value))


def _suitable(options: Options) -> str:
    if options.num_ps:
        return "parameter_server"
    if options.via in ("mpirun", "horovodrun") or options.print_k8s == "mpijob":
        return "horovod"
    return "multi_worker"


def _check(options: Options, named: Setting) -> None:
    """Raises an error for several workers with a single-process strategy."""
    declared = STRATEGIES.get(current_name(str(named.value)))
    if declared is None or declared.supports_processes or options.num_workers + options.num_ps == 1:
        return
    by_flag = named.place == "--strategy"
    fix = "Remove the flag" if by_flag else f"Add --strategy {_suitable(options)}"
    raise ConfigurationError(
        f"{named.place} {named.value!r} is a single-process strategy: each of the "
        f"{options.num_workers} workers would train separately. {fix}, or train in one process "
        "with python -m tfdist.train."
    )


if __name__ == "__main__":
    sys.exit(main())
