"""What `python -m tfdist.launch` is made of. Imports no TensorFlow.

`plan` says which processes a run has, `group` runs them on this host, and others write down what
mpirun, horovodrun, Slurm or Kubernetes need to run them elsewhere. `worker_pool` starts workers
that answer questions, for notebooks, benchmarks and tests.
"""
