"""Sums rank + 1 over all ranks with Horovod, and prints the result and the host."""

import socket

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
total = hvd.allreduce(tf.fill([1000], hvd.rank() + 1.0), op=hvd.Sum)
controller = "MPI" if hvd.mpi_enabled() else "Gloo"
place = f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}"
print(f"{place} over {controller}: {float(total[-1])}", flush=True)
