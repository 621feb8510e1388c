"""Builds Horovod against the installed TensorFlow and installs it. Imports no TensorFlow.

The README beside this file says why Horovod needs it.
"""
