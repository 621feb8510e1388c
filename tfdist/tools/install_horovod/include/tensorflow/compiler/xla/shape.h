// Stands in for TensorFlow's header of this name: see the README of tfdist/tools/install_horovod.
