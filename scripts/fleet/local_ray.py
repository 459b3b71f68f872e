"""Ray on this machine, for one run alone: what places processes, and nothing beside that."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private import services
from ray._private.node import Node

LOOPBACK = "127.0.0.1"
MONITOR = "RAY_memory_monitor_refresh_ms"  # 0: Ray does not look at memory
METRICS = "RAY_enable_metrics_collection"  # 0: no port for a collector
# Starts of its dashboard, which `ray.init` waits for, its autoscaler and its forwarder of logs:
# each takes a second of a core while the run's processes start, and 80 MB. No option spares them.
UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")


def start_ray(cores: int | None, folder: Path) -> None:
    """Start Ray on so many cores, its session in a folder of the caller's; it says nothing, and
    listens on the loopback alone, for no collector of metrics.
    """
    os.environ[METRICS] = "0"
    with _without_unused(), _at_the_loopback():
        ray.init(
            num_cpus=cores,
            _node_ip_address=LOOPBACK,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=100 << 20,
            _temp_dir=str(folder),
        )


@contextlib.contextmanager
def _without_unused() -> Iterator[None]:
    kept = {name: getattr(Node, name) for name in UNUSED}
    for name in UNUSED:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start in kept.items():
            setattr(Node, name, start)


@contextlib.contextmanager
def _at_the_loopback() -> Iterator[None]:
    """Have Ray take the loopback as this node's address: it would put its address in a network in
    that place, and then listen on all.
    """
    kept = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = kept
