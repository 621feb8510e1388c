"""Tensor parallelism: the channels, heads and columns of layers over the devices of a process."""
