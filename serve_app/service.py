"""Defines the protocol between the HTTP server and the service that answers, and the types it uses.

    HTTP server  --AnswerRequest-->  AnswerService  (an engine in this process, or workers elsewhere)
                 <--StageSpan, TokenDelta, ..., AnswerEnd--

    HTTP server  --MediaReference-->  MediaService   (media workers, which keep the bytes)
                 <--MediaSource--

Everything here can be pickled. No bytes of media pass through the HTTP server's process, except those that a
request itself contains.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from epd.chat import ChatMessage, media_kinds
from epd.control.recent import RequestWork
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits
from epd.reduction import KEEP_ALL, NO_BUDGET, KeptCells, ReductionPolicy, VisualBudget
from epd.sampling_params import SamplingParams
from epd.serve_app.service_status import RoleSwitch, ServiceStatus
from epd.topology import Stage
from epd.types import MediaFacts, MediaKind, StageTimings, Usage

FinishReason = Literal["stop", "length"]
# The steps of a request that are timed. A worker with several roles performs several of them.
StageName = Literal["probe", "decode_video", "preprocess", "encode", "transfer", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class FetchedItem:
    """What a media worker found out about a medium. mm_hash: `epd.types.content_hash` of its bytes."""

    facts: MediaFacts
    mm_hash: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MediaReference:
    """A medium as a request names it.

    label: its name in responses, which never show local paths
    pixels: what it is resized within
    start_s, end_s: the part of a clip of sound that is heard, seconds, None for its end
    uuid: the client's name for it, empty for none
    is_upload: whether the URL is the id of a file that the client has uploaded, and that it may read
    known: what was found out about it when it was named, if it comes by its name alone
    client: whose media take turns together, empty where nobody shares
    """

    kind: MediaKind
    url: str = field(repr=False)
    label: str
    pixels: PixelLimits = OWN_LIMITS
    uuid: str = field(default="", repr=False)
    start_s: float = 0.0
    end_s: float | None = None
    is_upload: bool = False
    known: FetchedItem | None = field(default=None, repr=False)
    client: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class HeldItem:
    """Names a medium that a media worker keeps. item: its number among the references of the hold."""

    hold: str
    item: int


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One image, video or clip of sound of a request: its bytes are at a media worker, checked and hashed.

    mm_hash: `epd.types.content_hash` of its bytes
    label: its name in messages, which never show local paths
    held: its name among the media that are kept for requests
    pixels: what it is resized within
    """

    facts: MediaFacts
    mm_hash: str
    num_bytes: int
    label: str
    held: HeldItem
    pixels: PixelLimits = OWN_LIMITS

    @property
    def kind(self) -> MediaKind:
        return self.facts.kind


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A checked request.

    messages: the conversation; each part that is a medium is a placeholder. None with `prompt`.
    prompt: tokens that the answer continues, instead of messages; None for a conversation.
    media: the sources of those parts, in order.
    sampling: which token comes next.
    frame_sampling: which frames of each video are used.
    priority: the lower, the sooner, as in vLLM; above 0 is batch work that no user waits for.
    reduction: which visual tokens are kept.
    budget: what the visual tokens are held to, by fewer frames or a smaller share of them.
    retention_min: the least share of them that may be kept, None for any.
    arrival_s: Unix time in seconds.
    deadline_s: of the first token, on the clock of `steady_time_s`; a service that finds that it cannot be
    met raises OverloadedError.
    wants_spans: whether the service yields a span for each stage.
    streams: whether somebody reads the tokens as they come; else many may come together.
    cache_salt: cached content is shared only with requests of the same salt; may be empty.
    client: whose requests wait for their turn together, empty for one that nobody shares with.
    weight: how many of them are in a turn.
    """

    request_id: str
    model: str
    messages: tuple[ChatMessage, ...]
    media: tuple[MediaSource, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    frame_sampling: FrameSampling = field(default_factory=FrameSampling)
    priority: int = 0
    reduction: ReductionPolicy = KEEP_ALL
    budget: VisualBudget = NO_BUDGET
    retention_min: float | None = None
    arrival_s: float = 0.0
    deadline_s: float | None = None
    wants_spans: bool = False
    streams: bool = True
    cache_salt: str = ""
    prompt: tuple[int, ...] | None = None
    client: str = ""
    weight: int = 1

    def __post_init__(self) -> None:
        if (self.prompt is None) != bool(self.messages):
            raise ValueError("a request has messages, or the tokens of a prompt: one of the two")
        kinds = tuple(source.kind for source in self.media)
        if kinds != media_kinds(self.messages):
            raise ValueError(
                f"the messages have places for {media_kinds(self.messages)}, the sources are {kinds}"
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the logarithm of its probability before sampling options.

    text: of the token alone
    data: its bytes, possibly part of a character; empty for a special token
    alternatives: the most likely tokens in its place, likeliest first, without alternatives of their own
    """

    token_id: int
    text: str
    data: bytes
    logprob: float
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next piece of one choice.

    text: whole characters completed by these tokens; may be empty
    token_ids: of this piece
    logprobs: one for each token id if requested, else empty
    finish_reason: set on the last piece
    num_prompt_tokens: of the request
    thinks: whether its prompt ends within a thought, where the service looks for that
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A completed piece of work on a request, for timelines.

    worker: a name as in ServiceStatus
    item, group: indices of the medium and of its group; None for work without media
    start_s, stop_s: Unix time in seconds
    frame_times_s: of a video that was planned: middle of each frame's time on screen, seconds
    kept: tokens of a reduced video that were chosen since the item's last span
    num_frames: of an encoded group; of all media where stage `probe` has no item
    notes: of stage `probe` without an item, for people: what media are held to, and the plan of each
    choice: of the same: what was chosen where not all frames and tokens have room, else empty
    """

    stage: StageName
    worker: str
    start_s: float
    stop_s: float
    item: int | None = None
    group: int | None = None
    frame_times_s: tuple[float, ...] = ()
    kept: tuple[KeptCells, ...] = ()
    num_frames: int = 0
    notes: tuple[str, ...] = ()
    choice: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last item of every answer, with its cost.

    usage: visual and prompt tokens as prefilled; completion tokens of all choices
    cached_tokens: prompt tokens whose keys and values were cached
    retention: share of the visual tokens that was to be kept
    timings: service time of each stage
    queued: time spent waiting for each stage
    num_retries: pieces of work that were retried elsewhere
    keeps_media: whether anything is kept on disk
    """

    usage: Usage
    timings: StageTimings
    cached_tokens: int = 0
    retention: float = 1.0
    queued: StageTimings = field(default_factory=StageTimings)
    num_retries: int = 0
    keeps_media: bool = False


AnswerItem = TokenDelta | StageSpan | AnswerEnd


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Says what is taken of one medium. height, width: of a frame or image, pixels. num_tokens: all of it."""

    kind: MediaKind
    num_frames: int
    height: int
    width: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the answer to a request would use, before anything is encoded.

    usage: of the prompt, with no token of an answer
    retention: share of the visual tokens that would be kept
    max_tokens: of each answer
    token_ids: of the prompt, visual tokens included
    media: of each item, in order
    """

    usage: Usage
    retention: float
    max_tokens: int
    token_ids: tuple[int, ...]
    media: tuple[MediaSize, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be named in a request. created_s: Unix time in seconds. max_model_len: tokens.

    knows: what it knows, where its card says that this is little
    root: folder of an adapter, as it was given; None for a model
    parent: the model that an adapter computes beside
    revision: a name of the model's weights and settings, of an adapter that of its parent; empty if unknown
    """

    name: str
    created_s: int
    max_model_len: int | None = None
    knows: str | None = None
    root: str | None = None
    parent: str | None = None
    revision: str = ""

    def with_adapter(self, name: str, root: str) -> ModelCard:
        """Returns the card of this model with a LoRA adapter."""
        return replace(self, name=name, root=root, parent=self.name)


class MediaService(Protocol):
    """Fetches the media of requests and keeps them away from this process. Used from one event loop."""

    def sources(
        self, request_id: str, references: Sequence[MediaReference]
    ) -> AbstractAsyncContextManager[tuple[MediaSource, ...]]:
        """Yields the media of one request, in order, which are kept until the block is left.

        Raises MediaError, RequestError for a URL of an unknown kind, OverloadedError when there is no room,
        UnavailableError.
        """
        ...

    async def picture(self, source: MediaSource, max_side: int) -> bytes:
        """Returns a JPEG of an image or of a video's first frame, for people. max_side: of it, pixels.

        source: while its block is open. Raises MediaError, RequestError for sound, UnavailableError.
        """
        ...

    @property
    def num_spooled_bytes(self) -> int:
        """Returns the bytes of files that were made for requests in flight."""
        ...

    @property
    def num_downloads(self) -> int:
        """Returns the number of downloads in progress."""
        ...


class PromptService(Protocol):
    """Looks at prompts without answering them."""

    async def estimate(self, request: AnswerRequest) -> Estimate:
        """Returns what an answer would use.

        Raises EPDError as its answer would before the first item; RequestBudgetError if it cannot fit.
        """
        ...

    async def tokens(self, text: str, *, with_special: bool) -> tuple[int, ...]:
        """Returns the tokens of a text. with_special: with those that the tokenizer adds around a text."""
        ...

    async def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens. Raises RequestError for one outside the vocabulary."""
        ...

    async def names(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Returns tokens as the vocabulary writes them."""
        ...


class AnswerService(Protocol):
    """Answers requests, many at a time, from one event loop."""

    @property
    def prompts(self) -> PromptService:
        """Returns what looks at prompts without answering them."""
        ...

    @property
    def models(self) -> Sequence[ModelCard]:
        """Returns the available models, the default first; at least one."""
        ...

    def answer(self, request: AnswerRequest) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """Yields pieces of all choices, together what is ready together, and one AnswerEnd as the last.

        It starts when it is first awaited.

        Closing or cancelling the iterator, at any await, frees everything the request holds in all stages.
        Raises EPDError, before the first item or later: OverloadedError or UnavailableError if the request
        was not accepted, InputError if it cannot be answered. AnswerEnd comes after the finish_reason of
        every choice.
        """
        ...

    async def status(self) -> ServiceStatus:
        """Returns the current status; cheap enough for several calls per second."""
        ...

    async def switch_roles(self, worker: str, roles: frozenset[Stage]) -> RoleSwitch:
        """Switches a worker, and returns when it has these roles; its remaining work is completed.

        Raises RequestError, InfeasibleError, UnavailableError: the worker then keeps its former roles.
        """
        ...

    def recent_load(self) -> Sequence[tuple[float, RequestWork]]:
        """Returns the requests of the last ten minutes: arrival, Unix time, and work; oldest first."""
        ...
