"""Ray on this machine, for one run alone: what places processes, and nothing beside that."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private.node import Node

MONITOR = "RAY_memory_monitor_refresh_ms"  # 0: Ray does not look at memory
# Starts of its dashboard, which `ray.init` waits for, its autoscaler and its forwarder of logs:
# each takes a second of a core while the run's processes start, and 80 MB. No option spares them.
UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")


def start_ray(cores: int | None, folder: Path) -> None:
    """Start Ray on so many cores, its session in a folder of the caller's; it says nothing."""
    with _without_unused():
        ray.init(
            num_cpus=cores,
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
