"""Describes a request to the simulator: groups of media, tokens, and its progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from epd.control.placement import Placement
from epd.kv.prefix_cache import TokenIdentity
from epd.profiles.cost import StageCost, StageTable
from epd.profiles.media import MediaWork
from epd.profiles.profile import Profile
from epd.simulate.clock import ticks_of
from epd.simulate.frame_choice import NO_WISHES, FrameChooser, VideoWishes
from epd.workload.requests import PlannedRequest, RequestShape, VideoSpec

if TYPE_CHECKING:
    from epd.simulate.receiving import GroupReceiver

_LEAD_ID = -(2**40)  # of the first token of the template: none of a medium


@lru_cache(maxsize=32)
def _blank_identity(num_tokens: int) -> TokenIdentity:
    return TokenIdentity(np.zeros((num_tokens, 3), np.int64))


def blank_identity(job: Job) -> TokenIdentity:
    """Returns blank identity rows, shared by all requests: for when no cache compares them."""
    return _blank_identity(1 << (job.num_prompt_tokens + job.output_tokens).bit_length())


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Describes one group: its input to the tower and the prompt, and the CPU time before that, ticks."""

    media: MediaWork
    decode_ticks: int
    is_video: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """Describes a request to come. media_key: equal for equal media; text_key: for equal questions.

    lead_tokens: of the text, before the media: the template's, which all requests begin with
    num_visual_tokens, num_prompt_tokens: summed once, since they are read often
    """

    index: int
    due: int
    groups: tuple[GroupWork, ...]
    text_tokens: int
    output_tokens: int
    media_key: int
    text_key: int
    lead_tokens: int = 0
    num_visual_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        num_visual = sum([group.media.num_tokens for group in self.groups])
        object.__setattr__(self, "num_visual_tokens", num_visual)
        object.__setattr__(self, "num_prompt_tokens", num_visual + self.text_tokens)

    @property
    def num_patches(self) -> int:
        return sum(group.media.num_patches for group in self.groups)


class JobMaker:
    """Makes jobs of planned requests; equal shapes share their groups.

    wishes: of all requests
    """

    def __init__(self, profile: Profile, codec: str = "h264", wishes: VideoWishes = NO_WISHES) -> None:
        self._profile = profile
        self._codec = codec
        self._chooser = FrameChooser(profile, wishes)
        self._made: dict[RequestShape, tuple[tuple[GroupWork, ...], int]] = {}

    def jobs(self, requests: Iterable[PlannedRequest]) -> Iterator[Job]:
        return map(self.job, requests)

    def job(self, request: PlannedRequest) -> Job:
        shape = request.shape
        key = shape if shape.videos else replace(shape, text_tokens=1, output_tokens=1)
        if key not in self._made:
            self._made[key] = self._media(key)
        groups, num_between = self._made[key]
        return Job(
            request.index,
            ticks_of(request.due_s),
            groups,
            self._profile.prompt.num_tokens(shape.text_tokens) + num_between,
            shape.output_tokens,
            request.media_seed,
            request.text_seed,
        )

    def _media(self, shape: RequestShape) -> tuple[tuple[GroupWork, ...], int]:
        """Returns the groups of a request, and the tokens of the text between its frames."""
        chosen = self._chooser.chosen(shape)
        works = [*self._works(shape)]
        for video, groups in zip(shape.videos, chosen.groups, strict=True):
            works += self._video_works(video, groups)
        return tuple(works), chosen.text_tokens

    def _works(self, shape: RequestShape) -> Iterator[GroupWork]:
        media = self._profile.media
        cost = _cost_of(self._profile.images)
        for size in shape.images:
            seconds = cost.seconds(size.width * size.height, 1)
            yield GroupWork(media.image(size), ticks_of(seconds))
        cost = _cost_of(self._profile.audio)
        for clip in shape.audios:
            yield GroupWork(media.audio(clip), ticks_of(cost.seconds(clip.duration_s, 1)))

    def _video_works(self, video: VideoSpec, groups: Sequence[MediaWork]) -> Iterator[GroupWork]:
        num_sampled = sum(group.num_frames for group in groups)
        pixels = video.num_frames * video.size.width * video.size.height
        cost = self._profile.video_cost(self._codec)
        for group in groups:
            seconds = cost.seconds(pixels * group.num_frames / num_sampled, group.num_frames)
            yield GroupWork(group, ticks_of(seconds), is_video=True)


def _cost_of(reading: StageTable | None) -> StageCost:
    return StageCost() if reading is None else reading.cost


class RequestState:
    """Tracks a request's progress. Times in ticks, -1 before they are known.

    encode_ticks, prefill_ticks: of the batches and passes that it was in, all together.
    """

    __slots__ = (
        "adopted", "encode_ticks", "encoded", "encoder", "end", "first_token", "identity", "is_added", "job",
        "kept", "media_read", "missing", "num_cached", "num_prefilled", "num_sent", "placed", "placement",
        "prefill_ticks", "receiver", "request_id", "starts",
    )  # fmt: skip

    def __init__(self, job: Job, placement: Placement) -> None:
        self.job = job
        self.placement = placement
        self.request_id = str(job.index)
        self.identity = blank_identity(job)
        self.placed = self.media_read = self.encoded = self.first_token = self.adopted = self.end = -1
        self.encode_ticks = self.prefill_ticks = 0
        self.encoder: str | None = None  # group that was dispatched last
        self.is_added = False
        self.num_sent = job.num_prompt_tokens  # computed tokens that its decode worker gets from another
        self.num_cached = -1  # prompt tokens that the prefill worker had, once it has begun
        self.num_prefilled = 0
        self.missing: set[int] = set()
        self.kept: set[int] = set()  # of these, groups whose embeddings are read from a disk
        self.receiver: GroupReceiver | None = None  # of its groups, where caches are simulated
        self.starts = tuple(
            accumulate((group.media.num_tokens for group in job.groups), initial=job.lead_tokens)
        )

    @property
    def prefill_worker(self) -> str:
        return self.placement.prefill_worker

    @property
    def decode_worker(self) -> str:
        return self.placement.decode_worker

    @property
    def num_ready(self) -> int:
        """Returns the prompt tokens that may be computed: up to the first group that is missing."""
        return self.starts[min(self.missing)] if self.missing else self.job.num_prompt_tokens


def identity_of(job: Job) -> TokenIdentity:
    """Returns rows of prompt and output: media by their key, question and answer by the request's own."""
    lead, visual, total = job.lead_tokens, job.num_visual_tokens, job.num_prompt_tokens + job.output_tokens
    behind = lead + visual
    rows = np.zeros((total, 3), np.int64)
    rows[:lead, 0] = _LEAD_ID - np.arange(lead)
    rows[lead:behind, 0] = -1 - np.arange(visual)
    rows[lead:behind, 1] = job.media_key
    rows[behind:, 0] = (job.text_key + np.arange(total - behind)) % 2**62
    rows[job.num_prompt_tokens :, 0] = (
        job.text_key + 7919 * (job.index + 1) + np.arange(job.output_tokens)
    ) % 2**62
    return TokenIdentity(rows)
