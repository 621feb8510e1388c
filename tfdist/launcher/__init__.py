"""What `python -m tfdist.launch` is made of. Imports no TensorFlow.

`plan` says which processes a run has, `group` runs them on this host, and the rest writes down what
mpirun, horovodrun, Slurm or Kubernetes need to run them elsewhere.
"""
