"""The Ray cluster that the user has started: joining it, and what its head says of the nodes."""

import contextlib
import os
import textwrap
from collections.abc import Iterator

import ray

from configs.load import ConfigError
from scripts.fleet import head
from scripts.fleet.host import FleetError
from scripts.fleet.nodes import Node
from scripts.fleet.place import watched

SAID = 300  # characters of what Ray says, which may be a page


def connect(address: str, wait_s: float = 0.0) -> None:
    """Be a driver of the cluster there, for whose head so long is waited. Raises ConfigError."""
    if not (token := head.token()):
        os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        at = head.awaited(address, token, wait_s)
        with watched(f"joining the Ray cluster at {at}"):
            ray.init(address=at, log_to_driver=False, configure_logging=False)
    except head.NoHead as error:
        raise ConfigError(f"cluster.address = {address!r}: {error}") from error
    except Exception as error:  # Ray raises many kinds
        said = textwrap.shorten(str(error) or type(error).__name__, SAID).rstrip(".")
        raise ConfigError(
            f"cluster.address = {address!r}: {said}: start Ray on this machine too (deploy/ray.sh "
            "worker HEAD), with the token of here"
        ) from error


def alive() -> list[tuple[Node, str]]:
    """The nodes that Ray counts as alive and that are not to go, with its ids."""
    found, leave = [], to_go()
    with head_answers():
        told, left = ray.nodes(), ray._private.state.available_resources_per_node()
    for each in told:
        if each["Alive"] and (node_id := each["NodeID"]) not in leave:
            has = each["Resources"]
            address, name = each["NodeManagerAddress"], each["NodeManagerHostname"]
            gpus = int(has.get("GPU", 0))
            # Ray leaves out what there is none of, and nodes of which it does not know yet.
            free = int(left[node_id].get("GPU", 0)) if node_id in left else gpus
            node = Node(address, name, gpus, has.get("CPU", 0.0), gpus - free)
            found.append((node, node_id))
    return found


def to_go() -> dict[str, float]:
    """Ray's ids of the nodes that are drained, each with the time in seconds since the epoch when
    it ends; 0: it is not known.
    """
    # What `ray drain-node`, autoscalers and pre-emption hooks say; no public function tells it.
    with head_answers():
        at_ms = ray._private.state.state.get_draining_nodes()
    return {node_id: ms / 1e3 for node_id, ms in at_ms.items()}


@contextlib.contextmanager
def head_answers() -> Iterator[None]:
    """Have what Ray raises inside be a FleetError."""
    try:
        yield
    except Exception as error:  # Ray raises many kinds
        raise FleetError(f"Ray's head does not answer: {error}") from error
