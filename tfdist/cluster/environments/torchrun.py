"""The variables of `torchrun`, which training operators of Kubernetes and users set, too."""

from __future__ import annotations

from tfdist.cluster.environments.base import Variables
from tfdist.cluster.record import Environ, number


class Torchrun(Variables):
    """Processes that torchrun started, with local ranks. DeepSpeed and Azure ML imitate it."""

    def _port(self, environ: Environ) -> int:
        port = number(environ, self.port, 0)
        # torchrun itself listens at the port.
        uses = environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        return port + (1 if port < 65535 else -1) if uses and port else super()._port(environ)


class TrainJob(Variables):
    """Pods of a TrainJob, of which each may start torchrun. Their number may be a range."""

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the rank if the number of pods is fixed."""
        return super().detect(environ) if environ.get(self.size, "").isdigit() else ""


_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = Torchrun("torchrun", *_RANKS, required="LOCAL_RANK")
#: A PyTorchJob has one process per pod. Users also set these variables for each process.
PYTORCH_JOB = Variables("MASTER_ADDR", *_RANKS, required="WORLD_SIZE", absent=("LOCAL_RANK",))
TRAIN_JOB = TrainJob(
    "TrainJob",
    "PET_NODE_RANK",
    "PET_NNODES",
    master="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
    required="PET_NNODES",
)
