"""Parts that several machines pack are the folder that one machine packs, byte for byte."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import DataError, storage
from pipelines.format.index import Shard
from pipelines.pack import packing
from pipelines.pack.__main__ import main as pack
from pipelines.pack.packing import pack_dataset
from pipelines.pack.parts import Part
from pipelines.pack.work_folder import work_folder
from tests.support.commands import require_obstore

SOURCE = [f"line {i}\n" for i in range(100)]
OPTIONS = ["--num-shards", "7", "--seed", "3", "--num-workers", "1"]
_numbers_of_folders = itertools.count()


@pytest.fixture(params=["local", "memory"])
def dest(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "packed")
    require_obstore()
    return f"memory://bucket/packed-{next(_numbers_of_folders)}"


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(SOURCE))
    return str(path)


def contents(folder: str) -> dict[str, bytes]:
    """The files of a folder without the offsets, which are written when a folder is read."""
    path = storage.at(folder)
    local = isinstance(path, Path)
    names = [file.name for file in path.iterdir()] if local else path.sizes()
    return {name: (path / name).read_bytes() for name in names if name != "offsets.npz"}


def on_one_machine(source: str, tmp_path: Path) -> dict[str, bytes]:
    pack_dataset(source, tmp_path / "one", num_shards=7, seed=3, num_workers=1)
    return contents(str(tmp_path / "one"))


def test_parts_equal_the_folder_of_one_machine(source: str, dest: str, tmp_path: Path) -> None:
    """In any order, and with a part that runs twice; the last one publishes the folder."""
    for part in ("2/3", "1/3", "2/3", "3/3"):
        assert pack([source, dest, *OPTIONS, "--part", part]) == 0
    assert contents(dest) == on_one_machine(source, tmp_path)
    assert pack([source, dest, *OPTIONS, "--part", "1/3"]) == 0  # all parts are finished


def test_finish_names_missing_parts(
    source: str, dest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([source, dest, *OPTIONS, "--part", "1/2"]) == 0
    assert "Part 1/2 is complete" in capsys.readouterr().out
    assert not (storage.at(dest) / "index.json").is_file()
    assert pack([source, dest, *OPTIONS, "--finish"]) == 1
    message = "3 of 7 shards are missing, the first is data-00001-of-00007.tfrecord"
    assert message in capsys.readouterr().err
    assert pack([source, dest, *OPTIONS, "--part", "2/2"]) == 0
    assert pack([source, dest, *OPTIONS, "--finish"]) == 0
    assert contents(dest) == on_one_machine(source, tmp_path)


def test_parts_of_other_plans_raise(
    source: str, dest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([source, dest, *OPTIONS, "--part", "1/2"]) == 0
    assert pack([source, dest, *OPTIONS, "--seed", "4", "--part", "2/2"]) == 1
    assert "parts that were packed with other options" in capsys.readouterr().err


def test_parts_of_another_division_do_not_write_the_same_shards(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "packed"
    with work_folder(dest).lock(Part(0, 2)):
        assert pack([source, str(dest), *OPTIONS, "--part", "2/3"]) == 1
        assert "another process is packing to this folder" in capsys.readouterr().err
        assert pack([source, str(dest), *OPTIONS, "--part", "2/2"]) == 0
    assert pack([source, str(dest), *OPTIONS, "--part", "2/3"]) == 0


@pytest.mark.parametrize("part", ["3", "0/2", "3/2", "a/b", "/2"])
def test_invalid_parts_are_rejected(
    source: str, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([source, str(tmp_path / "packed"), "--part", part]) == 1
    assert "expected a part such as 3/16" in capsys.readouterr().err


def test_packing_to_a_url_at_once(source: str, tmp_path: Path) -> None:
    require_obstore()
    url = f"memory://bucket/packed-{next(_numbers_of_folders)}"
    index = pack_dataset(source, url, num_shards=7, seed=3, num_workers=1)
    assert contents(url) == on_one_machine(source, tmp_path)
    assert "offsets.npz" in storage.RemotePath(url).sizes()
    assert pack_dataset(source, url, num_shards=7, seed=3, num_workers=1) == index


@pytest.mark.parametrize(("num_shards", "seed"), [(7, 3), (7, 4), (9, 3)])
def test_another_process_packs_to_the_same_url_meanwhile(
    source: str, tmp_path: Path, num_shards: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the first one, unless both pack the same. No shards of other plans are left."""
    require_obstore()
    url = f"memory://bucket/packed-{next(_numbers_of_folders)}"
    write, calls = packing._write_shard, itertools.count()

    def interrupted(*arguments: Any) -> Shard:
        if next(calls) == 2:
            pack_dataset(source, url, num_shards=7, seed=3, num_workers=1)
        return write(*arguments)

    monkeypatch.setattr(packing, "_write_shard", interrupted)
    if (num_shards, seed) == (7, 3):
        pack_dataset(source, url, num_shards=num_shards, seed=seed, num_workers=1)
    else:
        with pytest.raises(DataError, match="contains other data"):
            pack_dataset(source, url, num_shards=num_shards, seed=seed, num_workers=1)
    assert contents(url) == on_one_machine(source, tmp_path)


ENVIRONMENTS: list[tuple[str, list[dict[str, str]]]] = [
    ("auto", [{"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_COUNT": "2"} for i in range(2)]),
    ("auto/2", [{"JOB_COMPLETION_INDEX": str(i)} for i in range(2)]),
    ("auto", [{"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_SIZE": "2"} for i in range(2)]),
    ("auto", [{"SLURM_PROCID": str(i), "SLURM_STEP_NUM_TASKS": "2"} for i in range(2)]),
    ("auto", [{"RANK": str(i), "WORLD_SIZE": "2"} for i in range(2)]),
    (
        "auto",
        [
            {
                "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", '
                f'"index": {i}}}}}'
            }
            for i in range(2)
        ],
    ),
]


@pytest.mark.parametrize(("text", "environments"), ENVIRONMENTS)
def test_part_follows_from_the_index_of_the_process(
    text: str, environments: list[dict[str, str]]
) -> None:
    assert [Part.parse(text, environ) for environ in environments] == [Part(0, 2), Part(1, 2)]


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("auto", {}, "found none of their variables"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "got 0 and no number"),
        # A task of an array of 16 that is submitted again alone.
        ("auto", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1"}, "--part auto/16"),
        ("auto/2", {"JOB_COMPLETION_INDEX": ""}, "a number in JOB_COMPLETION_INDEX, got ''"),
        ("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "found none of their variables"),
        ("auto", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4(x2)"}, "a number in SLURM_STEP"),
        ("auto", {"TF_CONFIG": "{"}, "a cluster and a task in TF_CONFIG"),
        ("auto", {"TF_CONFIG": '{"cluster": {}, "task": []}'}, "a cluster and a task in TF_CONFIG"),
    ],
)
def test_unknown_parts_are_explained(text: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Part.parse(text, environ)


@pytest.mark.parametrize(
    ("flag", "variable"),
    [("--print-slurm", "SLURM_ARRAY_TASK_ID"), ("--print-k8s", "JOB_COMPLETION_INDEX")],
)
def test_printed_jobs_pack_the_data_set(
    source: str,
    tmp_path: Path,
    flag: str,
    variable: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dest = str(tmp_path / "packed $(NAME)")
    assert pack([source, dest, *OPTIONS, flag, "3"]) == 0
    printed = capsys.readouterr().out
    if flag == "--print-slurm":
        assert "#SBATCH --array=0-2\n" in printed
        command = shlex.split(printed.splitlines()[-1])[1:]
    else:
        job = yaml.safe_load(printed)
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
        (container,) = job["spec"]["template"]["spec"]["containers"]
        # The kubelet leaves `$$(NAME)` as `$(NAME)`.
        command = [word.replace("$$", "$") for word in container["command"]]
    assert command[:3] == ["python", "-m", "pipelines.pack"]
    for number in range(3):
        monkeypatch.setenv(variable, str(number))
        assert pack(command[3:]) == 0
    assert contents(dest) == on_one_machine(source, tmp_path)
