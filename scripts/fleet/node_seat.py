"""The seat of a host on a node of the cluster: a placement group of its own, pinned to the node,
holds its GPUs from before the run starts until its process has left for good.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scripts.fleet.host import FleetError
from scripts.fleet.place import Seat
from scripts.fleet.post import LOOK_S, Post, how_soon

_SLIVER = 0.001  # of a node's own resource: it pins, and takes nothing


class NodeSeat(Seat):
    """A host's place on a node, for as long as the node is there without a break. `held`: the GPUs
    that Ray has given it.
    """

    look_s = LOOK_S

    def __init__(self, post: Post, directory: Path, gpus: int) -> None:
        super().__init__(directory)
        self.post, self.held, self._gpus = post, 0, gpus
        self._group: PlacementGroup | None = None

    @property
    def gone(self) -> str:  # type: ignore[override]
        """Why its node is given up; ''."""
        return self.post.gone

    @property
    def node_id(self) -> str:  # type: ignore[override]
        """Ray's, drawn anew each time that the node comes."""
        return self.post.node_id

    @property
    def leaving(self) -> str:  # type: ignore[override]
        """That its node is to go, and how soon; ''."""
        return self.post.leaving and f"{self.post.leaving}{how_soon(self.post.leaves_at)}"

    @property
    def leaves_at(self) -> float:  # type: ignore[override]
        """When that is, where it is known; 0."""
        return self.post.leaves_at

    def reserve(self) -> PlacementGroup:
        """Ask Ray for what it holds, once."""
        if self._group is None:
            bundle = {f"node:{self.post.node.address}": _SLIVER}
            bundle |= {"GPU": self._gpus} if self._gpus else {}
            self._group = placement_group([bundle])
        return self._group

    def granted(self, deadline_s: float) -> bool:
        """True once Ray has given it what it holds."""
        granted = bool(self.reserve().wait(deadline_s))
        self.held = self._gpus if granted else 0
        return granted

    def options(self) -> dict[str, Any]:
        """In its placement group, which keeps its GPUs while it is started again."""
        group = self.reserve()
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return {"scheduling_strategy": strategy, "num_gpus": self._gpus}

    def tail(self, log: Path, offset: int) -> str:
        """What a log on the node has from there on."""
        with contextlib.suppress(FleetError):
            return str(self.post.ask("tail", str(log), offset))
        return ""

    def why_not(self) -> str:
        """Whether others hold what it needs."""
        return "" if self._group is None or self._group.wait(0) else self.lacking

    @property
    def lacking(self) -> str:
        """What is said where Ray does not give it what it holds."""
        what = {0: "room", 1: "GPU"}.get(self._gpus, f"{self._gpus} GPUs")
        return f"Ray has no {what} left for it on node {self.post.node.shown}: see `ray status`"

    def leave(self) -> None:
        """Give up what it holds, and end what still runs in it."""
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)
            self._group, self.held = None, 0


def refusals(seats: Mapping[str, NodeSeat], deadline_s: float) -> Iterator[str]:
    """Have Ray reserve all of these, by the names of their processes; yield those for which it has
    nothing by then.
    """
    for seat in seats.values():
        seat.reserve()
    end = time.monotonic() + deadline_s
    for name, seat in seats.items():
        if not seat.granted(max(0.0, end - time.monotonic())):
            yield f"{name}: {seat.lacking}, and start again once others have left"
