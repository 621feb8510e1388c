"""`python -m tfdist.launch`: starts the workers of a run. Imports no TensorFlow."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from tfdist.cluster.networks import interface_towards
from tfdist.console import command
from tfdist.launcher import flags, group, horovod, kubernetes, mpirun, plan, slurm, workers
from tfdist.launcher.child import Failure, Streams
from tfdist.launcher.elastic import Elastic
from tfdist.launcher.options import Options
from tfdist.launcher.plan import Process
from tfdist.launcher.restarts import Restarts, supervised
from tfdist.run.strategy_of_workers import with_strategy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code: 0; that of the first worker that failed; 1 for an error; 130 for an
        interrupt; `tfdist.errors.REQUEUE` where a scheduler wanted its machine back, and all was
        saved.
    """

    def parse_and_launch() -> int:
        chosen = flags.parse(sys.argv[1:] if arguments is None else arguments)
        failure = launch(with_strategy(chosen))
        if failure is None:
            return 0
        print(str(failure) if failure.preempted else f"error: {failure}", file=sys.stderr)
        return failure.code

    return command.run(parse_and_launch)


def launch(chosen: Options) -> Failure | None:
    """Starts what the options say, or prints it.

    Returns:
        The first failure, or None.

    Raises:
        TfdistError: It cannot be started.
    """
    if chosen.print_slurm:
        print(slurm.script(chosen.going_on), end="")
    elif chosen.print_k8s:
        print(kubernetes.manifest(chosen.going_on), end="")
    elif chosen.hosts and chosen.via == "processes" and chosen.on is None and not chosen.dry_run:
        _print_for_each_host(chosen)
    elif chosen.elastic:
        return _run_elastic(chosen, Elastic(*chosen.elastic))
    else:
        restarts = Restarts(chosen.max_restarts)
        return supervised(lambda: _attempt(chosen, restarts), restarts)
    return None


def _attempt(chosen: Options, restarts: Restarts) -> Failure | None:
    """Starts all processes, on ports of their own, from the newest checkpoint after a restart."""
    chosen = chosen.going_on if restarts.made else chosen
    if chosen.via != "processes":
        process, streams = mpirun.process(chosen), Streams(only=chosen.via)
        return _run([process], chosen, streams=streams)
    if chosen.num_ps:
        servers = plan.with_servers(
            chosen.command, chosen.num_workers, chosen.num_ps, chosen.gpus_per_worker
        )
        return _run(servers, chosen, restarts=restarts)
    return _run_workers(chosen)


def _run_elastic(chosen: Options, elastic: Elastic) -> Failure | None:
    """Runs as many workers as there are places in order."""
    restarts = Restarts(chosen.max_restarts)

    def attempt() -> Failure | None:
        again = chosen.going_on if restarts.made else chosen
        fewer = replace(again, num_workers=len(elastic.places))
        return _run_workers(fewer, elastic.places, elastic.seconds)

    return supervised(attempt, restarts, elastic.note)


def _run(processes: Sequence[Process], chosen: Options, **options: Any) -> Failure | None:
    if chosen.dry_run:
        for process in processes:
            print(f"[{process.name}] {process.line()}")
        return None
    return group.run(processes, grace=chosen.grace, **options)


def _run_workers(
    chosen: Options, places: Sequence[int] = (), seconds: float | None = None
) -> Failure | None:
    """Runs the workers of this host, or of all hosts where they are only shown.

    Args:
        chosen: Says how many.
        places: Of each worker on this host; empty: its number there.
        seconds: After which they are preempted.
    """
    if chosen.on and chosen.by_horovod and not chosen.dry_run:
        horovod.check_host_name()
    slots = plan.slots(chosen.hosts or {plan.LOCAL: chosen.num_workers})
    made = workers.plan(
        chosen.command,
        slots,
        first_port=chosen.port if chosen.hosts else None,
        interface=interface_towards(slots[0].host) if chosen.on else "",
        gpus_per_worker=chosen.gpus_per_worker,
        places=places,
        here=chosen.on or plan.LOCAL,
    )
    here = [process for process in made.processes if chosen.on in (None, process.host)]
    if chosen.dry_run:
        return _run(here, chosen)
    with workers.rendezvous(made, slots) if chosen.on in (None, slots[0].host) else nullcontext():
        return _run(here, chosen, seconds=seconds)


def _print_for_each_host(chosen: Options) -> None:
    """What the user has to type where."""
    hosts = ",".join(f"{host}:{number}" for host, number in chosen.hosts.items())
    given = ["--hosts", hosts, "--port", str(chosen.port)]
    if chosen.gpus_per_worker:
        given += ["--gpus-per-worker", str(chosen.gpus_per_worker)]
    for host in chosen.hosts:
        line = [sys.executable, "-m", "tfdist.launch", *given, "--on", host, "--", *chosen.command]
        print(f"# on {host}\n{shlex.join(line)}")


if __name__ == "__main__":
    sys.exit(main())
