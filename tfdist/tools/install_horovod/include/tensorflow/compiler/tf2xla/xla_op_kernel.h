// Stands in for TensorFlow's header of this name: see the README of tfdist/tools/install_horovod.
// It is the first that Horovod's xla_mpi_ops.cc includes, and all of that file that follows is
// kept only where HAVE_GPU is set. No other file of Horovod includes it.
#undef HAVE_GPU
