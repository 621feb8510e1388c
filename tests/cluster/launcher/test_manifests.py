"""Kubernetes manifests, validated with the operators' schemas, and the Slurm script."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.manifest_schemas import JOBS
from tests.support.starting import run
from tfdist.cluster import messages
from tfdist.cluster.launcher import manifests
from tfdist.cluster.launcher.options import parse
from tfdist.errors import REQUEUE, ConfigurationError
from tfdist.launch import with_strategy

COMMAND = ["--", sys.executable, "train.py", "--name", "it's"]


def documents(*arguments: str) -> dict[str, dict[str, Any]]:
    """Returns all manifests by kind."""
    text = manifests.kubernetes(with_strategy(parse(arguments)))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def manifest(*flags: str) -> dict[str, Any]:
    """Returns the manifest of the job."""
    result = documents(*flags, *COMMAND)
    (job,) = (one for kind, one in result.items() if kind not in ("Secret", "NetworkPolicy"))
    return job


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--num-workers", "5", "--name", "digits", "--image", "hub/tfdist:1"],
        ["--gpus-per-worker", "2", "--cpus-per-worker", "8"],
    ],
)
@pytest.mark.parametrize("kind", list(JOBS))
def test_manifest_matches_the_schema(kind: str, flags: list[str]) -> None:
    jsonschema.validate(manifest("--print-k8s", kind, *flags), JOBS[kind])


def test_schema_rejects_unknown_fields() -> None:
    made = manifest("--print-k8s", "tfjob")
    made["spec"]["replicas"] = 2
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        jsonschema.validate(made, JOBS["tfjob"])


#: Flags of a training command, where the claims are mounted, and the flags that it gets.
FOLDERS: list[tuple[list[str], dict[str, str], str]] = [
    (
        [],
        {"tfdist-runs": "/runs", "tfdist-data": "/data"},
        "--run-dir /runs/tfdist --data-dir /data/packed",
    ),
    (
        ["--run-dir=/nfs/runs/a", "--data", "/mnt/photos"],
        {"tfdist-runs": "/nfs/runs", "tfdist-data": "/mnt"},
        "--data-dir /mnt/packed",
    ),
    (
        ["--run-dir", "/nfs/a", "--data=/nfs/photos"],
        {"tfdist-runs": "/nfs"},
        "--data-dir /nfs/packed",
    ),
    (
        ["--data", "small", "--data-dir", "/cache"],
        {"tfdist-runs": "/runs", "tfdist-data": "/cache"},
        "--run-dir /runs/tfdist",
    ),
    (["--data", "s3://bucket/photos"], {"tfdist-runs": "/runs"}, "--run-dir /runs/tfdist"),
]


def mounts(found: Any) -> Iterator[dict[str, str]]:
    """Yields, for each pod of a job, where its containers mount each claim."""
    if isinstance(found, list):
        for one in found:
            yield from mounts(one)
    elif isinstance(found, dict):
        if "containers" in found:
            paths = {m["name"]: m["mountPath"] for m in found["containers"][0]["volumeMounts"]}
            claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in found["volumes"]}
            yield {claims[name]: path for name, path in paths.items()}
        for one in found.values():
            yield from mounts(one)


@pytest.mark.parametrize(("flags", "wanted", "added"), FOLDERS)
@pytest.mark.parametrize("kind", list(JOBS))
def test_every_pod_mounts_the_folders_of_the_training_command(
    kind: str, flags: list[str], wanted: dict[str, str], added: str
) -> None:
    result = documents("--print-k8s", kind, *flags)
    (job,) = (document for name, document in result.items() if name.lower() == kind)
    jsonschema.validate(job, JOBS[kind])
    mounted = list(mounts(job))
    assert mounted
    assert mounted == [wanted] * len(mounted)
    options = with_strategy(parse(["--print-k8s", kind, *flags]))
    command = manifests.portable_command(options)
    assert command == (*options.portable_command, *added.split())
    words = str(job).replace("', '", " ")
    assert shlex.join(command) in words


def test_own_scripts_get_both_volumes_and_keep_their_arguments() -> None:
    job = manifest("--print-k8s", "tfjob")
    assert list(mounts(job)) == [{"tfdist-runs": "/runs", "tfdist-data": "/data"}]
    assert "--run-dir" not in str(job)


def test_folders_of_a_configuration_file_are_mounted(tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text("run_dir: /nfs/runs/a\ndata: /mnt/photos\n")
    job = documents("--print-k8s", "--config", str(tmp_path / "run.yaml"))["TFJob"]
    assert list(mounts(job)) == [{"tfdist-runs": "/nfs/runs", "tfdist-data": "/mnt"}]
    assert "/runs/tfdist" not in str(job)


def test_relative_folders_raise() -> None:
    for flag, better in (
        ("--run-dir", "/runs/a"),
        ("--data", "/data/a"),
        ("--data-dir", "/data/a"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"^{flag} a: .* Use an absolute path such as {better}"
        ):
            documents("--print-k8s", flag, "a")


@pytest.mark.parametrize("kind", list(JOBS))
def test_placeholders_have_comments(kind: str) -> None:
    def commented(*flags: str) -> dict[str, str]:
        text = manifests.kubernetes(parse(["--print-k8s", kind, *flags, *COMMAND]))
        lines = (line.strip(" -").split("  # ") for line in text.splitlines() if "  # " in line)
        return dict(lines)

    result = commented()
    assert "ReadWriteMany" in result["claimName: tfdist-runs"]
    assert "data" in result["claimName: tfdist-data"]
    assert "Dockerfile" in result["image: REGISTRY/tfdist:TAG"]
    assert not any("image" in line for line in commented("--image", "hub/tfdist:1"))


def test_tf_job_with_servers() -> None:
    made = manifest("--print-k8s", "--num-workers", "3", "--num-ps", "2", "--gpus-per-worker", "1")
    jsonschema.validate(made, JOBS["tfjob"])
    tasks = made["spec"]["tfReplicaSpecs"]
    replicas = {task: one["replicas"] for task, one in tasks.items()}
    assert replicas == {"Chief": 1, "Worker": 3, "PS": 2}
    with_gpus = [task for task, one in tasks.items() if "nvidia.com/gpu" in str(one)]
    assert with_gpus == ["Worker"]
    container = tasks["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "tensorflow"  # the operator looks for this name
    assert container["command"] == ["python", "train.py", "--name", "it's"]


def test_mpi_job_runs_the_command_on_all_workers() -> None:
    made = manifest("--print-k8s", "mpijob", "--num-workers", "3", "--gpus-per-worker", "1")
    pods = made["spec"]["mpiReplicaSpecs"]
    command = pods["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "mpirun"
    assert command[command.index("-np") + 1] == "3"
    assert command[-4:] == ["python", "train.py", "--name", "it's"]
    assert "nvidia.com/gpu" not in str(pods["Launcher"])
    assert "nvidia.com/gpu" in str(pods["Worker"])


def test_ray_job_starts_the_launcher_in_a_cluster_with_a_pod_per_worker() -> None:
    flags = ["--elastic", "2:3", "--max-restarts", "5", "--gpus-per-worker", "1"]
    spec = manifest("--print-k8s", "--via", "ray", *flags)["spec"]
    launch = "python -m tfdist.launch --via ray --elastic 2:3 --gpus-per-worker 1 --max-restarts 5"
    assert shlex.split(spec["entrypoint"]) == [*launch.split(), "--", "python", *COMMAND[2:]]
    assert parse(shlex.split(spec["entrypoint"])[3:]).elastic == (2, 3)
    cluster = spec["rayClusterSpec"]
    assert "nvidia.com/gpu" not in str(cluster["headGroupSpec"])
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 3)
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["--via", "ray"], "RayJob"),
        (["--strategy", "multi_worker"], "TFJob"),
        (["--strategy", "horovod"], "MPIJob"),
        (["--strategy=horovod"], "MPIJob"),
        (["--strategy=sharded"], "MPIJob"),
        (["--via", "mpirun"], "MPIJob"),
    ],
)
def test_kind_follows_the_strategy(flags: list[str], kind: str) -> None:
    assert kind in documents("--print-k8s", *flags)


@pytest.mark.parametrize("kind", ["mpijob", "trainjob", "rayjob"])
def test_parameter_servers_in_other_jobs_raise(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"a {kind} does not support parameter servers"):
        manifest("--print-k8s", kind, "--num-ps", "1")


def test_preempted_jobs_restart() -> None:
    job = manifest("--print-k8s", "tfjob")["spec"]
    assert job["tfReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"  # 128 or more
    assert "backoffLimit" not in job["runPolicy"]
    assert REQUEUE >= 128
    job = manifest("--print-k8s", "mpijob", "--max-restarts", "3")["spec"]
    assert job["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "OnFailure"
    assert job["runPolicy"]["backoffLimit"] == 3


@pytest.mark.parametrize("kind", list(JOBS))
def test_secret_is_no_argument_and_policy_excludes_other_pods(kind: str) -> None:
    flags = ["--print-k8s", kind, "--name", "digits", *COMMAND]
    found, again = documents(*flags), documents(*flags)
    secret = found["Secret"]["stringData"][messages.SECRET]
    assert len(secret) == 64
    assert secret != again["Secret"]["stringData"][messages.SECRET]
    (job,) = (one for name, one in found.items() if name.lower() == kind)
    assert secret not in str(job)
    assert f"'secretKeyRef': {{'name': 'digits', 'key': '{messages.SECRET}'}}" in str(job)
    policy = found["NetworkPolicy"]["spec"]
    own, *others = policy["ingress"]
    assert own == {"from": [{"podSelector": policy["podSelector"]}]}
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    wanted = {"from": [{"namespaceSelector": {}, "podSelector": operator}]}
    assert others == ([{**wanted, "ports": [{"port": 8265}]}] if kind == "rayjob" else [])
    ((label, value),) = policy["podSelector"]["matchLabels"].items()
    assert value == "digits"
    assert kind == "trainjob" or f"'labels': {{'{label}': 'digits'}}" in str(job)


#: Texts that a shell, Slurm, YAML or the kubelet could interpret.
HOSTILE = [
    "a\ntouch /tmp/P #", "a; touch P", "$(touch P)", "`touch P`", "a b", "'", '"',
    "a\r#SBATCH --wrap=x", "../../etc", "-rf", "*", "a\x00b", "\x1b[2J", "{{x}}", "", "é",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
@pytest.mark.parametrize("prints", ["--print-slurm", "--print-k8s"])
@pytest.mark.parametrize("flag", ["--name", "--image", "--hosts", "--on"])
def test_hostile_name_raises(flag: str, prints: str, text: str) -> None:
    if flag == "--hosts":
        text = f"{text}:2"
    with pytest.raises(ConfigurationError, match=flag):
        parse([prints, f"{flag}={text}", *COMMAND])


@pytest.mark.parametrize("name", ["Digits", "a.b", "a_b", "1a", "a" * 41, "a-"])
def test_invalid_kubernetes_name_raises(name: str) -> None:
    parse(["--print-slurm", "--name", name, *COMMAND])
    with pytest.raises(ConfigurationError, match="for Kubernetes at most 40 lowercase"):
        parse(["--print-k8s", "--name", name, *COMMAND])


@pytest.mark.parametrize("text", [one for one in HOSTILE if "\x00" not in one], ids=repr)
def test_hostile_arguments_reach_the_program_unchanged(text: str, tmp_path: Any) -> None:
    script = manifests.slurm(parse(["--print-slurm", "--", "run", text]))
    _, printed = run_script(tmp_path, script, codes=[0])
    assert printed.split("|")[-2] == text.replace("\r", "\n")  # as Python reads text
    assert not (tmp_path / "P").exists()
    result = documents("--print-k8s", "tfjob", "--", "run", text)["TFJob"]
    container = result["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    # The kubelet expands $(NAME), and replaces $$ by $.
    assert container["command"] == ["run", text.replace("$", "$$")]


def test_slurm_script_creates_a_new_secret(tmp_path: Any) -> None:
    script = manifests.slurm(parse(["--print-slurm", "--", "run"]))
    tools = {name: shutil.which(name) for name in ("od", "tr")}
    for name, path in tools.items():
        assert path
        (tmp_path / name).symlink_to(path)
    (tmp_path / "seen").touch()
    shows = script.replace("run\n", f'run; echo "${messages.SECRET}" >> seen\n')
    for _ in range(2):
        run_script(tmp_path, shows, [0])
    result = (tmp_path / "seen").read_text().split()
    assert [len(secret) for secret in result] == [64, 64]
    assert len(set(result)) == 2


def test_slurm_script_has_its_directives_first() -> None:
    flags = ["--print-slurm", "--hosts", "n1:2,n2:2", "--gpus-per-worker", "1", "--name", "digits"]
    script = manifests.slurm(parse([*flags, *COMMAND]))
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    for wanted in ("ntasks=4", "nodes=2", "nodelist=n1,n2", "gpus-per-task=1", "job-name=digits"):
        assert f"#SBATCH --{wanted}" in directives
    assert script.startswith("#!/bin/bash\n#SBATCH ")  # directives before any command


def test_slurm_script_runs_the_command(tmp_path: Any) -> None:
    bash = shutil.which("bash")
    assert bash
    script = manifests.slurm(parse(["--print-slurm", *COMMAND]))
    code, printed = run_script(tmp_path, script, codes=[0])
    assert printed.split("|")[-5:] == ["python", "train.py", "--name", "it's", "\n"]
    assert code == 0


@pytest.mark.parametrize(
    ("codes", "ends_with", "runs", "requeued"),
    [([1, 1, 0], 0, 3, False), ([1, 1, 7, 0], 7, 3, False), ([1, REQUEUE], REQUEUE, 2, True)],
)
def test_slurm_script_restarts(
    tmp_path: Any, codes: list[int], ends_with: int, runs: int, requeued: bool
) -> None:
    script = manifests.slurm(parse(["--print-slurm", "--max-restarts", "2", *COMMAND]))
    code, printed = run_script(tmp_path, script, codes)
    assert (code, printed.count("train.py")) == (ends_with, runs)
    assert ("requeue 17" in printed) == requeued


def run_script(folder: Any, script: str, codes: list[int]) -> tuple[int, str]:
    """Runs a script with an `srun` that prints its arguments and exits with successive codes."""
    bash = shutil.which("bash")
    assert bash
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    programs = {
        "srun": f"""printf "%s|" "$@"; echo
read -r code < {folder}/codes; {shutil.which("sed")} -i 1d {folder}/codes; exit $code""",
        "scontrol": 'echo "$@"',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!{bash}\n{body}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": str(folder), "SLURM_JOB_ID": "17"}
    done = run(bash, "-s", input=script, cwd=folder, env=environ, code=None)
    return done.returncode, done.stdout
