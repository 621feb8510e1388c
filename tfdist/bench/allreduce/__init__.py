"""`python -m tfdist.bench allreduce`: how fast sums cross the replicas, by engine and size."""
