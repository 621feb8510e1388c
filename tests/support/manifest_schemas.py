"""JSON schemas of the Kubernetes resources that manifests use, rewritten from the definitions.

From Kubeflow's training operator 1.9 (TFJob v1), trainer 2.0 (TrainJob v1alpha1) and MPI operator
0.7 (MPIJob v2beta1). Fields that are not listed do not exist there, or are not used.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "integer", "minimum": 0}
WORDS: Schema = {"type": "array", "items": {"type": "string"}}


def record(required: str, **fields: Schema) -> Schema:
    """Returns the schema of an object with exactly these fields."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def pod(**fields: Schema) -> Schema:
    """Returns the schema of a pod whose containers have these fields besides the usual ones."""
    container = record(
        "name",
        name=TEXT, image=TEXT, env=VARIABLES, resources=RESOURCES, volumeMounts=MOUNTS, **fields,
    )  # fmt: skip
    return record(
        "spec",
        metadata=record("labels", labels={"type": "object", "additionalProperties": TEXT}),
        spec=record(
            "containers",
            containers=array(container, minItems=1),
            terminationGracePeriodSeconds=NUMBER,
            volumes=VOLUMES,
        ),
    )


QUANTITIES: Schema = {
    "type": "object",
    "additionalProperties": {"type": ["integer", "string"], "minimum": 1},
}
RESOURCES = record("", limits=QUANTITIES, requests=QUANTITIES)
REFERENCE = record("secretKeyRef", secretKeyRef=record("name key", name=TEXT, key=TEXT))
VARIABLES = array(record("name valueFrom", name=TEXT, valueFrom=REFERENCE))
PATH: Schema = {"type": "string", "pattern": "^/[^:]*$"}
MOUNTS = array(record("name mountPath", name=TEXT, mountPath=PATH))
CLAIM = record("claimName", claimName=TEXT)
VOLUMES = array(record("name persistentVolumeClaim", name=TEXT, persistentVolumeClaim=CLAIM))
POD = pod(command=WORDS, securityContext=record("", runAsUser=NUMBER))
RAY_POD = pod(ports=array(record("containerPort", containerPort=NUMBER, name=TEXT)))
REPLICAS = record(
    "replicas template",
    replicas=NUMBER,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=POD,
)
RUN_POLICY = record("", cleanPodPolicy={"enum": ["All", "Running", "None"]}, backoffLimit=NUMBER)


def job(kind: str, version: str, spec: Schema) -> Schema:
    """Returns the schema of a whole resource."""
    # Names become parts of host names.
    name: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
    return record(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=record("name", name=name),
        spec=spec,
    )


#: Of trainer 2.0.
OVERRIDES = record(
    "targetJobs",
    targetJobs=array(record("name", name=TEXT)),
    volumes=VOLUMES,
    containers=array(record("name", name=TEXT, volumeMounts=MOUNTS)),
)
RAY_PARAMS: Schema = {"type": "object", "additionalProperties": TEXT}
RAY_WORKERS = record(
    "groupName replicas rayStartParams template",
    groupName=TEXT,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    rayStartParams=RAY_PARAMS,
    template=RAY_POD,
)

JOBS = {
    "tfjob": job(
        "TFJob",
        "kubeflow.org/v1",
        record(
            "tfReplicaSpecs",
            runPolicy=RUN_POLICY,
            successPolicy={"enum": ["", "AllWorkers"]},
            tfReplicaSpecs=record("Worker", Chief=REPLICAS, Worker=REPLICAS, PS=REPLICAS),
        ),
    ),
    "mpijob": job(
        "MPIJob",
        "kubeflow.org/v2beta1",
        record(
            "mpiReplicaSpecs",
            slotsPerWorker=NUMBER,
            runPolicy=RUN_POLICY,
            launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
            mpiReplicaSpecs=record("Launcher Worker", Launcher=REPLICAS, Worker=REPLICAS),
        ),
    ),
    "trainjob": job(
        "TrainJob",
        "trainer.kubeflow.org/v1alpha1",
        record(
            "runtimeRef",
            runtimeRef=record("name", name=TEXT),
            podSpecOverrides=array(OVERRIDES),
            trainer=record(
                "",
                image=TEXT,
                command=WORDS,
                env=VARIABLES,
                numNodes=NUMBER,
                numProcPerNode={"type": ["integer", "string"]},
                resourcesPerNode=RESOURCES,
            ),
        ),
    ),
    "rayjob": job(
        "RayJob",
        "ray.io/v1",
        record(
            "entrypoint rayClusterSpec",
            entrypoint=TEXT,
            shutdownAfterJobFinishes={"type": "boolean"},
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
            rayClusterSpec=record(
                "headGroupSpec",
                headGroupSpec=record("template", rayStartParams=RAY_PARAMS, template=RAY_POD),
                workerGroupSpecs=array(RAY_WORKERS),
            ),
        ),
    ),
}
