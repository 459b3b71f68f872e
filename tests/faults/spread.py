"""One bundle on each node of a Ray cluster: `python -m tests.faults.spread ADDRESS COUNT` prints
where the bundles lie, then `lost` and the address of the first node that Ray gives up.
"""

import sys
import time

import ray
from ray.util.placement_group import placement_group, placement_group_table

PLACED_S, LOST_S = 30.0, 60.0


def main() -> None:
    """Place the bundles, then watch the nodes."""
    address, count = sys.argv[1], int(sys.argv[2])
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    group = placement_group([{"CPU": 1}] * count, strategy="STRICT_SPREAD")
    if not group.wait(PLACED_S):
        raise TimeoutError(f"no bundle on each of {count} nodes within {PLACED_S:g} s")
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = placement_group_table(group)["bundles_to_node_id"].values()
    print("placed", *sorted(addresses[node] for node in nodes), flush=True)
    end = time.monotonic() + LOST_S
    while time.monotonic() < end:
        if dead := [node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"]]:
            print("lost", *dead, flush=True)
            return
        time.sleep(0.2)


if __name__ == "__main__":
    main()
