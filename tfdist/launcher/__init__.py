"""The parts of `python -m tfdist.launch`. Imports no TensorFlow.

`options` reads the command line, `plan` says which processes a run has, and `processes` runs them
on this host, with `restarts` after failures. `manifests` and `mpirun` write what Slurm, Kubernetes,
mpirun and horovodrun need to run them elsewhere. `worker_pool` starts workers that answer
questions, for notebooks, benchmarks and tests.
"""
