"""Devices of other hosts, which TensorFlow's own runtime computes on: `HOST:PORT/GPU:0`.

`python -m tfdist.remote PORT` serves the devices of a host. `connection` connects a training
process to such servers and names their devices; `heartbeat` finds servers that no longer answer.
"""
