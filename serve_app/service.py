"""What stands behind the HTTP front: one protocol for whatever answers, and the nouns that cross it.

    HTTP front  --AnswerRequest-->  AnswerService  (an engine in this process, or workers elsewhere)
                <--StageSpan, TokenDelta, ..., AnswerEnd--

Everything here can be pickled. Media are local files of the front's machine, deleted when the iterator of the
answer ends: a service on other machines moves their bytes itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from encoders import FrameSampling
from encoders.prompt.chat import ChatMessage, media_kinds
from epd.control.elasticity import Decision, RequestWork
from epd.control.retention import LevelChange
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.topology import Stage
from epd.types import MediaKind, StageTimings, Usage
from video import FileIdentity, MediaFacts

FinishReason = Literal["stop", "length"]
# The steps of a request that are timed. A worker with several roles does several of them.
StageName = Literal["probe", "decode_video", "preprocess", "encode", "transfer", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One image or video of a request: its bytes are in a local file, within the limits, and hashed.

    mm_hash: `epd.types.content_hash` of the file. facts: None where nobody has looked at it yet.
    label: how messages call it, which never show our paths. identity: what the file must still be.
    """

    kind: MediaKind
    path: Path
    mm_hash: str
    num_bytes: int
    facts: MediaFacts | None = None
    label: str = "the medium"
    identity: FileIdentity | None = None


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A checked request.

    messages: the conversation; each part that is a medium has a place for one.
    media: the sources of those parts, in order.
    sampling: which token comes next.
    frame_sampling: which frames of each video are used.
    priority: the lower, the sooner, as in vLLM; above 0 is batch work that no user waits for.
    reduction: which visual tokens are kept.
    retention_min: the least share of them that may be kept, None for any.
    arrival_s, deadline_s: Unix time in seconds; a service that sees that the first token cannot come by the
    deadline raises OverloadedError.
    wants_spans: whether the service yields a span for each stage.
    cache_salt: cached content is shared only with requests of the same salt; may be empty.
    """

    request_id: str
    model: str
    messages: tuple[ChatMessage, ...]
    media: tuple[MediaSource, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    frame_sampling: FrameSampling = field(default_factory=FrameSampling)
    priority: int = 0
    reduction: ReductionPolicy = KEEP_ALL
    retention_min: float | None = None
    arrival_s: float = 0.0
    deadline_s: float | None = None
    wants_spans: bool = False
    cache_salt: str = ""

    def __post_init__(self) -> None:
        kinds = tuple(source.kind for source in self.media)
        if kinds != media_kinds(self.messages):
            raise ValueError(
                f"the messages have places for {media_kinds(self.messages)}, the sources are {kinds}"
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the logarithm of its probability before sampling options.

    text: of the token alone. data: its bytes, perhaps part of a character; empty for a special token.
    alternatives: the most likely tokens in its place, the likeliest first, without alternatives of their own.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next piece of one choice.

    text: whole characters that became certain with these tokens; may be empty. token_ids: of this piece.
    logprobs: one for each token id if they were asked for, else none. finish_reason: set on the last piece.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A piece of work on a request that is done, for timelines.

    worker: a name as in ServiceStatus. item, group: which of the media, and which group of it; None for work
    on no media. start_s, stop_s: Unix time in seconds.
    """

    stage: StageName
    worker: str
    start_s: float
    stop_s: float
    item: int | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last item of every answer: what it took.

    usage: visual and prompt tokens as prefilled; completion tokens of all choices.
    cached_tokens: of the prompt, those whose keys and values were there already.
    retention: share of the visual tokens that was to be kept. timings: service time of each stage.
    queued: time spent waiting for each stage. num_retries: pieces of work that were done again elsewhere.
    """

    usage: Usage
    timings: StageTimings
    cached_tokens: int = 0
    retention: float = 1.0
    queued: StageTimings = field(default_factory=StageTimings)
    num_retries: int = 0


AnswerItem = TokenDelta | StageSpan | AnswerEnd


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be named in a request. created_s: Unix time in seconds. max_model_len: tokens."""

    name: str
    created_s: int
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as it is now.

    roles: what it does, one letter each: v video decoding, e encode, p prefill, d decode.
    num_waiting, num_running: requests or groups queued at it, and in work.
    kv_usage, encoder_cache_usage: shares of its memory in use, None where it has none.
    num_role_switches: since it started. is_switching: it is giving up roles, and takes no work for them.
    """

    name: str
    roles: str
    is_alive: bool = True
    num_waiting: int = 0
    num_running: int = 0
    kv_usage: float | None = None
    encoder_cache_usage: float | None = None
    num_role_switches: int = 0
    is_switching: bool = False


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """How a worker's change of roles went. before, after: letters of its roles.

    at_s: when it began, Unix time. Seconds: of the phases, see `role_switch`; weights_s: of onload,
    spent on finding weights. num_handed_on: requests and groups that went to others before they were begun,
    num_moved: answers that did in their middle, num_redone: requests and groups done again.
    error: why it has its former roles; empty if it has the new ones.
    """

    worker: str
    before: str
    after: str
    at_s: float
    offload_s: float
    migrate_s: float
    onload_s: float
    announce_s: float
    weights_s: float = 0.0
    num_handed_on: int = 0
    num_moved: int = 0
    num_redone: int = 0
    error: str = ""

    @property
    def kind(self) -> str:
        """As in e->p."""
        return f"{self.before}->{self.after}"

    @property
    def total_s(self) -> float:
        return self.offload_s + self.migrate_s + self.onload_s + self.announce_s

    def line(self) -> str:
        """For a log."""
        return (
            f"worker={self.worker} switch={self.kind} total_s={self.total_s:.3f} "
            f"offload_s={self.offload_s:.3f} migrate_s={self.migrate_s:.3f} onload_s={self.onload_s:.3f} "
            f"handed_on={self.num_handed_on} moved={self.num_moved} redone={self.num_redone} "
            f"error={self.error or '-'}"
        )


@dataclass(frozen=True, slots=True)
class SwitchTotals:
    """All switches of one kind, since the start. Seconds: of those that worked, all together."""

    kind: str
    num_done: int = 0
    num_failed: int = 0
    offload_s: float = 0.0
    migrate_s: float = 0.0
    onload_s: float = 0.0
    announce_s: float = 0.0

    def plus(self, switch: RoleSwitch) -> SwitchTotals:
        """With one more."""
        if switch.error:
            return replace(self, num_failed=self.num_failed + 1)
        return SwitchTotals(
            self.kind,
            self.num_done + 1,
            self.num_failed,
            self.offload_s + switch.offload_s,
            self.migrate_s + switch.migrate_s,
            self.onload_s + switch.onload_s,
            self.announce_s + switch.announce_s,
        )


@dataclass(frozen=True, slots=True)
class RetentionStatus:
    """The share of visual tokens that the load allows now.

    predicted_ttft_s: of a prompt that came at the last look. num_changes: since the start; changes: the last
    ones, oldest first, at Unix times.
    """

    level: float
    predicted_ttft_s: float
    num_changes: int
    changes: tuple[LevelChange, ...]


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The service as it is now.

    is_ready: whether every role that an answer needs has a worker. topology: as in `2e1p1d`.
    counters: totals since the start that only the service knows, under Prometheus names without prefix,
    such as encoder_cache_hits; each is shown as epd_<name>_total. switches: the last changes of roles, oldest
    first; switch_totals: of all of them, by kind. num_waiting: requests that no worker has taken yet.
    decisions: whether roles were to be changed by the load, and why; the last ones, oldest first.
    retention: None where it does not follow the load.
    """

    is_ready: bool
    topology: str
    workers: tuple[WorkerStatus, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    num_waiting: int = 0
    decisions: tuple[Decision, ...] = ()
    switches: tuple[RoleSwitch, ...] = ()
    switch_totals: tuple[SwitchTotals, ...] = ()
    retention: RetentionStatus | None = None


class AnswerService(Protocol):
    """Whatever answers requests. May be asked for many answers at once, from one event loop."""

    @property
    def models(self) -> Sequence[ModelCard]:
        """The models that can be asked for, the default first; at least one."""
        ...

    def answer(self, request: AnswerRequest) -> AsyncGenerator[AnswerItem, None]:
        """Starts when it is first awaited: pieces of all choices as they come, and one AnswerEnd at the end.

        Closing or cancelling the iterator, at any await, frees everything the request holds in all stages.
        Raises EPDError, before the first item or later: OverloadedError or UnavailableError where it could
        not be taken in, InputError for what cannot be answered. Every choice has had its finish_reason when
        AnswerEnd comes.
        """
        ...

    async def status(self) -> ServiceStatus:
        """Cheap enough to be asked several times a second."""
        ...

    async def switch_roles(self, worker: str, roles: frozenset[Stage]) -> RoleSwitch:
        """Returns when the worker has these roles; what it had to do is done by others or by it.

        Raises RequestError, InfeasibleError, UnavailableError: then the worker has the roles that it had.
        """
        ...

    def recent_load(self) -> Sequence[tuple[float, RequestWork]]:
        """Requests of the last ten minutes: when they came, Unix time, and what they take; oldest first."""
        ...
