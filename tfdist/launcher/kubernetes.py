"""Manifests for Kubernetes: jobs of the training operator and of the MPI operator."""

from __future__ import annotations

from typing import Any

import yaml

from tfdist.errors import ConfigurationError
from tfdist.launcher.options import Options

#: For a pod to come to the end of a step and save, between SIGTERM and SIGKILL.
_SAVING_SECONDS = 120


def manifest(options: Options) -> str:
    """Returns the manifest as YAML, for `kubectl apply -f -`.

    Raises:
        ConfigurationError: Parameter servers for a kind of job that has none.
    """
    kind = options.print_k8s
    if kind == "auto":
        with_mpi = options.by_horovod or options.via == "mpirun"
        kind = "mpijob" if with_mpi else "tfjob"
    if options.num_ps and kind != "tfjob":
        raise ConfigurationError(f"--num-ps {options.num_ps}: only a tfjob has them, not {kind}.")
    version, name, spec = {
        "tfjob": ("kubeflow.org/v1", "TFJob", _tf_job),
        "mpijob": ("kubeflow.org/v2beta1", "MPIJob", _mpi_job),
        "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", _train_job),
    }[str(kind)]
    whole = {
        "apiVersion": version,
        "kind": name,
        "metadata": {"name": options.name},
        "spec": spec(options),
    }
    return yaml.safe_dump(whole, sort_keys=False)


def _tf_job(options: Options) -> dict[str, Any]:
    """One pod a task; the operator tells each its TF_CONFIG."""
    counts = {"Worker": options.num_workers}
    if options.num_ps:
        counts = {"Chief": 1, **counts, "PS": options.num_ps}
    return {
        # Without a limit: the operator would count what it starts again after a preemption.
        "runPolicy": {"cleanPodPolicy": "Running"},
        # With a chief the job is done when the chief is.
        **({} if options.num_ps else {"successPolicy": "AllWorkers"}),
        "tfReplicaSpecs": {
            # The operator knows the container by this name.
            task: _replicas(number, _container("tensorflow", options, task == "Worker"), "ExitCode")
            for task, number in counts.items()
        },
    }


def _mpi_job(options: Options) -> dict[str, Any]:
    """One pod a worker, with sshd, and one that runs mpirun, which the operator gives the hosts."""
    launcher = _container("mpi-launcher", options, computes=False)
    launcher["command"] = [
        *("mpirun", "--allow-run-as-root", "-np", str(options.num_workers)),
        # Bound to one core each, the threads of a worker would share it.
        *("--bind-to", "none", "-x", "PATH", "-x", "LD_LIBRARY_PATH"),
        *options.elsewhere,
    ]
    worker = _container("mpi-worker", options) | {"command": ["/usr/sbin/sshd", "-De"]}
    return {
        "slotsPerWorker": 1,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": options.max_restarts},
        "launcherCreationPolicy": "WaitForWorkersReady",
        "mpiReplicaSpecs": {
            # All ranks end when one fails: mpirun is what starts them again.
            "Launcher": _replicas(1, launcher, "OnFailure" if options.max_restarts else "Never"),
            "Worker": _replicas(options.num_workers, worker),
        },
    }


def _train_job(options: Options) -> dict[str, Any]:
    """Version 2 of the training operator: its runtime tells ranks and the address of rank 0."""
    trainer: dict[str, Any] = {
        "image": options.image,
        "command": list(options.elsewhere),
        "numNodes": options.num_workers,
        "numProcPerNode": 1,
    }
    if resources := _resources(options):
        trainer["resourcesPerNode"] = resources
    return {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}


def _replicas(
    number: int, container: dict[str, Any], restart_policy: str = "Never"
) -> dict[str, Any]:
    """Equal pods. One that fails fails the job: the others could not go on.

    By the policy `ExitCode` what ends with 128 or more starts again: a worker that was preempted,
    with all others, which stopped after the same step and end with `tfdist.errors.REQUEUE`.
    """
    pod = {"terminationGracePeriodSeconds": _SAVING_SECONDS, "containers": [container]}
    return {
        "replicas": number,
        "restartPolicy": restart_policy,
        "template": {"spec": pod},
    }


def _container(name: str, options: Options, computes: bool = True) -> dict[str, Any]:
    """A container that runs the command, with a worker's resources if it is one."""
    container: dict[str, Any] = {
        "name": name,
        "image": options.image,
        "command": list(options.elsewhere),
    }
    if computes and (resources := _resources(options)):
        container["resources"] = resources
    return container


def _resources(options: Options) -> dict[str, Any]:
    """What the flags give each worker; empty where they do not say."""
    limits = {"cpu": options.cpus_per_worker, "nvidia.com/gpu": options.gpus_per_worker}
    given = {resource: number for resource, number in limits.items() if number}
    return {"limits": given} if given else {}
