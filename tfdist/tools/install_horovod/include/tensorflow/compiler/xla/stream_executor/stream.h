// Stands in for TensorFlow's header of this name: see the README of tfdist/tools/install_horovod.
// Horovod's mpi_ops.cc includes it on GPU builds, and declares AsGpuStreamValue right before.
// TensorFlow no longer has that function; a stream tells its handle itself.
#pragma once

#include "xla/stream_executor/stream.h"

#if HAVE_GPU
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
#endif // HAVE_GPU
