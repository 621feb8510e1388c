"""Devices of other hosts, which TensorFlow's own runtime computes on: `HOST:PORT/GPU:0`.

`tfdist remote PORT` serves the devices of a host. `connection` connects a training
process to such servers, whose devices `names` describes; `heartbeat` starts a process that runs
`probe`, which finds servers that no longer answer.
"""
