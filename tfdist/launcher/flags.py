"""The flags of `python -m tfdist.launch`, and the command that they are for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from tfdist.errors import ConfigurationError
from tfdist.launcher.flag_checks import IMAGE, NAME, PORT, check
from tfdist.launcher.plan import parse_hosts

PROGRAM = "python -m tfdist.launch"
_USAGE = f"{PROGRAM} [flags] -- COMMAND ...\n       {PROGRAM} [flags] [flags of tfdist.train]"
_DESCRIPTION = "Starts the workers of a run, and ends them all when one fails."


@dataclass(frozen=True)
class Options:
    """The flags, as their help describes them, and the command."""

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
    image: str
    cpus_per_worker: int | None
    #: Of the training command, as far as `run.strategy_of_workers` knows it.
    strategy: str = ""

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The command as another machine or image finds it: by its own Python."""
        program, *arguments = self.command
        return ("python" if program == sys.executable else program, *arguments)

    @property
    def trains(self) -> bool:
        """Whether the command is that of the training command."""
        return self.command[1:3] == ("-m", "tfdist.train")

    @property
    def going_on(self) -> Options:
        """With the training command told to go on from its newest checkpoint, unless it is told."""
        if not self.trains or any(word.partition("=")[0] == "--resume" for word in self.command):
            return self
        return replace(self, command=(*self.command, "--resume", "auto"))


def parse(arguments: Sequence[str]) -> Options:
    """Returns the options of a command line; `--help` prints and exits.

    Raises:
        ConfigurationError: A flag that does not fit, or flags that do not fit each other.
    """
    arguments = list(arguments)
    own, command = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, command = arguments[:at], arguments[at + 1 :]
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the word at its cursor
        importlib.import_module("argcomplete").autocomplete(parser)
    known, rest = parser.parse_known_args(own)
    if "--" in arguments and (rest or not command):
        wrong = f"{' '.join(rest)!r} before --" if rest else "nothing after --"
        raise ConfigurationError(f"{wrong}: expected {PROGRAM} [flags] -- COMMAND ...")
    if rest and not rest[0].startswith("-"):
        raise ConfigurationError(f"{' '.join(rest)!r}: a command stands after --.")
    flags = vars(known)
    flags["hosts"] = parse_hosts(known.hosts) if known.hosts else {}
    most = known.elastic[1] if known.elastic else 0
    flags["num_workers"] = known.num_workers or sum(flags["hosts"].values()) or most or 2
    flags["command"] = tuple(command) or (sys.executable, "-m", "tfdist.train", *rest)
    options = Options(**flags)
    check(options)
    return options


class _Parser(argparse.ArgumentParser):
    """Errors are ours: one line and the exit code 1, as of every command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}\n{PROGRAM} --help lists what there is.")


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not _natural(text):
        raise argparse.ArgumentTypeError("expected a number from 1, got '0'")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    if not (fewest.isdecimal() and most.isdecimal() and 0 < int(fewest) <= int(most)):
        raise argparse.ArgumentTypeError(f"expected numbers of workers like 2:4, got {text!r}")
    return int(fewest), int(most)


def _parser() -> argparse.ArgumentParser:
    """The flags. What follows -- is the command; without it, what is not here is train's."""
    parser = _Parser(prog=PROGRAM, usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument_group("Who runs").add_argument
    add("--num-workers", type=_positive, metavar="N", help="workers; left out: 2, or as --hosts")
    add(
        "--num-ps",
        type=_natural,
        default=0,
        metavar="N",
        help="parameter servers; they and the workers serve one process more, the chief",
    )
    add(
        "--via",
        choices=("processes", "mpirun", "horovodrun"),
        default="processes",
        help="who starts them: this program (TF_CONFIG and Horovod's Gloo), or another's",
    )
    add("--gpus-per-worker", type=_natural, default=0, metavar="N", help="GPUs of its own; 0: all")
    add = parser.add_argument_group("Where").add_argument
    add("--hosts", metavar="a:2,b:2", help="hosts and workers; prints what each has to run")
    add("--on", metavar="HOST", help="start the workers of this one of --hosts, here")
    add("--port", type=_positive, default=PORT, metavar="N", help="first port on each of --hosts")
    add = parser.add_argument_group("How they end").add_argument
    add(
        "--grace",
        type=_positive,
        default=15,
        metavar="SECONDS",
        help="that they have to save and end after Ctrl-C or a preemption (15)",
    )
    add(
        "--max-restarts",
        type=_natural,
        default=0,
        metavar="N",
        help="failures after which all start again from the newest checkpoint (0)",
    )
    add(
        "--elastic",
        type=_range,
        metavar="MIN:MAX",
        help="goes on without a worker that keeps failing; the global batch stays",
    )
    add = parser.add_argument_group("Print, start nothing").add_argument
    add("--dry-run", action="store_true", help="the commands and their variables")
    add("--print-slurm", action="store_true", help="a script for sbatch")
    add(
        "--print-k8s",
        nargs="?",
        const="auto",
        choices=("auto", "tfjob", "mpijob", "trainjob"),
        help="a manifest; auto: mpijob for --strategy horovod or --via mpirun, else tfjob",
    )
    add("--name", default=NAME, metavar="NAME", help="the job's (tfdist)")
    add("--image", default=IMAGE, metavar="IMAGE", help="the pods' (tfdist:latest)")
    add("--cpus-per-worker", type=_positive, metavar="N", help="for Slurm and Kubernetes")
    return parser
