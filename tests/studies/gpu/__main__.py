"""`python -m tests.studies.gpu`: checks that need GPUs; prints what passed and how fast."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from tests.studies.gpu import runner
from tests.studies.gpu.checks import CHECKS, Host
from tests.support import ROOT


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks; returns 1 if one failed, 2 if there is no GPU."""
    chosen = _parse(arguments)
    host = Host.rehearsing() if chosen.rehearse else Host.here()
    if not host.num_devices:
        print(
            "No GPU here: `nvidia-smi` lists none, or CUDA_VISIBLE_DEVICES hides them. "
            "`python -m tests.studies.gpu --rehearse` runs the checks on CPU devices."
        )
        return 2
    console, results = Console(), []
    with_horovod = has_horovod(host)
    for check in CHECKS:
        if chosen.only and check.name not in chosen.only:
            continue
        console.print(f"{check.title} ...", highlight=False)
        results.append(runner.run(check, host, chosen.out, with_horovod))
        console.print(f"  {results[-1].status} {results[-1].detail}", highlight=False, markup=False)
    console.print(runner.table(results, host))
    chosen.out.mkdir(parents=True, exist_ok=True)
    runner.write(results, host, chosen.out / "results.json")
    console.print(f"logs and results.json: {chosen.out}", highlight=False)
    return int(any(result.status in ("failed", "timed out") for result in results))


def has_horovod(host: Host) -> bool:
    """Returns whether a Horovod is installed that sums over these devices."""
    built = "True" if host.rehearsal else "hvd.nccl_built()"
    code = f"import horovod.tensorflow as hvd, sys; sys.exit(not {built})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=host.environ(full_float32=False),
        capture_output=True,
        timeout=300,
        check=False,
    )
    return done.returncode == 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.gpu", description=__doc__)
    parser.add_argument(
        "--rehearse", action="store_true", help="use logical CPU devices and tiny networks"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[check.name for check in CHECKS],
        metavar="CHECK",
        help=f"run this check alone; may be repeated: {', '.join(check.name for check in CHECKS)}",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder for logs and results"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
