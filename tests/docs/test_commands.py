"""Every command on a page is valid."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.commands import Command, commands, other_lines
from tests.support import ROOT, buckets
from tests.support.starting import python, run

ALL = commands()
#: Pages whose commands need only this machine, and flags that make each command short.
PAGES = (
    "README.md", "docs/getting_started.md", "docs/clusters.md", "docs/images.md",
    "docs/kubernetes.md",
    "docs/large_models.md", "docs/resume.md", "docs/slurm.md", "docs/two_machines.md",
    "tfdist/checkpoint/README.md",
)  # fmt: skip
SMALL = {
    "tfdist.train": ["--smoke"],
    "tfdist.launch": ["--smoke"],
    "tfdist.tools.bench": ["--smoke"],
}
#: Flags that make a command short already.
WHOLE = {
    "--help", "--list-recipes", "--print-config", "--print-slurm", "--print-k8s", "--limit-steps",
    "--overfit-batches",
}  # fmt: skip
#: Commands that need something else, or the result of an earlier command.
LEFT_OUT = {
    "srun": "needs Slurm",
    "tfdist.tools.runs": "runs of the reader's: tests/tools/runs",
    "tfdist.tools.init": "asks questions: tests/tools/test_init.py",
    "my_script.py": "a script of the reader's",
    "train.py": "the README's example: tests/test_project_files.py",
    "runs/x": "continues a run of the reader's: tests/checkpoint",
    "runs/a": "a run of the reader's: tests/run",
    "--via mpirun": "hosts that are not here",
    "run.yaml": "a file of the reader's: tests/run/test_flags.py",
    "photos": "photographs of the reader's: tests/pipelines, tests/recipes",
    "tfdist.tools.tune": "fills the memory: tests/tools/tune",
    "wandb": "needs an account",
}

#: Commands of all other pages: what they contain, and the tests that run such a command.
RUN_BY = {
    "tfdist.train": "tests/run",
    "tfdist.launch": "tests/cluster/launcher",
    "tfdist.script": "tests/script",
    "tfdist.tools.verify": "tests/tools/verify",
    "tfdist.tools.doctor": "tests/tools/doctor",
    "tfdist.cluster.remote": "tests/cluster/remote",
    "tfdist.tools.plan": "tests/tools/plan",
    "tfdist.tools.tune": "tests/tools/tune",
    "tfdist.tools.bench": "tests/tools/bench",
    "tfdist.tools.runs": "tests/tools/runs",
    "tfdist.tools.replay": "tests/tools/replay",
    "tfdist.tools.init": "tests/tools/test_init.py",
    "tfdist.tools.install_horovod": "tests/tools/install_horovod",
    "pipelines.": "tests/pipelines",
    "benchmarks": "tests/benchmarks",
}
#: Lines of shell blocks that start no command of ours: how they begin, and the tests that run
#: them, or why none does.
OTHER_LINES = {
    "make ": "the continuous build runs the targets: .ci/run",
    ". .venv/bin/activate": "activates what `make` creates",
    "pip install": "needs a network; tests/release.py installs the wheel",
    "docker ": "needs Docker",
    "kubectl ": "needs Kubernetes; tests/cluster/launcher/test_manifests.py checks the manifests",
    "sbatch ": "needs Slurm",
    "ray job submit": "needs a Ray cluster",
    "nft ": "changes the firewall",
    "while true; do tfdist remote": "tests/cluster/remote starts servers",
    "eval ": "changes the reader's shell",
    "export ": "sets a variable of the reader's shell",
    "python docs/example.py": "tests/test_project_files.py runs it under mirrored",
    "mpirun -np 2 python docs/example.py": "tests/test_project_files.py runs it under mirrored",
    "python train.py": "the README's example: tests/test_project_files.py",
    "python script.py": "a script of the reader's: tests/script/test_processes.py",
    "python train_photos.py": "the page's block: tests/docs/test_code_blocks.py",
    "mpirun -np 2 python": "the page's block: tests/docs/test_code_blocks.py",
    "horovodrun --gloo -np 2 python": "the page's block: tests/docs/test_code_blocks.py",
    "python -m tests.": "a tool for contributors",
}


def test_every_command_is_run_or_left_out_for_a_reason() -> None:
    known = (*LEFT_OUT, *RUN_BY)
    unknown = [str(one) for one in ALL if one.page not in PAGES]
    assert not [line for line in unknown if not any(part in line for part in known)]
    assert not [path for path in RUN_BY.values() if not (ROOT / path).exists()]


def test_every_other_line_is_a_known_command() -> None:
    found = list(other_lines())
    assert not [one for one in found if not one[1].startswith(tuple(OTHER_LINES))]
    unused = [part for part in OTHER_LINES if not any(line.startswith(part) for _, line in found)]
    assert not unused


def test_commands_are_found() -> None:
    assert len(ALL) > 80
    assert {one.page for one in ALL} >= {*PAGES, "docs/performance.md", "pipelines/README.md"}


def refused(lines: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    return python("-m", "tests.docs.parsing", input=json.dumps(lines), cwd=ROOT).stdout.splitlines()


def test_flags_exist() -> None:
    # Flags behind a script are the script's own.
    ours = [one for one in ALL if one.module != "tfdist" and one.arguments[:1] != ("train.py",)]
    assert not refused([(one.module, one.arguments) for one in ours])


def test_unknown_flag_is_detected() -> None:
    wrong = [("--stratgey", "mirrored"), ("--epochs", "-1"), ("--strategy", "miror")]
    assert len(refused([("tfdist.train", words) for words in wrong])) == len(wrong)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("shown", [one for one in ALL if one.page in PAGES], ids=str)
def test_command_runs(shown: Command, tmp_path: Path) -> None:
    for part, why in LEFT_OUT.items():
        if part in str(shown):
            pytest.skip(why)
    starter = shlex.split(shown.starter)
    if starter and not shutil.which(starter[0]):
        pytest.skip(f"{starter[0]} is not installed")
    if starter[:1] == ["mpirun"]:
        starter += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    whole = WHOLE & set(shown.arguments)
    small = [] if whole else SMALL.get(shown.module, [])
    command = [*starter, sys.executable, "-m", shown.module, *shown.arguments, *small]
    done = run(*command, cwd=tmp_path, code=None, timeout=500)
    # The doctor exits with 1 if a check fails, as it may here.
    allowed = (0, 1) if shown.module == "tfdist.tools.doctor" else (0,)
    assert done.returncode in allowed, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.processes
def test_language_models_are_fine_tuned(tmp_path: Path) -> None:
    pytest.importorskip("keras_hub")
    pytest.importorskip("safetensors")
    said = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 20)
    shown = [one for one in ALL if one.page == "docs/finetune.md"]
    assert len(shown) == 4
    small = ["--set=preset=tiny", "--set=length=32", "--batch-size=4", "--limit-steps=2"]
    for number, one in enumerate(shown):
        where = ["--devices=2", "--epochs=1", f"--run-dir={number}"]
        python("-m", one.module, *one.arguments, *small, *where, cwd=tmp_path)
    written = {path.name for path in (tmp_path / "3").iterdir()}
    assert written >= {"samples.png", "adapter.lora.h5", "preset", "safetensors", "curves.png"}


PAGE = "docs/s3.md"


@pytest.mark.long
@pytest.mark.processes
def test_commands_run_in_their_order(s3_server: str, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        folder = tmp_path / "corpus" / split
        folder.mkdir(parents=True)
        lines = [f"line {i} of the text of {split}\n" for i in range(500)]
        for i in range(4):
            (folder / f"{i}.txt").write_text("".join(lines[i::4]))
    shown = [one for one in commands() if one.page == PAGE]
    assert len(shown) >= 8
    buckets.create_bucket(s3_server, "bucket")
    environment = os.environ | buckets.ENVIRONMENT
    environment |= {"AWS_ENDPOINT_URL": s3_server, "PYTHONPATH": str(ROOT)}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "home")}
    for one in shown:
        small = ["--limit-steps=3"] if one.module == "tfdist.train" else []
        if small and "--evaluate" not in one.arguments:
            small.append("--warmup-epochs=0")
        python("-m", one.module, *one.arguments, *small, cwd=tmp_path, env=environment)
