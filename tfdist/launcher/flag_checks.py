"""Flags of `python -m tfdist.launch` that contradict each other, or do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdist.errors import REQUEUE, ConfigurationError

if TYPE_CHECKING:
    from tfdist.launcher.options import Options


#: What flags are where they are left out.
PORT, NAME, IMAGE = 12300, "tfdist", "tfdist:latest"


def check(options: Options) -> None:
    """Refuses flags that contradict each other, or would do nothing.

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
    if options.num_ps and options.gpus_per_worker > 1:
        raise ConfigurationError(
            f"--gpus-per-worker {options.gpus_per_worker} with --num-ps: a worker of parameter "
            "servers computes on one GPU. Use --gpus-per-worker 1 and as many workers as GPUs."
        )
    _check_restarts(options)
    _check_effect(options)


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


def _check_effect(options: Options) -> None:
    """Refuses flags that would do nothing."""
    prints = options.print_slurm or options.print_k8s is not None
    hands_over = options.via != "processes"
    of_no_effect = {
        "--port without --hosts: workers of this host get free ones": (
            options.port != PORT and not options.hosts
        ),
        "--gpus-per-worker with --via: its workers divide the GPUs that they see": (
            options.gpus_per_worker and hands_over and not prints
        ),
        "--cpus-per-worker without --print-slurm or --print-k8s": (
            options.cpus_per_worker and not prints
        ),
        "--name without --print-slurm or --print-k8s": options.name != NAME and not prints,
        "--image without --print-k8s": options.image != IMAGE and options.print_k8s is None,
    }
    for flag, is_one in of_no_effect.items():
        if is_one:
            name, _, why = flag.partition(" ")
            raise ConfigurationError(f"{name} has no effect {why}; leave it out.")
