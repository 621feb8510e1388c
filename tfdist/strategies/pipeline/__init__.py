"""Pipeline parallelism: the layers of a model over the devices of a process, in stages."""
