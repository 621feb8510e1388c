"""Manifests for Kubernetes: a TFJob of the training operator, or an MPIJob of the MPI operator."""

from __future__ import annotations

from typing import Any

import yaml

from tfdist.launcher.options import Options

_API = {"TFJob": "kubeflow.org/v1", "MPIJob": "kubeflow.org/v2beta1"}


def manifest(options: Options) -> str:
    """Returns the manifest as YAML for `kubectl apply -f -`."""
    with_mpi = options.strategy == "horovod" or options.via == "mpirun"
    kind = options.print_k8s if options.print_k8s != "auto" else "mpijob" if with_mpi else "tfjob"
    spec = _mpi_job(options) if kind == "mpijob" else _tf_job(options)
    name = "MPIJob" if kind == "mpijob" else "TFJob"
    whole = {
        "apiVersion": _API[name],
        "kind": name,
        "metadata": {"name": options.name},
        "spec": spec,
    }
    return yaml.safe_dump(whole, sort_keys=False)


def _tf_job(options: Options) -> dict[str, Any]:
    """One pod a task; the operator tells each its TF_CONFIG."""
    counts = {"Worker": options.num_workers}
    if options.num_ps:
        counts = {"Chief": 1, **counts, "PS": options.num_ps}
    return {
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "tfReplicaSpecs": {
            # The operator knows the container by this name.
            task: _replicas(number, _container("tensorflow", options, task != "PS"))
            for task, number in counts.items()
        },
    }


def _mpi_job(options: Options) -> dict[str, Any]:
    """One pod a worker, with sshd, and one that runs mpirun, which the operator gives the hosts."""
    launcher = _container("mpi-launcher", options, with_gpus=False)
    launcher["command"] = [
        "mpirun",
        "--allow-run-as-root",
        *("-np", str(options.num_workers)),
        *("--bind-to", "none"),
        *("-x", "PATH", "-x", "LD_LIBRARY_PATH"),
        *launcher["command"],
    ]
    launcher.pop("resources", None)  # it computes nothing
    worker = _container("mpi-worker", options) | {"command": ["/usr/sbin/sshd", "-De"]}
    return {
        "slotsPerWorker": 1,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "launcherCreationPolicy": "WaitForWorkersReady",
        "mpiReplicaSpecs": {
            "Launcher": _replicas(1, launcher),
            "Worker": _replicas(options.num_workers, worker),
        },
    }


def _replicas(number: int, container: dict[str, Any]) -> dict[str, Any]:
    """Pods that are alike. One that fails fails the job: the others could not go on."""
    return {
        "replicas": number,
        "restartPolicy": "Never",
        "template": {"spec": {"containers": [container]}},
    }


def _container(name: str, options: Options, with_gpus: bool = True) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": options.image,
        "command": list(options.elsewhere),
    }
    limits: dict[str, int] = {}
    if options.cpus_per_worker:
        limits["cpu"] = options.cpus_per_worker
    if options.gpus_per_worker and with_gpus:
        limits["nvidia.com/gpu"] = options.gpus_per_worker
    return container | ({"resources": {"limits": limits}} if limits else {})
