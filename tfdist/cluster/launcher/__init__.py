"""The parts of `python -m tfdist.launch`. Imports no TensorFlow.

`options` parses the command line, `plan` computes the processes of a run, and `processes` runs them
on this host, with `restarts` after failures. `manifests` and `mpirun` create the scripts, manifests
and command lines for Slurm, Kubernetes, mpirun and horovodrun. `worker_pool` starts workers that
handle requests, for notebooks, benchmarks and tests.
"""
