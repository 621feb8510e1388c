"""Builds Horovod against the installed TensorFlow and installs it. Imports no TensorFlow.

The README in this folder explains why Horovod needs it.
"""
