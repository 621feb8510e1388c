"""`tfdist remote PORT`: serves the devices of this host to one training."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence

from jsonargparse.typing import PositiveInt

from tfdist.cluster import networks
from tfdist.console import command
from tfdist.errors import ConfigurationError

_DESCRIPTION = "Serves the devices of this host to a training that names them."


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and returns its exit code."""
    parser = command.parser("tfdist remote", _DESCRIPTION)
    parser.add_argument(
        "port", metavar="PORT", type=int, help="port to listen at, on all interfaces"
    )
    parser.add_argument(
        "--cpus", type=PositiveInt, default=1, metavar="N", help="number of logical CPU devices"
    )
    parser.add_argument(
        "--public", action="store_true", help="serve although a public address is one of this host"
    )
    values = command.parse(parser, arguments)
    networks.check_free(f"0.0.0.0:{values.port}")
    _check_private([address for address, _ in networks.this_host().interfaces], values.public)

    import tensorflow as tf

    options = tf.compat.v1.ConfigProto(device_count={"CPU": values.cpus})
    options.gpu_options.allow_growth = True
    job = {"device_server": [f"localhost:{values.port}"]}
    server = tf.distribute.Server(job, "device_server", 0, "grpc", options)
    gpus = len(tf.config.get_visible_devices("GPU"))
    devices = [f"GPU:{i}" for i in range(gpus)] + [f"CPU:{i}" for i in range(values.cpus)]
    print(f"Process {os.getpid()} serves {', '.join(devices)} at port {values.port}.", flush=True)
    server.join()


def _check_private(addresses: Sequence[str], public: bool) -> None:
    """Refuses to listen at addresses that the internet may reach."""
    reachable = [address for address in addresses if ipaddress.ip_address(address).is_global]
    if not reachable:
        return
    if not public:
        raise ConfigurationError(
            f"{', '.join(reachable)} of this host is a public address, and whoever reaches the "
            "server can run any computation: TensorFlow has no authentication and listens at all "
            "addresses. Use a host in a private network, or block the port with a firewall and "
            "add --public."
        )
    print(
        f"warning: anyone who reaches {', '.join(reachable)} can run computations on this host.",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
