"""Where a learner's ranks are: which share a host, and the interface between the hosts.

Nobody tells the ranks: each says its node when it joins, and rank 0 tells all of them.
"""

from dataclasses import dataclass

from configs.schema import LearnerConfig
from learner.errors import BadModel


@dataclass(frozen=True)
class Placement:
    """The place of this rank among all."""

    rank: int
    nodes: tuple[str, ...]  # of the ranks, in their order
    interface: str = ""  # towards the other hosts; empty: the loopback

    @classmethod
    def on_one_host(cls, rank: int, ranks: int) -> "Placement":
        """All ranks are on this machine."""
        return cls(rank, ("",) * ranks)

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its host."""
        return self.nodes[: self.rank].count(self.nodes[self.rank])

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return len(set(self.nodes))

    @property
    def ranks_per_host(self) -> int:
        """How many ranks each host has, side by side; 0 where that differs."""
        ranks, hosts = len(self.nodes), self.hosts
        each, over = divmod(ranks, hosts)
        blocks = [self.nodes[first : first + each] for first in range(0, ranks, each)]
        return 0 if over or any(len({*block}) > 1 for block in blocks) else each

    def secondary_partition(self, config: LearnerConfig) -> int:
        """Ranks over which each host holds a copy of the weights of ZeRO 3, to gather them from for
        every pass but the first after a step (ZeRO++'s hpZ); 1: no such copy.

        Raises BadModel where `learner.hierarchical` asks for it and it cannot be.
        """
        if not config.hierarchical:
            return 1
        each = self.ranks_per_host
        if self.hosts == 1 or each < 2:
            raise BadModel(
                f"learner.hierarchical = True: {len(self.nodes)} ranks on {self.hosts} nodes"
                f"{'' if each else ', unequally'}: it needs several nodes and on each as many "
                "ranks, two or more, with numbers in a row: place them so, or leave it out"
            )
        return each
