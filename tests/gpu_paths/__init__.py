"""Properties that training on GPUs needs, shown without a GPU.

TensorFlow's wheel contains the CUDA kernels' registrations and all op definitions, and logical CPU
devices are placed as GPUs are: the graph of a step shows most of what would crash, hang or be slow.
"""
