"""The command line of `python -m tfdist.launch`: flags, their checks, and the command to run."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tfdist.errors import REQUEUE, ConfigurationError
from tfdist.launcher.plan import parse_hosts

PROGRAM = "python -m tfdist.launch"
_USAGE = (
    f"{PROGRAM} [flags] SCRIPT.py ...\n       {PROGRAM} [flags] -- COMMAND ...\n"
    f"       {PROGRAM} [flags] [flags of tfdist.train]"
)
_DESCRIPTION = "Start the workers of a run, and end all of them when one fails."
#: Defaults of flags.
_PORT, _NAME = 12300, "tfdist"
_PLACEMENT_SECONDS = 300
_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Becomes part of the host names of pods, which have at most 63 characters.
_KUBERNETES_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


@dataclass(frozen=True)
class Options:
    """The flags, as their help texts describe them, and the command to run."""

    command: tuple[str, ...]
    num_workers: int
    num_ps: int
    via: str
    gpus_per_worker: int
    hosts: dict[str, int]
    on: str | None
    port: int
    grace: int
    max_restarts: int
    elastic: tuple[int, int] | None
    dry_run: bool
    print_slurm: bool
    print_k8s: str | None
    name: str
    image: str | None
    cpus_per_worker: int | None
    placement: str = "PACK"
    placement_timeout: int = _PLACEMENT_SECONDS
    #: Strategy of the training command, as far as `tfdist.launch` can tell.
    strategy: str = ""
    #: Whether Horovod connects the processes of that strategy.
    by_horovod: bool = False

    @property
    def portable_command(self) -> tuple[str, ...]:
        """The command for another machine or image, which has a Python of its own."""
        program, *arguments = self.command
        return ("python" if program == sys.executable else program, *arguments)

    @property
    def by_ray(self) -> bool:
        """Whether Ray places the workers, now or in the manifest that is printed."""
        via_ray = self.via == "ray" and self.print_k8s in (None, "auto") and not self.print_slurm
        return via_ray or self.print_k8s == "rayjob"

    @property
    def is_training_command(self) -> bool:
        """Whether the command is `python -m tfdist.train`."""
        return self.command[1:3] == ("-m", "tfdist.train")

    @property
    def resuming(self) -> Options:
        """The same options; a training command without `--resume` gets `--resume auto`."""
        has_flag = any(word.partition("=")[0] == "--resume" for word in self.command)
        if not self.is_training_command or has_flag:
            return self
        return replace(self, command=(*self.command, "--resume", "auto"))


def parse(arguments: Sequence[str]) -> Options:
    """Returns the options of a command line; `--help` prints and exits.

    Raises:
        ConfigurationError: A flag is invalid, or flags contradict each other.
    """
    arguments = list(arguments)
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        importlib.import_module("argcomplete").autocomplete(parser)
    known, command = _divided(parser, arguments)
    flags = vars(known)
    flags["hosts"] = parse_hosts(known.hosts) if known.hosts else {}
    most = known.elastic[1] if known.elastic else 0
    flags["num_workers"] = known.num_workers or sum(flags["hosts"].values()) or most or 2
    flags["command"] = (sys.executable, *command) if _is_script(command[0]) else tuple(command)
    options = Options(**flags)
    _check(options)
    return options


def _divided(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Divides a command line into the launcher's flags and the command to run.

    The command follows `--`, or begins with the first word that is neither a flag nor its value,
    as with torchrun. Without one, the flags that the launcher does not know are those of
    `python -m tfdist.train`.

    Raises:
        ConfigurationError: A flag is invalid, or there is no command after `--`.
    """
    if "--" in arguments:
        at = arguments.index("--")
        known, rest = parser.parse_known_args(arguments[:at])
        if rest or not arguments[at + 1 :]:
            wrong = f"{' '.join(rest)!r} before --" if rest else "nothing after --"
            raise ConfigurationError(f"{wrong}: expected {PROGRAM} [flags] -- COMMAND ...")
        return known, arguments[at + 1 :]
    with_command = _parser()
    with_command.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    known, rest = with_command.parse_known_args(arguments)
    command = vars(known).pop("command")
    if command and not rest:
        return known, command
    known, rest = parser.parse_known_args(arguments)
    for word, before in zip(rest, ["", *rest], strict=False):
        if _is_script(word) and not before.startswith("-"):
            raise ConfigurationError(
                f"{word}: put the flags of the script after it, and only flags of the launcher "
                f"before it: {PROGRAM} [flags] {word} ..."
            )
    return known, [sys.executable, "-m", "tfdist.train", *rest]


def _is_script(word: str) -> bool:
    return word.endswith(".py")


class _Parser(argparse.ArgumentParser):
    """Reports an error as every command of tfdist does: one line, and exit code 1."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}\n{PROGRAM} --help lists the flags.")


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not _natural(text):
        raise argparse.ArgumentTypeError("expected a number of at least 1, got '0'")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    if not (fewest.isdecimal() and most.isdecimal() and 0 < int(fewest) <= int(most)):
        raise argparse.ArgumentTypeError(f"expected numbers of workers like 2:4, got {text!r}")
    return int(fewest), int(most)


def _parser() -> argparse.ArgumentParser:
    """Returns the parser; it leaves unknown flags to the training command."""
    flags = _Parser(prog=PROGRAM, usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    _add_processes(flags.add_argument_group("Processes").add_argument)
    _add_ends(flags.add_argument_group("Failures and preemptions").add_argument)
    _add_printed(flags.add_argument_group("Print instead of starting").add_argument)
    return flags


def _add_processes(add: Callable[..., Any]) -> None:
    add(
        "--num-workers",
        type=_positive,
        metavar="N",
        help="number of workers (2, or the sum of --hosts)",
    )
    add(
        "--num-ps",
        type=_natural,
        default=0,
        metavar="N",
        help="number of parameter servers; a chief process is started in addition (0)",
    )
    add(
        "--via",
        choices=("processes", "mpirun", "horovodrun", "ray"),
        default="processes",
        help="what starts the workers: this program (with TF_CONFIG and Horovod's Gloo), mpirun, "
        "horovodrun, or actors of a Ray cluster (processes)",
    )
    add(
        "--gpus-per-worker",
        type=_natural,
        default=0,
        metavar="N",
        help="GPUs that each worker sees; 0: all, divided among the workers of a host; with --via "
        "ray none (0)",
    )
    add(
        "--cpus-per-worker",
        type=_positive,
        metavar="N",
        help="CPU cores to reserve for each worker, for Ray, Slurm and Kubernetes (Ray: 1)",
    )
    add(
        "--placement",
        choices=_PLACEMENTS,
        default="PACK",
        help="with --via ray: workers on few nodes, or on many; STRICT: on one, or one each (PACK)",
    )
    add(
        "--placement-timeout",
        type=_natural,
        default=_PLACEMENT_SECONDS,
        metavar="SECONDS",
        help=f"with --via ray: time to wait for the workers' resources ({_PLACEMENT_SECONDS})",
    )
    add(
        "--hosts",
        metavar="a:2,b:2",
        help="hosts and their numbers of workers; prints the command to run on each host",
    )
    add("--on", metavar="HOST", help="start the workers of this one of --hosts here")
    add(
        "--port",
        type=_positive,
        default=_PORT,
        metavar="N",
        help=f"first port on each of --hosts ({_PORT})",
    )


def _add_ends(add: Callable[..., Any]) -> None:
    add(
        "--grace",
        type=_positive,
        default=15,
        metavar="SECONDS",
        help="time to save and exit after Ctrl-C or a preemption (15)",
    )
    add(
        "--max-restarts",
        type=_natural,
        default=0,
        metavar="N",
        help="restart all workers from the newest checkpoint after up to N failures (0)",
    )
    add(
        "--elastic",
        type=_range,
        metavar="MIN:MAX",
        help="continue without a worker that keeps failing; the global batch stays the same",
    )


def _add_printed(add: Callable[..., Any]) -> None:
    add("--dry-run", action="store_true", help="print the commands and their variables")
    add("--print-slurm", action="store_true", help="print a script for sbatch")
    add(
        "--print-k8s",
        nargs="?",
        const="auto",
        choices=("auto", "tfjob", "mpijob", "trainjob", "rayjob"),
        help="print a Kubernetes manifest; auto: rayjob for --via ray, mpijob for --strategy "
        "horovod or --via mpirun, else tfjob",
    )
    add("--name", default=_NAME, metavar="NAME", help=f"name of the job ({_NAME})")
    add("--image", metavar="IMAGE", help="image of the pods (a placeholder to fill in)")


def _check(options: Options) -> None:
    """Refuses flags that contradict each other or would have no effect.

    Raises:
        ConfigurationError: They do.
    """
    slots = sum(options.hosts.values())
    if slots and slots != options.num_workers:
        raise ConfigurationError(
            f"--hosts has {slots} workers, but --num-workers is {options.num_workers}: leave out "
            "--num-workers."
        )
    if options.on is not None and options.on not in options.hosts:
        raise ConfigurationError(
            f"--on {options.on}: expected one of --hosts ({', '.join(options.hosts) or 'none'})."
        )
    if options.num_ps and (options.hosts or options.print_slurm or options.via != "processes"):
        raise ConfigurationError(
            "--num-ps starts processes on this host, or works with --print-k8s. Elsewhere, set "
            "TF_CONFIG for each process."
        )
    if options.num_ps and options.gpus_per_worker > 1:
        raise ConfigurationError(
            f"--gpus-per-worker {options.gpus_per_worker} with --num-ps: a worker of parameter "
            "servers computes on one GPU. Use --gpus-per-worker 1 and as many workers as GPUs."
        )
    _check_names(options)
    _check_restarts(options)
    _check_effect(options)


def _check_names(options: Options) -> None:
    """Refuses names that could change the script or manifest in which they are written."""
    if not _JOB_NAME.fullmatch(options.name) or (
        options.print_k8s and not _KUBERNETES_NAME.fullmatch(options.name)
    ):
        raise ConfigurationError(
            f"--name {options.name!r}: expected letters, digits, '-', '_' and '.'; for Kubernetes "
            "at most 40 lowercase letters, digits and '-', beginning with a letter."
        )
    if options.image is not None and not _IMAGE_NAME.fullmatch(options.image):
        raise ConfigurationError(
            f"--image {options.image!r}: expected the name of an image, as in "
            "registry.example.com/team/tfdist:1.0."
        )


def _check_restarts(options: Options) -> None:
    """Refuses restarts of workers that this program does not start."""
    elsewhere = options.hosts and options.via == "processes" and not options.print_slurm
    if options.max_restarts and (elsewhere or options.print_k8s in ("tfjob", "trainjob")):
        raise ConfigurationError(
            "--max-restarts works on this host, with --via, with --print-slurm and with an mpijob. "
            "Here the launcher of one host cannot restart the workers of the others: let the "
            f"scheduler restart all of them with the same command. A preempted run exits with "
            f"{REQUEUE}."
        )
    if not options.elastic:
        return
    if options.elastic[1] != options.num_workers:
        raise ConfigurationError(
            f"--elastic allows up to {options.elastic[1]} workers, but --num-workers is "
            f"{options.num_workers}: leave out --num-workers."
        )
    starts_here = options.via == "processes" and not options.hosts and not options.num_ps
    prints = options.print_slurm or options.print_k8s
    if not options.max_restarts or not (options.by_ray or (starts_here and not prints)):
        raise ConfigurationError(
            "--elastic needs --max-restarts, and works only for workers that this program starts "
            "on this host or in a Ray cluster. Elsewhere, run the same command with another number "
            "of workers: it resumes from the newest checkpoint with the same global batches."
        )


def _check_effect(options: Options) -> None:
    """Refuses flags that would have no effect."""
    prints = options.print_slurm or options.print_k8s is not None
    hands_over = options.via not in ("processes", "ray")
    without_effect = {
        "--port without --hosts: workers of this host get free ports": (
            options.port != _PORT and not options.hosts
        ),
        "--gpus-per-worker with --via: the workers divide the GPUs that they see": (
            options.gpus_per_worker and hands_over and not prints
        ),
        "--cpus-per-worker without --via ray, --print-slurm or --print-k8s": (
            options.cpus_per_worker and not prints and not options.by_ray
        ),
        "--placement without --via ray": options.placement != "PACK" and not options.by_ray,
        "--placement-timeout without --via ray": (
            options.placement_timeout != _PLACEMENT_SECONDS and not options.by_ray
        ),
        "--hosts with --via ray: Ray chooses the nodes": options.hosts and options.by_ray,
        "--dry-run with --via ray: Ray chooses the nodes when the run starts": (
            options.dry_run and options.by_ray
        ),
        "--name without --print-slurm or --print-k8s": options.name != _NAME and not prints,
        "--image without --print-k8s": options.image and options.print_k8s is None,
    }
    for flag, is_given in without_effect.items():
        if is_given:
            name, _, why = flag.partition(" ")
            raise ConfigurationError(f"{name} has no effect {why}; leave it out.")
