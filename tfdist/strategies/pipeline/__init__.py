"""Pipeline parallelism: the layers of a model in stages, each stage on its own device."""
