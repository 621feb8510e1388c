"""The command line of `python -m tfdist.launch`: flags, their checks, and the command to run."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from tfdist.cluster.launcher.plan import parse_hosts
from tfdist.errors import REQUEUE, ConfigurationError, did_you_mean

PROGRAM = "python -m tfdist.launch"
_USAGE = (
    f"{PROGRAM} [flags] SCRIPT.py ...\n       {PROGRAM} [flags] -- COMMAND ...\n"
    f"       {PROGRAM} [flags] [flags of tfdist.train]"
)
_DESCRIPTION = "Starts the workers of a run, and terminates all of them when one fails."
#: Defaults of flags.
_PORT, _NAME = 12300, "tfdist"
_PLACEMENT_SECONDS = 300
_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

#: The module that distributes a script that does not mention tfdist.
SCRIPT_MODULE = "tfdist.script"
_IMPORTS_KERAS = re.compile(r"^\s*(?:from|import)\s.*\b(?:keras|tensorflow)\b", re.MULTILINE)

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Part of the host names of pods, which have at most 63 characters.
_KUBERNETES_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


@dataclass(frozen=True)
class Options:
    """The values of the flags, and the command to run."""

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
    #: Strategy of the training command, if `tfdist.launch` can infer it.
    strategy: str = ""
    #: Whether that strategy uses Horovod.
    by_horovod: bool = False

    @property
    def portable_command(self) -> tuple[str, ...]:
        """The command for another machine or image, whose interpreter is at another path."""
        program, *arguments = self.command
        return ("python" if program == sys.executable else program, *arguments)

    @property
    def by_ray(self) -> bool:
        """Whether Ray places the workers, in this run or in the printed manifest."""
        via_ray = self.via == "ray" and self.print_k8s in (None, "auto") and not self.print_slurm
        return via_ray or self.print_k8s == "rayjob"

    @property
    def is_training_command(self) -> bool:
        """Whether the command is `python -m tfdist.train`."""
        return self.command[1:3] == ("-m", "tfdist.train")

    @property
    def resuming(self) -> Options:
        """The same options, with `--resume auto` for a training command without `--resume`.

        Also for `tfdist.script` with `--checkpoints`.
        """
        flags = {word.partition("=")[0] for word in self.command}
        if self.command[1:3] == ("-m", SCRIPT_MODULE) and "--checkpoints" in flags:
            return replace(self, command=(*self.command[:3], "--resume", "auto", *self.command[3:]))
        if not self.is_training_command or "--resume" in flags:
            return self
        return replace(self, command=(*self.command, "--resume", "auto"))


def parse(arguments: Sequence[str]) -> Options:
    """Returns the options of a command line; `--help` prints and exits.

    Raises:
        ConfigurationError: A flag is invalid, or flags contradict each other.
    """
    arguments = list(arguments)
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # called for shell completion
        importlib.import_module("argcomplete").autocomplete(parser)
    namespace, command = _split_command(parser, arguments)
    flags = vars(namespace)
    flags["hosts"] = parse_hosts(namespace.hosts) if namespace.hosts else {}
    most = namespace.elastic[1] if namespace.elastic else 0
    flags["num_workers"] = namespace.num_workers or sum(flags["hosts"].values()) or most or 2
    flags["command"] = _started(command)
    options = Options(**flags)
    _check(options)
    return options


def _started(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the program and the arguments that each worker runs.

    A script runs with Python; with `tfdist.script` if it imports Keras or TensorFlow and does not
    mention tfdist. Any other command, such as `-- python SCRIPT.py`, stays as it is.
    """
    if not _is_script(command[0]):
        return tuple(command)
    path = Path(command[0])
    text = path.read_text(errors="replace") if path.is_file() else ""
    if _IMPORTS_KERAS.search(text) and not re.search(r"\btfdist\b", text):
        return (sys.executable, "-m", SCRIPT_MODULE, *command)
    return (sys.executable, *command)


def _split_command(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Splits a command line into the launcher's flags and the command to run.

    The command follows `--`, or starts with the first word that is neither a flag nor its value,
    as with torchrun. Without a command, the launcher runs `python -m tfdist.train` with all flags
    that are not its own.
    """
    with_command = _parser()
    with_command.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if "--" in arguments:
        separator = arguments.index("--")
        namespace, unknown = with_command.parse_known_args(arguments[:separator])
        command = vars(namespace).pop("command")
        if command and not unknown and _is_script(command[0]):  # `--` is an argument of the script
            return namespace, command + arguments[separator:]
        namespace, unknown = parser.parse_known_args(arguments[:separator])
        if unknown or not arguments[separator + 1 :]:
            problem = (
                f"unknown {' '.join(unknown)!r} before --" if unknown else "no command after --"
            )
            raise ConfigurationError(f"{problem}: expected {PROGRAM} [flags] -- COMMAND ...")
        return namespace, arguments[separator + 1 :]
    namespace, unknown = with_command.parse_known_args(arguments)
    command = vars(namespace).pop("command")
    if command and not unknown:
        return namespace, command
    namespace, unknown = parser.parse_known_args(arguments)
    for word, before in zip(unknown, ["", *unknown], strict=False):
        if _is_script(word) and not before.startswith("-"):
            flags = re.findall(r"--[a-z0-9-]+", parser.format_help())
            raise ConfigurationError(
                f"{word}: put the flags of the script after it, and only flags of the launcher "
                f"before it: {PROGRAM} [flags] {word} ..."
                f"{did_you_mean(unknown[0].partition('=')[0], flags)}"
            )
    return namespace, [sys.executable, "-m", "tfdist.train", *unknown]


def _is_script(word: str) -> bool:
    return word.endswith(".py")


class _Parser(argparse.ArgumentParser):
    """Raises errors as `ConfigurationError`, like the parsers of the other commands."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}\n{PROGRAM} --help lists the flags.")


def _non_negative_int(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return int(text)


def _positive_int(text: str) -> int:
    if not _non_negative_int(text):
        raise argparse.ArgumentTypeError("expected a number of at least 1, got '0'")
    return int(text)


def _worker_range(text: str) -> tuple[int, int]:
    min_workers, _, max_workers = text.partition(":")
    if not (
        min_workers.isdecimal()
        and max_workers.isdecimal()
        and 0 < int(min_workers) <= int(max_workers)
    ):
        raise argparse.ArgumentTypeError(f"expected numbers of workers like 2:4, got {text!r}")
    return int(min_workers), int(max_workers)


def _parser() -> argparse.ArgumentParser:
    flags = _Parser(prog=PROGRAM, usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    _add_process_flags(flags.add_argument_group("Processes").add_argument)
    add = flags.add_argument_group("Failures and preemptions").add_argument
    add(
        "--grace",
        type=_positive_int,
        default=15,
        metavar="SECONDS",
        help="time to save and exit after Ctrl-C or a preemption (15)",
    )
    add(
        "--max-restarts",
        type=_non_negative_int,
        default=0,
        metavar="N",
        help="restart all workers from the newest checkpoint after a failure, up to N times (0)",
    )
    add(
        "--elastic",
        type=_worker_range,
        metavar="MIN:MAX",
        help="continue with fewer workers if one keeps failing; the global batch stays the same",
    )
    add = flags.add_argument_group("Print instead of starting").add_argument
    add("--dry-run", action="store_true", help="print the commands and their environment variables")
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
    add("--image", metavar="IMAGE", help="container image of the pods (a placeholder)")
    return flags


def _add_process_flags(add: Callable[..., Any]) -> None:
    add(
        "--num-workers",
        type=_positive_int,
        metavar="N",
        help="number of workers (2, or the sum of --hosts)",
    )
    add(
        "--num-ps",
        type=_non_negative_int,
        default=0,
        metavar="N",
        help="number of parameter servers; also starts a chief process (0)",
    )
    add(
        "--via",
        choices=("processes", "mpirun", "horovodrun", "ray"),
        default="processes",
        help="how to start the workers: as processes of this program (with TF_CONFIG and Horovod's "
        "Gloo), with mpirun or horovodrun, or as actors of a Ray cluster (processes)",
    )
    add(
        "--gpus-per-worker",
        type=_non_negative_int,
        default=0,
        metavar="N",
        help="number of GPUs visible to each worker; 0: the GPUs of a host are divided among its "
        "workers; with --via ray: none (0)",
    )
    add(
        "--cpus-per-worker",
        type=_positive_int,
        metavar="N",
        help="CPU cores to reserve for each worker, for Ray, Slurm and Kubernetes (Ray: 1)",
    )
    add(
        "--placement",
        choices=_PLACEMENTS,
        default="PACK",
        help="with --via ray: place workers on few nodes (PACK) or many (SPREAD); STRICT_PACK: on "
        "one node; STRICT_SPREAD: each on its own node (PACK)",
    )
    add(
        "--placement-timeout",
        type=_non_negative_int,
        default=_PLACEMENT_SECONDS,
        metavar="SECONDS",
        help=f"with --via ray: maximum time to wait for resources ({_PLACEMENT_SECONDS})",
    )
    add(
        "--hosts",
        metavar="a:2,b:2",
        help="hosts with their numbers of workers; without --on, prints the command to run on each "
        "host",
    )
    add("--on", metavar="HOST", help="start the workers of this host, which must be one of --hosts")
    add(
        "--port",
        type=_positive_int,
        default=_PORT,
        metavar="N",
        help=f"first port to use on each of --hosts ({_PORT})",
    )


def _check(options: Options) -> None:
    """Refuses flags that contradict each other or would have no effect."""
    slots = sum(options.hosts.values())
    if slots and slots != options.num_workers:
        raise ConfigurationError(
            f"--hosts has {slots} workers, but --num-workers is {options.num_workers}. Remove "
            "--num-workers."
        )
    if options.on is not None and options.on not in options.hosts:
        raise ConfigurationError(
            f"--on {options.on}: expected one of --hosts ({', '.join(options.hosts) or 'none'})."
        )
    if options.num_ps and (options.hosts or options.print_slurm or options.via != "processes"):
        raise ConfigurationError(
            "--num-ps works only on this host or with --print-k8s. For other launchers, set "
            "TF_CONFIG for each process."
        )
    if options.num_ps and options.gpus_per_worker > 1:
        raise ConfigurationError(
            f"--gpus-per-worker {options.gpus_per_worker} with --num-ps: a worker of parameter "
            "servers uses one GPU. Use --gpus-per-worker 1, and one worker per GPU."
        )
    # Names are written into scripts and manifests.
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
    _check_restarts(options)
    _check_effect(options)


def _check_restarts(options: Options) -> None:
    """Refuses restart flags for workers that this program does not start."""
    elsewhere = options.hosts and options.via == "processes" and not options.print_slurm
    if options.max_restarts and (elsewhere or options.print_k8s in ("tfjob", "trainjob")):
        raise ConfigurationError(
            "--max-restarts works on this host, with --via, with --print-slurm and with an mpijob. "
            "In this case, the launcher of one host cannot restart the workers of other hosts. Let "
            "the scheduler restart all workers with the same command; a preempted run exits with "
            f"code {REQUEUE}."
        )
    if not options.elastic:
        return
    if options.elastic[1] != options.num_workers:
        raise ConfigurationError(
            f"--elastic allows up to {options.elastic[1]} workers, but --num-workers is "
            f"{options.num_workers}. Remove --num-workers."
        )
    starts_here = options.via == "processes" and not options.hosts and not options.num_ps
    prints = options.print_slurm or options.print_k8s
    if not options.max_restarts or not (options.by_ray or (starts_here and not prints)):
        raise ConfigurationError(
            "--elastic needs --max-restarts, and works only for workers that this program starts "
            "on this host or in a Ray cluster. Otherwise, run the same command again with another "
            "number of workers: it resumes from the newest checkpoint with the same global batches."
        )


def _check_effect(options: Options) -> None:
    """Refuses flags that would have no effect."""
    prints = options.print_slurm or options.print_k8s is not None
    external_launcher = options.via not in ("processes", "ray")
    without_effect = {
        "--port without --hosts, because workers on this host use free ports": (
            options.port != _PORT and not options.hosts
        ),
        "--gpus-per-worker with --via, because the workers divide the visible GPUs": (
            options.gpus_per_worker and external_launcher and not prints
        ),
        "--cpus-per-worker without --via ray, --print-slurm or --print-k8s": (
            options.cpus_per_worker and not prints and not options.by_ray
        ),
        "--placement without --via ray": options.placement != "PACK" and not options.by_ray,
        "--placement-timeout without --via ray": (
            options.placement_timeout != _PLACEMENT_SECONDS and not options.by_ray
        ),
        "--hosts with --via ray, because Ray chooses the nodes": options.hosts and options.by_ray,
        "--dry-run with --via ray, because Ray chooses the nodes when the run starts": (
            options.dry_run and options.by_ray
        ),
        "--name without --print-slurm or --print-k8s": options.name != _NAME and not prints,
        "--image without --print-k8s": options.image and options.print_k8s is None,
    }
    for flag, is_given in without_effect.items():
        if is_given:
            name, _, why = flag.partition(" ")
            raise ConfigurationError(f"{name} has no effect {why}. Remove it.")
