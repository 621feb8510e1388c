"""The flags of `python -m tfdist.launch`, with their help."""

from __future__ import annotations

import argparse
from typing import NoReturn

from tfdist.errors import ConfigurationError
from tfdist.launcher.flag_checks import IMAGE, NAME, PORT

PROGRAM = "python -m tfdist.launch"
_USAGE = f"{PROGRAM} [flags] -- COMMAND ...\n       {PROGRAM} [flags] [flags of tfdist.train]"
_DESCRIPTION = "Starts the workers of a run, and ends them all when one fails."


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


def parser() -> argparse.ArgumentParser:
    """The flags. What follows -- is the command; without it, what is not here is train's."""
    flags = _Parser(prog=PROGRAM, usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    add = flags.add_argument_group("Who runs").add_argument
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
    add(
        "--gpus-per-worker",
        type=_natural,
        default=0,
        metavar="N",
        help="GPUs that each worker sees; 0: all, divided among the workers of a host (0)",
    )
    add = flags.add_argument_group("Where").add_argument
    add("--hosts", metavar="a:2,b:2", help="hosts and workers; prints what each has to run")
    add("--on", metavar="HOST", help="start the workers of this one of --hosts, here")
    add("--port", type=_positive, default=PORT, metavar="N", help="first port on each of --hosts")
    add = flags.add_argument_group("How they end").add_argument
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
    add = flags.add_argument_group("Print, start nothing").add_argument
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
    return flags
