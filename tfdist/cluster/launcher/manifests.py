"""Job files for other schedulers: a script for Slurm, and manifests for Kubernetes.

The manifests are for the training operator, the MPI operator and KubeRay.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from tfdist.cluster.launcher.options import Options
from tfdist.cluster.messages import SECRET
from tfdist.console import settings_file
from tfdist.errors import REQUEUE, ConfigurationError

#: Seconds between SIGTERM and SIGKILL, for a pod to finish a step and save a checkpoint.
_SAVING_SECONDS = 120
#: The label of a job's pods.
_LABEL = "tfdist.job"
#: The label of KubeRay's operator, and the port at which a Ray cluster accepts jobs.
_KUBERAY = {"app.kubernetes.io/name": "kuberay-operator"}
_RAY_DASHBOARD = 8265
#: Placeholder if `--image` is not set. It is invalid, because repository names are lowercase.
_IMAGE = "REGISTRY/tfdist:TAG"
_IMAGE_COMMENT = "your image, such as one that is built from the Dockerfile of tfdist"

_RUNS, _DATA = PurePosixPath("/runs"), PurePosixPath("/data")
#: Values of `--data` that are neither folders nor URLs.
_BUILT_IN = ("small", "synthetic")

_SCRIPT = """\
#!/bin/bash
{directives}

set -uo pipefail
# Authenticates the workers' messages; srun passes it on.
export {secret}="${{{secret}:-$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')}}"
for restart in {{0..{max_restarts}}}; do
    # Label lines with the rank, terminate all tasks when one fails, and fill nodes rank by rank.
    srun --label --kill-on-bad-exit=1 --distribution=block \\
        {command}
    code=$?
    # Preempted, or out of time: a checkpoint is saved, and the requeued job resumes from it.
    if [ $code = {requeue} ]; then scontrol requeue "$SLURM_JOB_ID"; exit $code; fi
    if [ $code = 0 ]; then break; fi
done
exit $code
"""


def slurm(options: Options) -> str:
    """Returns a script for sbatch, which restarts the command after `--max-restarts` failures.

    `srun` starts the workers, and `tfdist.cluster` reads its variables.
    """
    directives_by_name = {
        "job-name": options.name,
        "output": f"{options.name}-%j.log",
        "ntasks": options.num_workers,
        "nodes": len(options.hosts) or None,
        "nodelist": ",".join(options.hosts) or None,
        "cpus-per-task": options.cpus_per_worker,
        "gpus-per-task": options.gpus_per_worker or None,
        "time": "24:00:00",
        # 120 s before the time limit, so that the state is saved.
        "signal": "USR1@120",
        "open-mode": "append",
    }
    directives = [
        f"#SBATCH --{name}={value}" for name, value in directives_by_name.items() if value
    ]
    return _SCRIPT.format(
        directives="\n".join([*directives, "#SBATCH --requeue"]),
        command=shlex.join(options.portable_command),
        max_restarts=options.max_restarts,
        requeue=REQUEUE,
        secret=SECRET,
    )


def kubernetes(options: Options) -> str:
    """Returns manifests as YAML, for `kubectl apply -f -`.

    They contain the job, a Secret that authenticates the workers' messages, and a NetworkPolicy
    that admits connections only between the job's pods, because the servers of TensorFlow, Horovod
    and Ray have no authentication.

    Raises:
        ConfigurationError: The kind of job does not support parameter servers.
    """
    kind = options.print_k8s
    if kind == "auto":
        with_mpi = options.by_horovod or options.via == "mpirun"
        kind = "rayjob" if options.via == "ray" else "mpijob" if with_mpi else "tfjob"
    if options.num_ps and kind != "tfjob":
        raise ConfigurationError(
            f"--num-ps {options.num_ps}: a {kind} does not support parameter servers. Use tfjob."
        )
    version, name, spec = {
        "tfjob": ("kubeflow.org/v1", "TFJob", _tf_job),
        "mpijob": ("kubeflow.org/v2beta1", "MPIJob", _mpi_job),
        "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", _train_job),
        "rayjob": ("ray.io/v1", "RayJob", _ray_job),
    }[str(kind)]
    job = {
        "apiVersion": version,
        "kind": name,
        "metadata": {"name": options.name},
        "spec": spec(options),
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": options.name},
        "stringData": {SECRET: secrets.token_hex(32)},
    }
    documents = [secret, _network_policy(options, str(kind)), job]
    comments = {f"claimName: {one.claim}": one.comment for one in volumes(options)}
    if options.image is None:
        comments[f"image: {_IMAGE}"] = _IMAGE_COMMENT
    if str(kind) == "trainjob":
        comments["podSpecOverrides:"] = "Kubeflow Trainer 2.0; podTemplateOverrides in 2.1"
    lines = []
    for line in yaml.safe_dump_all(documents, sort_keys=False).splitlines():
        comment = comments.get(line.strip())
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def _network_policy(options: Options, kind: str) -> dict[str, Any]:
    """Returns the policy that admits connections between pods of the job only.

    KubeRay's operator also connects to the head's dashboard, to submit a job and to query its
    state.
    """
    # The operator labels the pods of TrainJobs. Other pods are labeled by their templates.
    label = "jobset.sigs.k8s.io/jobset-name" if kind == "trainjob" else _LABEL
    pods = {"matchLabels": {label: options.name}}
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": pods}]}]
    if kind == "rayjob":
        operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": _KUBERAY}}
        ingress.append({"from": [operator], "ports": [{"port": _RAY_DASHBOARD}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": options.name},
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _environ(options: Options) -> list[dict[str, Any]]:
    """Returns the environment variables of a container: the job's secret."""
    reference = {"secretKeyRef": {"name": options.name, "key": SECRET}}
    return [{"name": SECRET, "valueFrom": reference}]


def _command(options: Options) -> list[str]:
    """Returns the command with each `$` doubled, because the kubelet expands `$(NAME)`."""
    return [word.replace("$", "$$") for word in portable_command(options)]


def _tf_job(options: Options) -> dict[str, Any]:
    """Returns a job with one pod per task; the operator sets TF_CONFIG in each."""
    counts = {"Worker": options.num_workers}
    if options.num_ps:
        counts = {"Chief": 1, **counts, "PS": options.num_ps}
    return {
        # No limit of restarts, because the operator also counts restarts after preemptions.
        "runPolicy": {"cleanPodPolicy": "Running"},
        # With a chief, the job completes with the chief.
        **({} if options.num_ps else {"successPolicy": "AllWorkers"}),
        "tfReplicaSpecs": {
            # The operator requires a container of this name.
            task: _replicas(
                options,
                number,
                _container("tensorflow", options, task == "Worker"),
                "ExitCode",
            )
            for task, number in counts.items()
        },
    }


def _mpi_job(options: Options) -> dict[str, Any]:
    """Returns a job with one pod per worker, which runs sshd, and one that runs mpirun."""
    launcher = _container("mpi-launcher", options, computes=False)
    launcher["command"] = [
        *("mpirun", "--allow-run-as-root", "-np", str(options.num_workers)),
        # Otherwise, all threads of a worker would be bound to one core.
        *("--bind-to", "none", "-x", "PATH", "-x", "LD_LIBRARY_PATH", "-x", SECRET),
        *_command(options),
    ]
    worker = _container("mpi-worker", options) | {"command": ["/usr/sbin/sshd", "-De"]}
    for container in (launcher, worker):
        # The operator mounts the keys of SSH into /root/.ssh.
        container["securityContext"] = {"runAsUser": 0}
    return {
        "slotsPerWorker": 1,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": options.max_restarts},
        "launcherCreationPolicy": "WaitForWorkersReady",
        "mpiReplicaSpecs": {
            # When one rank fails, all ranks end, and mpirun is restarted.
            "Launcher": _replicas(
                options, 1, launcher, "OnFailure" if options.max_restarts else "Never"
            ),
            "Worker": _replicas(options, options.num_workers, worker),
        },
    }


def _train_job(options: Options) -> dict[str, Any]:
    """Returns a job of training operator 2, whose runtime sets the ranks and rank 0's address."""
    trainer: dict[str, Any] = {
        "image": options.image or _IMAGE,
        "command": _command(options),
        "env": _environ(options),
        "numNodes": options.num_workers,
        "numProcPerNode": 1,
    }
    if resources := _resources(options):
        trainer["resourcesPerNode"] = resources
    job: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    if mounted := volumes(options):
        # The runtime calls both the job and its container "node".
        overrides = {
            "targetJobs": [{"name": "node"}],
            "volumes": [one.source() for one in mounted],
            "containers": [{"name": "node", "volumeMounts": [one.mount() for one in mounted]}],
        }
        job["podSpecOverrides"] = [overrides]
    return job


def _ray_job(options: Options) -> dict[str, Any]:
    """Returns a job of KubeRay: a Ray cluster with a pod per worker, and the launcher in it.

    Neither the head nor the pod that submits the job run workers. The launcher restarts workers,
    and KubeRay replaces pods. With `--elastic MIN:MAX` the job starts as soon as MIN pods run.
    """
    min_workers, max_workers = options.elastic or (options.num_workers, options.num_workers)
    flags = {
        "--gpus-per-worker": options.gpus_per_worker,
        "--cpus-per-worker": options.cpus_per_worker,
        "--max-restarts": options.max_restarts,
        "--placement": "" if options.placement == "PACK" else options.placement,
    }
    size = (
        ["--elastic", f"{min_workers}:{max_workers}"]
        if options.elastic
        else ["--num-workers", str(max_workers)]
    )
    set_flags = [word for flag, value in flags.items() if value for word in (flag, str(value))]
    launch = ["python", "-m", "tfdist.launch", "--via", "ray", *size, *set_flags, "--"]
    head = _ray_pod("ray-head", options, computes=False)
    # KubeRay uses the head's ports to find the dashboard, to which it submits the job.
    head["spec"]["containers"][0]["ports"] = [
        {"name": name, "containerPort": port}
        for name, port in (("gcs-server", 6379), ("dashboard", _RAY_DASHBOARD), ("client", 10001))
    ]
    workers = {
        "groupName": "workers",
        "replicas": max_workers,
        "minReplicas": min_workers,
        "maxReplicas": max_workers,
        "rayStartParams": {},
        "template": _ray_pod("ray-worker", options, computes=True),
    }
    return {
        "entrypoint": shlex.join([*launch, *portable_command(options)]),
        "shutdownAfterJobFinishes": True,
        "submissionMode": "HTTPMode",
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head},
            "workerGroupSpecs": [workers],
        },
    }


def _ray_pod(name: str, options: Options, computes: bool) -> dict[str, Any]:
    """Returns the template of a pod whose command KubeRay sets."""
    container = _container(name, options, computes)
    del container["command"]
    return _pod(options, container)


def _pod(options: Options, container: dict[str, Any]) -> dict[str, Any]:
    """Returns the template of a pod with one container."""
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": _SAVING_SECONDS,
        "containers": [container],
    }
    if mounted := volumes(options):
        spec["volumes"] = [one.source() for one in mounted]
    return {"metadata": {"labels": {_LABEL: options.name}}, "spec": spec}


def _replicas(
    options: Options, number: int, container: dict[str, Any], restart_policy: str = "Never"
) -> dict[str, Any]:
    """Returns a group of identical pods. By default, the failure of one fails the job.

    The policy `ExitCode` restarts pods that exit with a code of at least 128, such as preempted
    workers, which all stop after the same step and exit with `tfdist.errors.REQUEUE`.
    """
    return {
        "replicas": number,
        "restartPolicy": restart_policy,
        "template": _pod(options, container),
    }


def _container(name: str, options: Options, computes: bool = True) -> dict[str, Any]:
    """Returns a container that runs the command, with the resources of a worker if `computes`."""
    container: dict[str, Any] = {
        "name": name,
        "image": options.image or _IMAGE,
        "command": _command(options),
        "env": _environ(options),
    }
    if mounted := volumes(options):
        container["volumeMounts"] = [one.mount() for one in mounted]
    if computes and (resources := _resources(options)):
        container["resources"] = resources
    return container


def _resources(options: Options) -> dict[str, Any]:
    limits = {"cpu": options.cpus_per_worker, "nvidia.com/gpu": options.gpus_per_worker}
    nonzero = {resource: number for resource, number in limits.items() if number}
    return {"limits": nonzero} if nonzero else {}


@dataclass(frozen=True)
class Volume:
    """A volume of the pods.

    Attributes:
        name: Name in the manifest.
        claim: Name of the PersistentVolumeClaim, which the user creates.
        path: Mount path in the containers.
        comment: A comment for the user who creates the claim.
    """

    name: str
    claim: str
    path: str
    comment: str

    def source(self) -> dict[str, Any]:
        """Returns the volume of a pod."""
        return {"name": self.name, "persistentVolumeClaim": {"claimName": self.claim}}

    def mount(self) -> dict[str, Any]:
        """Returns the mount of a container."""
        return {"name": self.name, "mountPath": self.path}


def volumes(options: Options) -> list[Volume]:
    """Returns the volumes for the folders of the command. Object stores need no volume.

    Raises:
        ConfigurationError: A folder of the training command is not an absolute path.
    """
    runs: PurePosixPath | None = _RUNS
    data: PurePosixPath | None = _DATA
    if options.is_training_command:
        runs, data = _folder(options.command, "run_dir", _RUNS), _data_folder(options.command)
    mounts = []
    if runs:
        comment = "your claim, with ReadWriteMany: all pods write run folders to it"
        mounts.append(Volume("runs", f"{options.name}-runs", str(runs), comment))
    if data and data != runs:
        comment = "your claim with the data; all pods must be able to mount it"
        mounts.append(Volume("data", f"{options.name}-data", str(data), comment))
    return mounts


def portable_command(options: Options) -> tuple[str, ...]:
    """Returns the command for pods. A training command uses folders on the volumes.

    Raises:
        ConfigurationError: A folder of the training command is not an absolute path.
    """
    command = options.portable_command
    if not options.is_training_command:
        return command
    data = _data_folder(command)
    if not settings_file.setting(command, "run_dir"):
        command += ("--run-dir", str(_RUNS / options.name))
    if data and not settings_file.setting(command, "data_dir"):
        command += ("--data-dir", str(data / "packed"))
    return command


def _data_folder(command: tuple[str, ...]) -> PurePosixPath | None:
    """Returns the mount path for data: the parent of the folder `--data`, or of `--data-dir`."""
    data = settings_file.setting(command, "data")
    is_folder = data and data.value not in _BUILT_IN and not str(data.value).startswith("tfds:")
    return _folder(command, "data" if is_folder else "data_dir", _DATA)


def _folder(command: tuple[str, ...], field: str, default: PurePosixPath) -> PurePosixPath | None:
    """Returns the parent of the folder in a field, or the default if unset, or None for a URL."""
    setting = settings_file.setting(command, field)
    if setting is None:
        return default
    if "://" in str(setting.value):
        return None
    path = PurePosixPath(str(setting.value))
    if not path.is_absolute():
        raise ConfigurationError(
            f"{setting.place} {setting.value}: pods mount volumes at absolute paths. Use an "
            f"absolute path such as {default / path.name}."
        )
    return path.parent if path.parent != PurePosixPath("/") else path
