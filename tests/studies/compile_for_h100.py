"""Compiles HLO for an H100 without one, by jax's plug-in for CUDA: `compile_for_h100.py FILE`.

For `tests.studies.launches`, in a Python with jax 0.9. Writes the optimized module to FILE.txt.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132
  fpus_per_core: 128  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535
  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84942979072  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 3 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def main(path: Path) -> None:
    """Compiles the serialized module of a file."""
    xla_bridge.discover_pjrt_plugins()
    topology = topologies.get_topology_desc("h100", "cuda", target_config=_H100, topology="1x1x1")
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(
        xla_client.XlaComputation(path.read_bytes())
    )
    # jax parses StableHLO only; a copy is a reshape to the same shape there.
    unary = r'(?:"mhlo\.copy"\((%[\w#.]+)\)|mhlo\.copy (%[\w#.]+))(?: \{[^}]*\})? : '
    text = re.sub(
        unary + r"(?:\((tensor<[^>]*>)\) -> tensor<[^>]*>|(tensor<[^>]*>))",
        lambda m: f"stablehlo.reshape {m[1] or m[2]} : ({m[3] or m[4]}) -> {m[3] or m[4]}",
        text,
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    device = topology.devices[0]
    began = time.process_time()
    options = xla_client.CompileOptions()
    compiled = device.client.compile(module, xla_client.DeviceList((device,)), options)
    print(f"compiled in {time.process_time() - began:.0f} s of processor time")
    path.with_suffix(".txt").write_text(compiled.hlo_modules()[0].to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
