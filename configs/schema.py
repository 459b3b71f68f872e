"""The configuration of a run: one frozen struct per section, with defaults vetted for a real model.

Every section refuses unknown keys and checks its own values at construction; `configs.load` adds
where a value came from. Suffixes carry units (`_s`, `_bytes`, `_tokens`).
"""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from configs.algorithm.algorithm import AlgorithmConfig, check_credit, check_moment
from configs.algorithm.critic import CriticConfig, require_critic
from configs.environment import PROGRAM, EnvironmentConfig
from configs.fleet import ClusterConfig, FleetConfig
from configs.lora import LoraConfig
from configs.prompts import SEARCH_R1_CORRECTION
from configs.retrieval import RetrievalConfig
from configs.rewards import EVALUATED, RewardsConfig
from configs.section import (
    CHANGEABLE,
    NAMES_SECRET,
    OF_THE_MACHINE,
    ONE_OR_MORE,
    REACHES_OUT,
    RUNS_CODE,
    WRITES_THERE,
    InputPath,
    ModelPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    QuestionsPath,
    Seconds,
    Section,
)
from configs.sentinels import SentinelsConfig

# What a slow installation still does: a disk in the network, and a link, a digest and a load.
LEAST_SEGMENT_BYTES = 1 << 20  # of the event log
SLOW_DISK_BYTES_PER_S = 100e6
SLOW_SYNC_BYTES_PER_S = 200e6
SLOW_DOWNLOAD_BYTES_PER_S = 1e6  # of a snapshot, by one actor; a slower link is not waited for
TrackerName = Literal["tensorboard", "wandb", "trackio"]


class ModelConfig(Section, frozen=True):
    """The model that is trained: a Hugging Face folder."""

    path: ModelPath = ""  # the folder, or a name on the Hub
    # Of the learner, and of the engines unless actors.dtype says otherwise
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # What engines and learner multiply the language-model head in; empty: their dtype.
    head_dtype: Literal["", "float32"] = ""
    max_model_len: Positive = 4096  # tokens of a sequence: prompt, turns and observations
    trust_remote_code: Annotated[bool, RUNS_CODE] = False  # run the code that is in the folder


class QuestionColumns(Section, frozen=True):
    """The columns of a question file, `a.b` one within a column; empty: a known layout's."""

    question: str = ""  # its text
    answers: str = ""  # a text, or a list of texts
    id: str = ""  # its name; without one it is called by its file and row
    source: str = ""  # the data set of each row; empty: data_source, where there is one
    extra: tuple[str, ...] = ()  # further ones, for environments and rewards: Question.extra


class QuestionsConfig(Section, frozen=True):
    """The files of questions (docs/environments.md), and the prompt made of a question."""

    train: QuestionsPath = ""  # a file, or a name on the Hub; shuffled anew each epoch
    eval: QuestionsPath = ""  # likewise, all asked at each evaluation
    eval_limit: NonNegative = 0  # of each data set; 0 = every row
    columns: QuestionColumns = QuestionColumns()  # of both
    prompt: str = ""  # with {question}; empty: the environment's own
    chat_template: bool = True  # applied when the tokenizer has one
    template_arguments: dict[str, Any] = {}  # of the chat template, as {enable_thinking: false}


def _require_address(field: str, endpoint: str) -> None:
    if not endpoint or endpoint.startswith("ipc://"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    known = endpoint.startswith("tcp://")
    if not (known and host and port.isdigit() and 0 < int(port) < 1 << 16):
        meant = bool(host and port.isdigit() and "/" not in host)
        remedy = "name this machine, as the actors reach it, and a port"
        if meant and not known:
            remedy = f"did you mean tcp://{endpoint}?"
        raise ValueError(f"{field} = {endpoint!r} is no address tcp://HOST:PORT: {remedy}")
    if host in ("*", "0.0.0.0", "[::]"):
        raise ValueError(
            f"{field} = {endpoint!r} is no address that anybody could connect to: name the one by "
            "which the actors reach this machine"
        )


class ActorsConfig(Section, frozen=True):
    """The rollout fleet: engines, turns, limits and sampling."""

    count: Annotated[Positive, OF_THE_MACHINE] = 2  # the fleet may grow
    # Workers of each engine, on a GPU each: they share its weights, keys and values out
    tensor_parallel: Annotated[Positive, OF_THE_MACHINE] = 1
    # Per actor, at most; 0: as many as its engine's keys and values hold (actors/policies/capacity)
    rollouts_in_flight: NonNegative = 0
    max_num_seqs: Positive = 64  # slots of an engine: requests that it works on at once
    max_turns: NonNegative = 4  # searches or malformed actions; then one completion without search
    max_action_tokens: Positive = 500  # per completion
    max_passage_tokens: Positive = (
        160  # each passage is cut to this; the tags around them never are
    )
    passage_template: str = "Doc {rank}(Title: {title}) {text}\n"  # of one passage
    # Of all passages of a search
    observation_template: str = "\n\n<information>{passages}</information>\n\n"
    correction: str = SEARCH_R1_CORRECTION  # what answers a malformed turn
    shuffle_passages: bool = False  # shown in an order seeded by (group, sibling, turn)
    temperature: Annotated[float, Meta(gt=0.0)] = 1.0  # of training's rollouts
    dtype: Literal["", "float32", "bfloat16"] = ""  # of the engines; empty: model.dtype
    # Of keys and values, in each engine over all its workers; 0: found when a run is prepared
    # (scripts/setup/fit.py), on a GPU what it leaves, else what the slots' contexts fill.
    kv_cache_bytes: Annotated[NonNegative, OF_THE_MACHINE] = 0
    prefix_caching: bool = True  # keep keys and values of text that was read before
    enforce_eager: bool = False  # true: no CUDA graphs, which take a minute at the start
    engine: Annotated[dict[str, Any], RUNS_CODE] = {}  # further ones of vLLM's AsyncEngineArgs
    threads: Positive = 1  # of an engine on a CPU
    starting_deadline_s: Seconds = 300.0  # of a retrieval server, and of replay's first word
    engine_deadline_s: Seconds = 300.0  # an engine that says nothing for so long is replaced
    rollout_deadline_s: Seconds = 240.0  # a rollout that takes longer is given back
    drain_deadline_s: Seconds = 20.0  # in which an actor that is to end finishes rollouts

    @property
    def slots(self) -> int:
        """Rollouts in flight where nothing measures what the engine holds: those set, or one a
        slot.
        """
        return self.rollouts_in_flight or self.max_num_seqs


class ReplayConfig(Section, frozen=True):
    """Admission, deadlines and the event log. Raises ValueError where two contradict each other."""

    # Empty: ipc:// in the run's own socket directory; over several nodes the launcher chooses one
    endpoint: Annotated[str, OF_THE_MACHINE, REACHES_OUT] = ""
    groups_per_step: Positive = 16  # in a batch
    group_size: Positive = 8  # rollouts of one question
    max_staleness: NonNegative = 2  # optimiser steps that data may be old, at most
    drop_no_signal: bool = (
        False  # groups of equal rewards are dropped at close, counted and replaced
    )
    group_deadline_s: Seconds = 300.0  # a group that is open for longer has failed once
    max_question_failures: Positive = 5  # then the question is retired
    heartbeat_s: Seconds = 1.0  # how often each actor reports
    dead_after_s: Seconds = 10.0  # an actor that is silent for longer is lost
    restart_deadline_s: Seconds = 120.0  # how long its clients wait for a replay that is silent
    disk_deadline_s: Seconds = 600.0  # how long the event log waits for room on a full disk
    # Of a file of the log: then the next one begins
    segment_bytes: Annotated[int, Meta(ge=LEAST_SEGMENT_BYTES)] = 256 << 20
    # Trajectories in the log: all, those that may still be asked for (until they are trained and
    # saved), or as many as fit these bytes beside those (replay/log/keeping.py)
    keep: Annotated[Literal["all", "committed"] | int, CHANGEABLE] = "all"

    def __post_init__(self) -> None:
        _require_address("replay.endpoint", self.endpoint)
        if isinstance(self.keep, int) and self.keep < LEAST_SEGMENT_BYTES:
            raise ValueError(
                f"replay.keep = {self.keep!r}: fewer bytes than the log's smallest segment has, "
                "which loses its trajectories as a whole: choose one of 'all', 'committed', or a "
                f"number of bytes from {LEAST_SEGMENT_BYTES} on"
            )
        if self.restart_deadline_s < self.dead_after_s:
            raise ValueError(
                f"replay.restart_deadline_s = {self.restart_deadline_s!r} lies below "
                f"replay.dead_after_s = {self.dead_after_s!r}: raise it, or lower that"
            )


class WeightSyncConfig(Section, frozen=True):
    """The transport of weights to the actors, its probe and deadlines."""

    endpoint: Annotated[str, OF_THE_MACHINE, REACHES_OUT] = ""  # empty: as replay.endpoint
    # auto: cuda_ipc where learner and actors share one GPU, nccl where each has its own, else gloo;
    # and who comes late from another node downloads (weight_sync/downloads.py)
    transport: Literal["auto", "gloo", "nccl", "cuda_ipc", "snapshot"] = "auto"
    # Of transport snapshot; empty: the run's own socket directory
    snapshot_dir: Annotated[str, WRITES_THERE] = ""
    publish_every: Positive = 1  # optimiser steps
    # What an update does to the caches of requests in flight: they are computed anew under the new
    # weights, or kept, so that a request goes on from what older weights made of its text so far.
    in_flight: Literal["recompute", "keep"] = "recompute"
    bucket_bytes: Positive = 64 << 20  # of weights that are sent in one piece
    probe_tokens: Positive = 64  # whose log-probs prove that new weights have arrived
    # The mean |difference of log-probs| that is rounding in any case; more where the engine, with
    # the weights it loaded itself, differs by more (weight_sync/probe.py).
    probe_tolerance: Annotated[float, Meta(gt=0.0)] = 1e-3
    join_deadline_s: Seconds = 300.0  # in which an actor that joins has weights
    publish_deadline_s: Seconds = 30.0  # of a phase, beside the time of its bytes (`deadline_s`)
    # What downloads by late actors of other nodes may take of the learner's link, all together;
    # null: whatever it has. Four at once can then keep their deadline.
    download_bytes_per_s: Annotated[float, Meta(ge=4 * SLOW_DOWNLOAD_BYTES_PER_S)] | None = None

    def __post_init__(self) -> None:
        _require_address("weight_sync.endpoint", self.endpoint)
        if (
            self.transport == "snapshot"
            and self.endpoint.startswith("tcp")
            and not self.snapshot_dir
        ):
            raise ValueError(
                "weight_sync.transport = 'snapshot' with a tcp:// endpoint needs "
                "weight_sync.snapshot_dir: name a folder that all nodes see"
            )

    def deadline_s(self, nbytes: int, first: bool = False) -> float:
        """Seconds of a phase that sends, digests or applies so many bytes; the `first` version may
        be an engine's first request, and gets as long as joining.
        """
        floor = self.join_deadline_s if first else self.publish_deadline_s
        return floor + nbytes / SLOW_SYNC_BYTES_PER_S

    def download_s(self, nbytes: int) -> float:
        """Seconds that an actor's download of so many bytes may take."""
        return self.join_deadline_s + nbytes / SLOW_DOWNLOAD_BYTES_PER_S


class LearnerConfig(AlgorithmConfig, frozen=True):
    """The optimiser, the objective, its corrections, and the cadence of evaluation and checkpoints.

    Raises ValueError where two fields contradict each other.
    """

    total_steps: Annotated[NonNegative, CHANGEABLE] = 1000  # 0: evaluate only
    eval_every: Annotated[Positive, CHANGEABLE] = 50  # optimiser steps
    eval_temperature: PositiveFloat | None = 1.0  # of the sampled half; null: greedy alone
    best: Annotated[str, CHANGEABLE] = "em"  # what the best checkpoint is best in: PART or SET/PART
    checkpoint_every: Annotated[Positive, CHANGEABLE] = 50  # optimiser steps
    keep_checkpoints: Positive = 3  # beside the best and those still evaluated
    # Where the numbers go beside the event log; wandb and trackio need their packages
    trackers: Annotated[tuple[TrackerName, ...], ONE_OR_MORE, CHANGEABLE] = ("tensorboard",)
    tracker_project: Annotated[str, CHANGEABLE] = "forage"  # there
    tracker_deadline_s: Annotated[Seconds, CHANGEABLE] = 10.0  # in which each must end
    # What is subtracted from a rollout's reward
    baseline: Literal["mean", "leave_one_out", "optimal", "none", "critic"] = "mean"
    critic: CriticConfig = CriticConfig()
    # Of what rewards, to divide advantages by
    advantage_std: Literal["none", "group", "batch", "whiten"] = "group"
    lora: LoraConfig = LoraConfig()
    lr: NonNegativeFloat = 1e-6  # of the optimiser
    # After the warm-up, towards total_steps
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 10  # in which the rate rises from 0
    optimiser: Literal["adamw", "sgd"] = "adamw"  # sgd has no momentum
    betas: tuple[float, float] = (0.9, 0.95)  # of adamw
    weight_decay: NonNegativeFloat = 0.0  # of the optimiser
    max_grad_norm: PositiveFloat = 1.0  # longer gradients are scaled down to it
    ranks: Annotated[Positive, CHANGEABLE] = 1  # processes of the learner
    # tcp://HOST:PORT of rank 0; empty: one host
    rendezvous: Annotated[str, OF_THE_MACHINE, REACHES_OUT] = ""
    # What ranks share out: 1 the optimiser, 2 gradients too, 3 weights too
    zero_stage: Annotated[int, Meta(ge=0, le=3), CHANGEABLE] = 1
    hierarchical: Annotated[bool, OF_THE_MACHINE] = False  # ZeRO 3: a copy of weights on each host
    gradient_checkpointing: bool = False  # activations are computed twice and few are kept
    # cpu: optimiser and averages in the host's memory; auto: where the GPUs would not hold them
    offload: Annotated[Literal["none", "cpu", "auto"], CHANGEABLE] = "none"
    micro_batch_tokens: Positive = 16384  # padded, per forward pass of a rank
    logprob_chunk_bytes: NonNegative = 0  # the largest piece of logits; 0: by device, `chunk_bytes`
    threads: Positive = 1  # of each rank on a CPU
    batch_deadline_s: Seconds = 600.0  # of the wait for a batch
    eval_deadline_s: Seconds = 600.0  # of the wait for an evaluation
    step_deadline_s: Seconds = 300.0  # of a step, a checkpoint beside its bytes (`saving_s`)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best.rpartition("/")[2] not in EVALUATED:
            raise ValueError(
                f"learner.best = {self.best!r}: choose one of {', '.join(EVALUATED)}, or that of a "
                "set, as SET/em"
            )
        if self.rendezvous and not _is_meeting_place(self.rendezvous):
            raise ValueError(
                f"learner.rendezvous = {self.rendezvous!r}: give tcp://HOST:PORT of rank 0's "
                "machine, as the others reach it, or leave it empty when all ranks are on one"
            )
        if self.hierarchical and self.zero_stage != 3:
            raise ValueError(
                f"learner.hierarchical = True with learner.zero_stage = {self.zero_stage!r}: it "
                "copies the weights that stage 3 scatters: set learner.zero_stage to 3, or leave "
                "it out"
            )
        require_critic(self.baseline, self.advantage_std, self.critic, self.total_steps)
        if self.optimiser == "sgd":
            self.refuse("betas", "optimiser")
        check_credit(self.baseline, self.advantage_std, self.turn_credit, self.kl_in)
        check_moment(self.second_moment, self.objective, self.centre, self.clip_low, self.clip_high)
        if self.offload == "cpu" and not self.zero_stage:
            raise ValueError(
                "learner.offload = 'cpu' moves what ZeRO keeps, which learner.zero_stage = 0 is "
                "without: set learner.zero_stage to 1, 2 or 3"
            )

    def saved_bytes(self, weights: int) -> int:
        """About the bytes of a checkpoint of a model whose files have `weights` bytes in bf16: it
        and each average as such files, in fp32 the masters, Adam's moments and each average, and
        the masters and moments of a critic. An adapter and its averages are a small part of that.
        """
        averages = (self.centre == "ema") + (self.anchor != "none")
        critic = 3 * self.has_critic_model
        kept = averages + 2 * (3 + averages)
        kept_bytes = kept * weights // (20 if self.lora.rank else 1)
        return (1 + 2 * critic) * weights + kept_bytes

    def saving_s(self, weights: int) -> float:
        """Seconds in which that checkpoint is written or read."""
        return self.step_deadline_s + self.saved_bytes(weights) / SLOW_DISK_BYTES_PER_S

    def chunk_bytes(self, device: str) -> int:
        """The largest piece of logits that ever exists: of many launches each costs a GPU more than
        its memory, and a CPU's caches hold no large one.
        """
        return self.logprob_chunk_bytes or (1 << 30 if device == "cuda" else 64 << 20)

    @property
    def has_critic_model(self) -> bool:
        """True where a critic is a model of its own beside the policy."""
        return self.baseline == "critic" and self.critic.on == "copy"

    @property
    def has_value_head(self) -> bool:
        """True where a critic is on the policy's trunk."""
        return self.baseline == "critic" and self.critic.on == "policy"

    @property
    def eval_temperatures(self) -> tuple[float, ...]:
        """The temperatures at which an evaluation asks each question, greedy (0) first."""
        return (0.0,) if self.eval_temperature is None else (0.0, self.eval_temperature)


class ViewConfig(Section, frozen=True):
    """What a run keeps for its pages (docs/view.md) beside the log."""

    # Steps, the newest, of which RUN/tokens has what the learner made of each token; 0: of none
    keep_steps: Annotated[int, Meta(ge=0, le=1000), CHANGEABLE] = 20


class Config(Section, frozen=True):
    """One run."""

    seed: NonNegative = 0  # of questions' order, sampling and the learner
    run_dir: Annotated[str, OF_THE_MACHINE] = ""  # empty: runs/<config name>-<time>
    # Folder of the run's keys for tcp:// endpoints; empty: <run_dir>/keys
    keys: Annotated[InputPath, OF_THE_MACHINE, NAMES_SECRET] = ""
    model: ModelConfig = ModelConfig()
    questions: QuestionsConfig = QuestionsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    actors: ActorsConfig = ActorsConfig()
    rewards: RewardsConfig = RewardsConfig()
    replay: ReplayConfig = ReplayConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    learner: LearnerConfig = LearnerConfig()
    sentinels: SentinelsConfig = SentinelsConfig()
    view: ViewConfig = ViewConfig()
    fleet: FleetConfig = FleetConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def starts_retrieval_server(self) -> bool:
        """True where training starts a retrieval server of its own: not without searches, and for a
        user's environment or program where it has something to search.
        """
        searches = self.environment.name != "no_search"
        if ":" in self.environment.name or self.environment.name == PROGRAM:
            asked = self.retrieval
            searches = bool(asked.corpus or asked.index or asked.is_live)
        return self.retrieval.has_own_server and searches

    @property
    def engine_dtype(self) -> str:
        """The dtype that the engines compute in and weights travel as."""
        return self.actors.dtype or self.model.dtype


def _is_meeting_place(endpoint: str) -> bool:
    given = urlsplit(endpoint)
    try:
        port = given.port
    except ValueError:
        return False
    anywhere = given.hostname in (None, "0.0.0.0", "::", "*")
    return given.scheme == "tcp" and bool(port) and not anywhere and not given.path
