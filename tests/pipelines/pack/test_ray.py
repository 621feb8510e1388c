"""Packing by the cores of a Ray cluster gives the bytes of packing on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from pipelines.console import ray_tasks
from pipelines.pack.__main__ import main as pack
from tests.pipelines.pack.test_parts import OPTIONS, SOURCE, contents, on_one_machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_ray_equals_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, dest = tmp_path / "text.txt", tmp_path / "packed"
    source.write_text("".join(SOURCE))
    arguments = [str(source), str(dest), *OPTIONS[:-2], "--via", "ray"]
    assert pack([*arguments, "--num-workers", "2"]) == 1
    assert "uses all free cores" in capsys.readouterr().err
    assert pack(arguments) == 0
    assert contents(str(dest)) == on_one_machine(str(source), tmp_path)
    source.write_bytes(b"")  # what a task raises is reported in one line
    assert pack([*arguments[:1], str(tmp_path / "other"), *arguments[2:]]) == 1
    assert capsys.readouterr().err.count("error:") == 1


@pytest.mark.usefixtures("cluster")
def test_tasks_that_fail_at_the_same_time_do_not_abort_the_process() -> None:
    def fail(task: int, _: object) -> None:
        raise ValueError(str(task))

    for _ in range(100):
        with pytest.raises(ValueError, match=r"^[0-3]$"):
            ray_tasks.run(fail, range(4))
