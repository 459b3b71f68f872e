"""The load of `forage bench stream`: simulated actors, and a stand-in for the learner.

`python -m scripts.bench.stream.load PLAN` (JSON of a LoadPlan or a Drain) is one process. Each
actor has a DEALER socket, says Hello and Ready, beats its heart, takes leases, delivers a rollout
for each and awaits its acknowledgement; as the learner goes on, all say Ready with its version.
When all has been measured they deliver nothing more, and leave on Stop. Saturated, an actor keeps
`window` deliveries under way; else it delivers one every `every_s` seconds, timed from the moment
at which it was due. Every wait has a deadline.
"""

import heapq
import json
import select
import sys
import time
from array import array
from collections import Counter, deque
from pathlib import Path

import msgspec
import zmq

from configs.runtime.files import replacing, write_durably
from configs.runtime.process import begin
from replay import protocol as wire
from replay.clients.learner import BatchReader
from replay.codec import decode_reply, decode_trajectory, encode
from scripts.bench.stream.rollouts import Template

HEARTBEAT_S = 1.0  # the schema's default
LOOK_S = 0.05  # how often the learner's step is looked at
LINGER_MS = 5000
TIMES, BEATS = ".f64", ".beats.f64"  # of a plan's `out`: when, then after so many seconds
DRAIN_DEADLINE_S = 60.0


class LoadPlan(msgspec.Struct, frozen=True, tag=True):
    """The work of one process of actors; times are seconds. The window of time measured begins
    `warm_up_s` after the last of its `peers` has had `round` acknowledgements, and lasts `seconds`.
    Peers are numbered from `first`. `every_s` 0: saturate.
    """

    endpoint: str
    step_file: str  # the learner's last step, decimal
    out: str  # where the figures go
    first: int
    peers: int
    capacity: int
    window: int
    every_s: float
    round: int
    version_lag: int  # steps until Ready is said again
    warm_up_s: float
    seconds: float
    deadline_s: float


class Drain(msgspec.Struct, frozen=True, tag=True):
    """The learner's stand-in: takes, decodes and commits batches; its step goes to `step_file`."""

    endpoint: str
    step_file: str

    def run(self) -> None:
        """Go on until replay says Stop."""
        step, file = 0, Path(self.step_file)
        with BatchReader(self.endpoint, 1, DRAIN_DEADLINE_S, DRAIN_DEADLINE_S) as reader:
            reader.resume(0)
            while not isinstance(batch := reader.sample(step), wire.Stop):
                for group in batch.groups:
                    for payload in group:
                        decode_trajectory(payload)
                step = batch.step
                reader.committed(step)
                with replacing(file, durable=False) as draft:  # the log alone is forced to the disk
                    draft.write_text(str(step), encoding="ascii")
            reader.finish()


class Peer:
    """One simulated actor."""

    def __init__(self, name: str, socket: "zmq.Socket[bytes]") -> None:
        self.name, self.socket = name, socket
        self.leases: deque[wire.Lease] = deque()
        self.due: deque[float] = deque()  # when deliveries should have been made
        self.sent: dict[tuple[int, int], float] = {}
        self.acknowledged = 0
        self.beat_s = 0.0  # when the heartbeat was due whose answer is awaited

    @property
    def heartbeat(self) -> bytes:
        """Its gauges, and all that it holds."""
        gauges = {"actor/running": 8.0, "actor/waiting": 0.0}
        held = tuple([(lease.group_id, lease.sibling) for lease in self.leases])
        return encode(wire.Heartbeat(self.name, gauges, None, held, tuple(self.sent)))


class Load:
    """All peers of a process; of their acknowledgements and of the answers to their heartbeats:
    when, after so many seconds.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self._at_s, self._took_s = array("d"), array("d")
        self._beat_at_s, self._beat_took_s = array("d"), array("d")
        self._statuses = Counter[str]()
        self._version = 0
        self._template: Template | None = None
        self._to_come = plan.peers  # that have not had their first round
        self._begin_s = self._end_s = float("inf")
        self._stopped = False
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, plan.peers + 16)
        self._epoll = select.epoll()
        self._peers: list[Peer] = []
        self._at_fd: dict[int, int] = {}
        self._timers: list[tuple[float, int, bool]] = []  # when, who, whether for its heartbeat

    def run(self) -> None:
        """Connect, deliver, write the figures, leave on Stop. Raises TimeoutError."""
        limit_s = time.monotonic() + self.plan.deadline_s
        for index in range(self.plan.peers):
            self._connect(index)
        look_s, written = 0.0, False
        while not self._stopped:
            now_s = time.monotonic()
            if now_s > limit_s:
                raise TimeoutError(
                    f"after {self.plan.deadline_s:g} s {self._to_come} of {self.plan.peers} peers "
                    f"had not had {self.plan.round} acknowledgements, {self._under_way()} were "
                    "waited for: look at the server's log or allow more time"
                )
            if not written and now_s >= self._end_s and not self._under_way():
                written = True
                self._write_figures()
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                self._follow_learner()
            wake_s = min(look_s, self._timers[0][0])
            for fd, _ in self._epoll.poll(max(0.0, wake_s - now_s)):
                self._receive(self._at_fd[fd])
            self._run_timers(time.monotonic())
        self._leave()

    def _write_figures(self) -> None:
        """Write the times, then the rest, which says that all is there."""
        for suffix, at_s, took_s in (
            (TIMES, self._at_s, self._took_s),
            (BEATS, self._beat_at_s, self._beat_took_s),
        ):
            with Path(self.plan.out + suffix).open("wb") as file:
                at_s.tofile(file)
                took_s.tofile(file)
        found = {"begin_s": self._begin_s, "end_s": self._end_s, "statuses": self._statuses}
        write_durably(Path(self.plan.out + ".json"), json.dumps(found).encode())

    def _under_way(self) -> int:
        return sum(len(peer.sent) for peer in self._peers)

    def _connect(self, index: int) -> None:
        name = f"actor-{self.plan.first + index}"
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.SNDTIMEO, int(self.plan.deadline_s * 1000))
        socket.connect(self.plan.endpoint)
        peer = Peer(name, socket)
        self._peers.append(peer)
        descriptor = int(socket.get(zmq.FD))
        self._at_fd[descriptor] = index
        socket.send(encode(wire.Hello(name, "digest")))
        self._ready(peer)
        self._epoll.register(descriptor, select.EPOLLIN)
        start_s = time.monotonic() + HEARTBEAT_S * index / self.plan.peers
        heapq.heappush(self._timers, (start_s + HEARTBEAT_S, index, True))
        if self.plan.every_s:
            first_s = start_s + self.plan.every_s * index / self.plan.peers
            heapq.heappush(self._timers, (first_s, index, False))
        self._receive(index)

    def _ready(self, peer: Peer) -> None:
        peer.socket.send(encode(wire.Ready(peer.name, self.plan.capacity, 1, self._version)))

    def _follow_learner(self) -> None:
        step = int(Path(self.plan.step_file).read_text(encoding="ascii") or 0)
        if step - self._version >= self.plan.version_lag:
            self._version, self._template = step, None
            for index, peer in enumerate(self._peers):
                self._ready(peer)
                self._receive(index)

    def _run_timers(self, now_s: float) -> None:
        while self._timers[0][0] <= now_s:
            due_s, index, heartbeat = self._timers[0]
            peer = self._peers[index]
            if heartbeat:
                peer.socket.send(peer.heartbeat)
                peer.beat_s = peer.beat_s or due_s
            else:
                peer.due.append(due_s)
                self._deliver(peer, now_s)
            every_s = HEARTBEAT_S if heartbeat else self.plan.every_s
            heapq.heapreplace(self._timers, (due_s + every_s, index, heartbeat))
            self._receive(index)

    def _receive(self, index: int) -> None:
        """Take everything that has come: the descriptor tells of news once only."""
        peer = self._peers[index]
        while True:
            try:
                reply = decode_reply(peer.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            now_s = time.monotonic()
            match reply:
                case wire.Acknowledged(group_id, sibling, status):
                    self._at_s.append(now_s)
                    self._took_s.append(now_s - peer.sent.pop((group_id, sibling)))
                    self._statuses[status] += 1
                    self._count(peer, now_s)
                case wire.Alive() if peer.beat_s:
                    self._beat_at_s.append(now_s)
                    self._beat_took_s.append(now_s - peer.beat_s)
                    peer.beat_s = 0.0
                case wire.Leases(leases):
                    peer.leases.extend(leases)
                case wire.Stop():
                    self._stopped = True
                case wire.Refused(cause):
                    raise RuntimeError(f"{peer.name} was refused: {cause}")
            self._deliver(peer, now_s)

    def _count(self, peer: Peer, now_s: float) -> None:
        peer.acknowledged += 1
        if peer.acknowledged == self.plan.round:
            self._to_come -= 1
            if not self._to_come:
                self._begin_s = now_s + self.plan.warm_up_s
                self._end_s = self._begin_s + self.plan.seconds

    def _deliver(self, peer: Peer, now_s: float) -> None:
        while peer.leases and now_s < self._end_s and not self._stopped:
            if self.plan.every_s and not peer.due:
                return
            if not self.plan.every_s and len(peer.sent) >= self.plan.window:
                return
            lease = peer.leases.popleft()
            if self._template is None:
                self._template = Template(self._version, lease.sampling)
            payload = self._template.payload(lease, peer.name)
            key = (lease.group_id, lease.sibling)
            peer.socket.send(encode(wire.Deliver(peer.name, *key, payload)))
            peer.sent[key] = peer.due.popleft() if self.plan.every_s else now_s

    def _leave(self) -> None:
        for peer in self._peers:
            peer.socket.send(encode(wire.Goodbye(peer.name)))
            peer.socket.close(linger=LINGER_MS)
        self._context.term()


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.argv[1], type=LoadPlan | Drain)
    begin("load" if isinstance(plan, LoadPlan) else "drain")
    (Load(plan) if isinstance(plan, LoadPlan) else plan).run()
