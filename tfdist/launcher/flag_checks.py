"""Flags of `python -m tfdist.launch` that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdist.errors import REQUEUE, ConfigurationError

if TYPE_CHECKING:
    from tfdist.launcher.flags import Options


def check(options: Options) -> None:
    """Refuses flags that contradict each other.

    Raises:
        ConfigurationError: They do.
    """
    slots = sum(options.hosts.values())
    if slots and slots != options.num_workers:
        raise ConfigurationError(
            f"--hosts has places for {slots} workers, --num-workers is {options.num_workers}: "
            "leave --num-workers out."
        )
    if options.on is not None and options.on not in options.hosts:
        raise ConfigurationError(
            f"--on {options.on}: expected one of --hosts ({', '.join(options.hosts) or 'none'})."
        )
    if options.num_ps and (options.hosts or options.print_slurm or options.via != "processes"):
        raise ConfigurationError(
            "--num-ps is for processes of this host, and for --print-k8s: elsewhere set TF_CONFIG "
            "of each process."
        )
    _check_restarts(options)


def _check_restarts(options: Options) -> None:
    """Refuses restarts where somebody else starts the workers."""
    elsewhere = options.hosts and options.via == "processes" and not options.print_slurm
    if options.max_restarts and (elsewhere or options.print_k8s in ("tfjob", "trainjob")):
        raise ConfigurationError(
            "--max-restarts is for workers of this host, --via, --print-slurm and an mpijob: one "
            "launcher alone cannot start those of other hosts again. Let the scheduler start all "
            f"of them again with the same command; what was preempted ends with {REQUEUE}."
        )
    if not options.elastic:
        return
    if options.elastic[1] != options.num_workers:
        raise ConfigurationError(
            f"--elastic has places for {options.elastic[1]} workers, --num-workers is "
            f"{options.num_workers}: leave --num-workers out."
        )
    others = options.hosts or options.num_ps or options.via != "processes"
    if others or options.print_slurm or options.print_k8s or not options.max_restarts:
        raise ConfigurationError(
            "--elastic is for workers of this host that this program starts, with --max-restarts. "
            "Elsewhere start the same command with another number of workers: it goes on from the "
            "newest checkpoint, with the same global batches."
        )
