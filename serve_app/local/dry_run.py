"""Says what a batch would take, before anything is decoded: lines, media, hours, tokens, device time, price.

Media are looked at here (`own_batch.py`), or by the server that will answer. Only their headers are read.
A sample of the media stands for all of them where the run itself is to begin soon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from typing import Any

import httpx

from epd.batch.http_backend import HttpBackend
from epd.batch.line_index import LineGroup, LineIndex
from epd.batch.lines import JSON, BatchLine
from epd.batch.result_files import Reason
from epd.batch.summary import Hardware
from epd.batch.tasks import Failed
from epd.console import counted
from epd.encode.sharding import GROUP_TOKENS
from epd.errors import RequestBudgetError
from epd.profiles.media import MediaRule
from epd.profiles.profile import Profile
from epd.sampling_params import TYPICAL_TOKENS
from epd.types import ceil_div

# Answers that are decoded together.
_BATCH = 32
_ESTIMATE_URL = "/v1/epd/estimate"
_TIMEOUT_S = 120.0
_COUNTS = (
    "num_not_looked_at", "num_failing", "num_media", "num_frames", "visual_tokens", "prompt_tokens",
    "answer_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Looked:
    """Says what one line would take.

    visual_tokens: of the prompt, as they are prefilled. whole_tokens: those without reduction
    num_patches: of its media; None where it is not known
    answer_tokens: as many as are expected
    """

    num_media: int
    video_s: float
    num_frames: int
    visual_tokens: int
    whole_tokens: int
    prompt_tokens: int
    answer_tokens: int
    num_patches: int | None = None


# None for media that cannot be looked at.
Look = Callable[[BatchLine], Looked | Failed | None]


@dataclass(slots=True)
class DryRun:
    """Sums up what a batch would take.

    num_groups: sets of media. num_sampled: those that were looked at, which stand for all
    num_not_looked_at: lines about media of other machines, which are in no other sum
    num_failing: lines that would fail, by `reasons`
    num_media: each once. video_hours: of those that are videos
    visual_tokens: computed once for all questions about the same media
    prompt_tokens, answer_tokens: of all lines; of answers as many as are expected
    device_s: seconds of one device for all stages but the decoding of video; None without a profile
    """

    num_lines: int = 0
    num_groups: int = 0
    num_sampled: int = 0
    num_not_looked_at: int = 0
    num_failing: int = 0
    num_media: int = 0
    video_hours: float = 0.0
    num_frames: int = 0
    visual_tokens: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    device_s: float | None = None
    hardware: Hardware = field(default_factory=Hardware)
    reasons: dict[str, Reason] = field(default_factory=dict)

    def fail(self, num_lines: int, kind: str, message: str) -> None:
        self.num_failing += num_lines
        self.reasons.setdefault(kind, Reason(message)).num_lines += num_lines

    def scaled(self, factor: float) -> DryRun:
        """Returns the sums of as many times the media."""
        more: dict[str, Any] = {name: round(factor * getattr(self, name)) for name in _COUNTS}
        more["reasons"] = {
            kind: Reason(reason.example, round(factor * reason.num_lines))
            for kind, reason in self.reasons.items()
        }
        device_s = None if self.device_s is None else factor * self.device_s
        return replace(self, **more, video_hours=factor * self.video_hours, device_s=device_s)

    @property
    def time_s(self) -> float | None:
        """Returns the seconds of all devices, where their number and a profile are known."""
        num_devices = self.hardware.num_devices
        return None if self.device_s is None or num_devices is None else self.device_s / num_devices

    @property
    def price(self) -> float | None:
        """Returns the price of the run; of one device where no number of devices is known."""
        seconds = self.device_s if self.time_s is None else self.time_s
        return None if seconds is None else self.hardware.price_of(seconds)

    def lines(self) -> list[str]:
        """Returns the sums for people."""
        device = "unknown; --profile adds it" if self.device_s is None else _time(self.device_s)
        media = "1 medium" if self.num_media == 1 else f"{self.num_media} media"
        found = [
            f"{counted(self.num_lines, 'line')}; {self.num_failing} would fail",
            f"{media}, {self.video_hours:.2f} hours of video, {counted(self.num_frames, 'frame')}",
            f"{self.visual_tokens:,} visual tokens, each computed once; {self.prompt_tokens:,} tokens of "
            f"prompts, {self.answer_tokens:,} of answers expected",
            f"time on one device: {device}",
        ]
        if self.num_not_looked_at:
            found[0] += f"; {self.num_not_looked_at} are about media elsewhere, in no sum below"
        if self.num_sampled < self.num_groups:
            found[0] += f"; an estimate by {self.num_sampled} of {self.num_groups} media"
        if self.time_s is not None:
            found.append(
                f"time on {counted(self.hardware.num_devices or 1, 'device')}: {_shown(self.time_s)}"
            )
        if self.price is not None:
            found.append(f"price: {self.price:.4g} at {self.hardware.hourly_price:g} an hour")
        return found

    def record(self) -> dict[str, Any]:
        """Returns the sums for `--json`."""
        return {**asdict(self), "time_s": self.time_s, "price": self.price}


def _time(seconds: float) -> str:
    return f"{_shown(seconds)}, {seconds / 3600:.3g} GPU hours, without the decoding of video"


def _shown(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def dry_run(
    index: LineIndex,
    look: Look,
    profile: Profile | None,
    show: Callable[[int, int], None],
    *,
    hardware: Hardware,
    max_groups: int | None = None,
) -> DryRun:
    """Looks at the media of an index that is built. Raises ModelError.

    profile: costs of the model that would answer
    show: called with the sets of media that are done, and all
    max_groups: sets of media to look at, evenly spread; None for all
    """
    num_groups = index.num_families
    every = 1 if max_groups is None else ceil_div(num_groups, max_groups)
    found = DryRun(num_groups=num_groups, device_s=None if profile is None else 0.0, hardware=hardware)
    num_seen = 0
    for place, group in enumerate(index.groups()):
        if place % every == 0:
            _add(found, look, profile, group, next(index.lines(group)))
            found.num_sampled += 1
            num_seen += group.num_lines
            show(place + 1, num_groups)
    num_asked = index.num_lines - index.num_refused
    if num_seen < num_asked:
        found = found.scaled(num_asked / num_seen)
    for refused in index.refused():
        found.fail(1, "RequestError", refused.message)
    found.num_lines = index.num_lines
    return found


def _add(found: DryRun, look: Look, profile: Profile | None, group: LineGroup, line: BatchLine) -> None:
    """Adds a group, each of whose lines is taken to be as its first."""
    looked, num_lines = look(line), group.num_lines
    if isinstance(looked, Failed):
        found.fail(num_lines, looked.kind, looked.message)
    elif looked is None:
        found.num_not_looked_at += num_lines
    else:
        found.num_media += looked.num_media
        found.video_hours += looked.video_s / 3600
        found.num_frames += looked.num_frames
        found.visual_tokens += looked.visual_tokens
        found.prompt_tokens += num_lines * looked.prompt_tokens
        found.answer_tokens += num_lines * looked.answer_tokens
        if profile is not None:
            found.device_s = (found.device_s or 0.0) + _device_s(profile, looked, num_lines)


def _device_s(profile: Profile, looked: Looked, num_lines: int) -> float:
    """Returns what a group of lines takes: its media once, each question and each answer."""
    num_prompt, num_visual = looked.prompt_tokens, looked.visual_tokens
    num_text = num_prompt - num_visual
    num_groups = ceil_div(looked.whole_tokens, GROUP_TOKENS)
    patches = looked.num_patches
    if patches is None:
        patches = round(looked.whole_tokens * _patches_per_token(profile.media))
    encode_s = profile.encode.cost.seconds(patches, num_groups) if num_groups else 0.0
    media_s = (
        profile.prefill.cost.seconds(num_visual, num_visual * (num_visual + 1) / 2) if num_visual else 0.0
    )
    question_s = profile.prefill.cost.seconds(num_text, num_text * (num_visual + num_prompt + 1) / 2)
    token_s = profile.decode.cost.seconds(_BATCH, _BATCH * num_prompt) / _BATCH
    return encode_s + media_s + num_lines * (question_s + looked.answer_tokens * token_s)


def _patches_per_token(media: MediaRule) -> float:
    return media.merge**2 if media.kind == "grid" else media.tile_patches / media.tile_tokens


def server_look(backend: HttpBackend) -> Look:
    """Returns how a server of ours looks at lines. One of another maker looks at none."""
    endpoint = backend.endpoints[0]

    def look(line: BatchLine) -> Looked | Failed | None:
        try:
            answer = httpx.post(
                f"{endpoint.url}{_ESTIMATE_URL}",
                json=backend.body_of(line),
                headers=endpoint.headers,
                timeout=_TIMEOUT_S,
                trust_env=False,
            )
            is_planned, reply = answer.status_code == HTTPStatus.OK, answer.json()
            return _looked(line, reply) if is_planned else _failed(line, reply)
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    return look


def _failed(line: BatchLine, reply: Any) -> Failed | None:
    """Returns why a server of ours refused a line: its codes are names. None for another server."""
    error = reply.get("error") if isinstance(reply, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return None
    return Failed(line, error["code"], str(error.get("message")))


def _looked(line: BatchLine, reply: JSON) -> Looked | Failed:
    if not reply["fits"]:
        return Failed.of(line, RequestBudgetError(reply["reason"]))
    asked = line.body.get("max_completion_tokens") or line.body.get("max_tokens") or TYPICAL_TOKENS
    return Looked(
        num_media=len(reply["media"]),
        video_s=reply["video_s"],
        num_frames=reply["frames"],
        visual_tokens=reply["visual_tokens"],
        whole_tokens=reply["visual_tokens_before_reduction"],
        prompt_tokens=reply["prompt_tokens"],
        answer_tokens=min(reply["max_completion_tokens"], asked),
    )
