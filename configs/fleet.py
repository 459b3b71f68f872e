"""The sections `fleet` and `cluster`: a run's processes started again, and the nodes that they
run on. A leaf module.
"""

from typing import Annotated

from configs.section import OF_THE_MACHINE, REACHES_OUT, InputPath, NonNegative, Seconds, Section

Span = Annotated[Seconds, OF_THE_MACHINE]


class FleetConfig(Section, frozen=True):
    """The launcher's restarts of a process that ends or stands still, and its forecast of the
    disk's room.
    """

    # Of each process within the window, or without a new step between them; then an actor rests
    # while others serve, and the run ends where none does, or with any other process
    restarts: Annotated[NonNegative, OF_THE_MACHINE] = 8
    restarts_window_s: Span = 3600.0  # the window
    first_pause_s: Span = 0.5  # before a restart; doubled each time one ends soon again
    longest_pause_s: Span = 30.0  # to which it is doubled
    # From the start of a process until it is ready, without what it waits for others: an index of
    # millions of passages is built meanwhile. For replay, since it last got on with its log
    start_deadline_s: Span = 7200.0
    stopped_deadline_s: Span = 300.0  # how long a process may be stopped (SIGSTOP)
    silence_deadline_s: Span = 30.0  # how long replay may give the launcher no answer
    disk_warning_s: Span = 86400.0  # where the disk fills sooner, the console says so


class ClusterConfig(Section, frozen=True):
    """The nodes of a run: those of a Ray cluster that the launcher's machine is one of. Raises
    ValueError for an address that is none, and for nodes without one.
    """

    # Of Ray's head, HOST:PORT, or auto (the cluster that Ray finds here); empty: this machine alone
    address: Annotated[str, OF_THE_MACHINE, REACHES_OUT] = ""
    # Nodes, by the address or the name that Ray tells, that may have ranks, of those that hold as
    # many the first; empty: the launcher's, or any where there is cluster.shared
    learner: Annotated[tuple[str, ...], OF_THE_MACHINE] = ()
    actors: Annotated[tuple[str, ...], OF_THE_MACHINE] = ()  # that may have actors; empty: any
    # Own servers on each node that has actors; 0: one in all, beside the launcher
    retrieval_replicas: Annotated[NonNegative, OF_THE_MACHINE] = 1
    # A folder that all nodes see, with run_dir in it: so the learner may run on several, and move
    shared: Annotated[InputPath, OF_THE_MACHINE] = ""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        known = host and "/" not in host and port.isdigit() and 0 < int(port) < 1 << 16
        if self.address not in ("", "auto") and not known:
            raise ValueError(
                f"cluster.address = {self.address!r} is no Ray cluster: give 'auto', or HOST:PORT "
                "as `ray start --head --port=PORT` says on its first node"
            )
        for field in ("learner", "actors", "shared"):
            if (value := getattr(self, field)) and not self.address:
                raise ValueError(
                    f"cluster.{field} = {value!r} acts on nothing on this machine alone: set "
                    "cluster.address to 'auto', or leave it out"
                )
