"""The mixes of requests of `benchmarks.epd_pays`: what arrives when, live and simulated."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from benchmarks.published.paper import paper_profile
from epd.chat import ChatMessage, ContentPart
from epd.encode.sharding import GROUP_TOKENS
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.adapter import MediaPlan
from epd.encoders.groups import plan_groups
from epd.models import embedded_model_path
from epd.planning.replay import scaled
from epd.profiles.files import load_profile
from epd.profiles.media import MediaWork
from epd.profiles.profile import Profile
from epd.simulate.clock import ticks_of
from epd.simulate.requests import GroupWork, Job
from epd.workload.metrics import SLO

MODEL = embedded_model_path()
PAPER = "minicpm-v-2.6@epd-paper"
VIDEO_FPS = 10


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    share: of all requests
    side: pixels of the square images or frames
    num_frames: of a video; 0 for none
    """

    share: float
    num_tokens: int
    num_images: int = 0
    num_frames: int = 0
    side: int = 224

    @property
    def media(self) -> tuple[str, ...]:
        return ("image",) * self.num_images + ("video",) * bool(self.num_frames)

    def message(self, name: str) -> ChatMessage:
        parts = (*(ContentPart("image" if each == "image" else "video") for each in self.media),)
        return ChatMessage("user", (*parts, ContentPart("text", f"What is {name}?")))


@dataclass(frozen=True)
class Mix:
    """Requests that arrive at random, and what they ask of the devices.

    patches, tokens: of the device's model that one of shapes-vl stands for, in costs and in limits
    slo: what splitting is for; loose: of long gaps between tokens, where merged workers may be better
    rates: per second of the device
    num_requests: of a round
    """

    name: str
    profile_name: str
    patches: int
    tokens: int
    kinds: tuple[Kind, ...]
    slo: SLO
    loose: SLO
    rates: tuple[float, ...]
    num_devices: int = 8
    num_requests: int = 100

    @cached_property
    def profile(self) -> Profile:
        return paper_profile() if self.profile_name == PAPER else load_profile(self.profile_name)

    @cached_property
    def live_profile(self) -> Profile:
        """Returns the costs of the device by the patches and tokens of shapes-vl."""
        return scaled(self.profile, self.patches, self.tokens)

    @property
    def group_tokens(self) -> int:
        """Returns the visual tokens of a group, of shapes-vl."""
        return max(1, GROUP_TOKENS // self.tokens)

    def arrivals(self, rate: float, round_index: int) -> list[Arrival]:
        """Returns the requests of a round; all layouts get the same, and all rates in the same order."""
        draws = random.Random(f"{self.name} {round_index}")
        shares = [kind.share for kind in self.kinds]
        found, at_s = list[Arrival](), 0.0
        for number in range(self.num_requests):
            at_s += draws.expovariate(1.0) / rate
            found.append(Arrival(at_s, draws.choices(self.kinds, shares)[0], f"{round_index}-{number}"))
        return found

    def jobs(self, arrivals: Sequence[Arrival]) -> list[Job]:
        """Returns the same requests for the simulator, in patches and tokens of the device's model."""
        return [self._job(number, each) for number, each in enumerate(arrivals)]

    def _job(self, number: int, arrival: Arrival) -> Job:
        kind = arrival.kind
        sizes, is_video = sizes_of(kind, self.group_tokens), bool(kind.num_frames)
        works = (MediaWork(self.patches * patches, self.tokens * tokens) for patches, tokens in sizes.groups)
        groups = tuple(GroupWork(work, 0, is_video) for work in works)
        num_text = self.tokens * sizes.text_tokens
        return Job(number, ticks_of(arrival.at_s), groups, num_text, kind.num_tokens, number, number)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. at_s: on the device's clock, from the beginning of the round."""

    at_s: float
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a request to shapes-vl. groups: (patches, tokens) of each."""

    groups: tuple[tuple[int, int], ...]
    text_tokens: int


@cache
def sizes_of(kind: Kind, group_tokens: int) -> Sizes:
    adapter = load_adapter(MODEL)
    plans: list[MediaPlan] = [adapter.plan_image(kind.side, kind.side) for _ in range(kind.num_images)]
    if kind.num_frames:
        facts = VideoFacts(kind.num_frames, VIDEO_FPS, kind.side, kind.side)
        plans.append(adapter.plan_video(facts, FrameSampling(num_frames=kind.num_frames)))
    groups = plan_groups(plans, [""] * len(plans), model="", group_tokens=group_tokens)
    num_visual = sum(plan.num_tokens for plan in plans)
    prompt = adapter.plan_chat(plans, (kind.message("0-10"),))
    sizes = tuple((group.spec.num_patches, group.spec.num_embeddings) for group in groups)
    return Sizes(sizes, len(prompt) - num_visual)


MIXES: Mapping[str, Mix] = {
    mix.name: mix
    for mix in (
        Mix(
            "four 4K images",
            PAPER,
            patches=160,
            tokens=40,
            kinds=(Kind(1.0, num_tokens=10, num_images=4),),
            slo=SLO(2.6, 0.04),
            loose=SLO(5.2, 0.4),
            rates=(1.5, 2.25, 3.0, 3.75),
            num_requests=40,
        ),
        Mix(
            "texts, each second a long video",
            "qwen2.5-vl-7b@a100-80gb",
            patches=32,
            tokens=32,
            kinds=(Kind(0.5, num_tokens=60), Kind(0.5, num_tokens=60, num_frames=64, side=64)),
            slo=SLO(3.1, 0.025),
            loose=SLO(6.2, 0.25),
            rates=(8.0, 12.0, 16.0, 20.0),
            num_requests=48,
        ),
        Mix(
            "long videos",
            "qwen2.5-vl-7b@a100-80gb",
            patches=32,
            tokens=32,
            kinds=(Kind(1.0, num_tokens=10, num_frames=64, side=64),),
            slo=SLO(3.1, 0.04),
            loose=SLO(1.25, 0.4),
            rates=(4.0, 8.0, 12.0),
            num_requests=40,
        ),
    )
}
