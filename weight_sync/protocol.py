"""Messages between learner and actors about weights, and this package's errors. A leaf module.

(incarnation, policy_version) is ordered lexicographically: a restarted learner has a higher
incarnation, and a message of an older one is refused. Version 0 is the starting weights; version k
is made by optimiser step k.

Actors come and go, so the collective that carries the bytes is formed anew whenever those who need
a version are not those it was formed with. Each forming has an `epoch`, which every answer repeats:
an answer to one that was given up means nothing.
"""

from collections.abc import Sequence

import msgspec

PROTOCOL = 9
# vLLM's `worker_extension_cls`; a name, so that nobody has to import vLLM to say it
WORKER_EXTENSION = "weight_sync.vllm_worker.WeightSyncWorker"
# What every request of an engine that computes an adapter names
ADAPTER_NAME, ADAPTER_ID = "adapter", 1


class WeightSyncError(Exception):
    """Root of this package's errors.

    WeightSyncError
    ├── ManifestMismatch   the actor's model has other tensors, shapes or dtypes than the manifest
    ├── EngineDiffers      the engine computes another model than the learner from the same weights
    ├── VerificationFailed digest or probe did not agree, or a load was not complete
    ├── PeerFailed         the other side has left, or failed by a fault of its own
    ├── TransportUnusable  the transport that was asked for cannot join these devices
    ├── TransportFailed    the group could not be formed, or broke
    │   └── RelayFailed    weights could not be handed on between the actors of a node
    └── SyncTimeout        a named phase passed its deadline
    """


class ManifestMismatch(WeightSyncError):
    """The receiving model has other tensors, shapes or dtypes than the manifest."""


class EngineDiffers(WeightSyncError):
    """From the same weights the engine computes another model than the learner."""


class VerificationFailed(WeightSyncError):
    """The bytes' digest or the probe's log-probs did not agree."""


class PeerFailed(WeightSyncError):
    """The other side of the control channel has left, or failed by a fault of its own."""


class TransportUnusable(WeightSyncError):
    """The transport that was asked for cannot join the learner's device and an actor's."""


class TransportFailed(WeightSyncError):
    """The group could not be formed, or broke while bytes were under way."""


class RelayFailed(TransportFailed):
    """The file by which a node's actors hand weights on could not be written, or was not seen."""


class SyncTimeout(WeightSyncError):
    """A named phase of the sync passed its deadline."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor's place: bucket index and byte offset; `dtype` as torch names it: `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset_bytes: int
    nbytes: int


class Adapter(msgspec.Struct, frozen=True):
    """What the tensors of a LoRA adapter do not say: y = Wx + alpha / rank · B(Ax), for each linear
    layer whose name ends in one of `layers`. They are A [rank, in] and B [out, rank] of each, named
    as PEFT does, `base_model.model.LAYER.lora_A.weight`, without the scale. `base`: a digest of the
    weights under it, as the files of `model.path` have them.
    """

    rank: int
    alpha: float
    layers: tuple[str, ...]
    base: str = ""

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.alpha / self.rank


class Join(msgspec.Struct, frozen=True, tag=True):
    """Actor → learner, first message and again whenever nothing has come for a second: who I am.

    `incarnation` and `policy_version` are of the weights that serve here, -1 before the first;
    `devices` are the engine's workers' by rank, as `transports.base.device_name` says them: each
    worker receives for itself. `node` names what shares files and memory (`own_node`).
    """

    actor_id: str
    incarnation: int = -1
    policy_version: int = -1
    devices: tuple[str, ...] = ("cpu",)
    node: str = ""
    protocol: int = PROTOCOL


class Enquiry(msgspec.Struct, frozen=True, tag=True):
    """Actor → learner, every second while it downloads: who are you? Anybody is told, by Ping."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Learner → actor: nothing to do, I am here; it cannot be sent where nobody is."""

    incarnation: int


class Rendezvous(msgspec.Struct, frozen=True, tag=True):
    """Learner → actor: where the group forms. Rank 0 is the learner. It ends all groups before it.

    `rank` is of the actor's first worker; its others follow. A relay is told where to `hand_on`,
    and its first worker alone is in the group.
    `prefix` is of the group's keys in the store; of a snapshot, which has no store, it is the
    folder, of a download the path, and of who reads from a relay what that one was told.
    A download has no group: its `epoch` is negative, and `timeout_s` bounds how long no byte comes.
    """

    incarnation: int
    epoch: int
    transport: str
    store_host: str
    store_port: int
    prefix: str
    rank: int
    world_size: int
    timeout_s: float
    hand_on: str = ""  # the name of the relay's folder on its node
    nbytes: int = 0  # of a version
    transfer_s: float = 0.0  # what a download's bytes may take, beside the deadlines of the rest
    key: str = ""  # hexadecimal, of a download: with it the requests are signed


class Connecting(msgspec.Struct, frozen=True, tag=True):
    """Actor → learner: a thread of mine is on its way into the collective."""

    actor_id: str
    epoch: int
    error: str = ""


class WeightManifest(msgspec.Struct, frozen=True, tag=True):
    """Learner → actors, before the bytes: what is coming, and what must be true of it afterwards.

    `bytes_digest` is blake3 over the buckets in order; `probe_logprobs[i]` is the learner's
    log-prob of `probe_tokens[i + 1]` after `probe_tokens[: i + 1]` under these weights, and
    `start_logprobs[i]` the same under those of `model.path` (empty: not known). The tensors are
    those of `adapter`, on the weights of `model.path`; None: the whole model's.
    """

    incarnation: int
    policy_version: int
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: tuple[int, ...]
    bytes_digest: str
    probe_tokens: tuple[int, ...]
    probe_logprobs: tuple[float, ...]
    probe_tolerance: float
    start_logprobs: tuple[float, ...] = ()
    adapter: Adapter | None = None


class Receiving(msgspec.Struct, frozen=True, tag=True):
    """Actor → learner: the manifest fits my model and a thread of mine waits for the bytes.

    The learner sends nothing before every actor has said so: a refusal or a stalled actor is then
    known by name, which a broken collective is not.
    """

    actor_id: str
    epoch: int
    policy_version: int


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Learner → actors, after the bytes: apply them."""

    incarnation: int
    policy_version: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Learner → relays, once all have applied a version: remove your node's copy of it."""


class Applied(msgspec.Struct, frozen=True, tag=True):
    """Actor → learner: this version serves here, verified (or, with `error`, does not).

    `weights_checksums` are of what each worker's model holds after the load, by rank; `probe_error`
    is the largest absolute log-prob difference, `probe_mean` their mean; times are seconds.
    """

    actor_id: str
    epoch: int
    incarnation: int
    policy_version: int
    bytes_digest: str
    weights_checksums: tuple[str, ...]
    probe_error: float
    probe_mean: float
    generation_pause_s: float
    receive_s: float
    apply_s: float
    error: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Learner → actor: the message was refused, and why."""

    cause: str


class WorkerReport(msgspec.Struct, frozen=True):
    """vLLM worker → subscriber, through the engine: what a call did.

    `error` is empty when it worked, else begins with the name of its type in this module;
    `pending`: what is asked for is still being made, ask again. Checksums and devices: the
    worker's own, or of all workers by rank where reports were `combined`.
    """

    bytes_digest: str = ""
    weights_checksums: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    pending: bool = False
    receive_s: float = 0.0
    apply_s: float = 0.0
    error: str = ""


Answer = Connecting | Receiving | Applied
FromActor = Join | Enquiry | Answer
FromLearner = Ping | Rendezvous | WeightManifest | Sent | Release | Refused

encode = msgspec.msgpack.Encoder().encode
decode_from_actor = msgspec.msgpack.Decoder(FromActor).decode
decode_from_learner = msgspec.msgpack.Decoder(FromLearner).decode
decode_report = msgspec.msgpack.Decoder(WorkerReport).decode
decode_manifest = msgspec.msgpack.Decoder(WeightManifest).decode
decode_rendezvous = msgspec.msgpack.Decoder(Rendezvous).decode
decode_adapter = msgspec.msgpack.Decoder(Adapter).decode


def combined(reports: Sequence[WorkerReport]) -> WorkerReport:
    """The reports of an engine's workers, by rank, as one: what fails on one has failed, what is
    pending on one is pending, times are the longest.
    """
    several = len(reports) > 1
    for number, report in enumerate(reports, 1):
        if report.error:
            which = f" (worker {number} of {len(reports)})" if several else ""
            return WorkerReport(error=f"{report.error}{which}")
    return WorkerReport(
        bytes_digest=reports[0].bytes_digest,
        weights_checksums=tuple(each for one in reports for each in one.weights_checksums),
        devices=tuple(each for one in reports for each in one.devices),
        pending=any(each.pending for each in reports),
        receive_s=max(each.receive_s for each in reports),
        apply_s=max(each.apply_s for each in reports),
    )


def require_done(answers: Sequence[bytes]) -> WorkerReport:
    """The encoded reports of an engine's workers as one. Raises what has failed."""
    report = combined([decode_report(each) for each in answers])
    if report.error:
        raise as_error(report.error)
    return report


def as_error(text: str) -> WeightSyncError:
    """The exception that a message's `error` text describes, by its leading type name."""
    known: list[type[WeightSyncError]] = [ManifestMismatch, EngineDiffers, VerificationFailed]
    known += [TransportUnusable, TransportFailed, RelayFailed, SyncTimeout]
    kinds = {kind.__name__: kind for kind in known}
    return kinds.get(text.partition(":")[0], PeerFailed)(text)


def describe(error: BaseException) -> str:
    """An exception as the `error` text of a message: type name, then what it says."""
    return f"{type(error).__name__}: {error}"
