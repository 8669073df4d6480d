"""From questions that were asked one after the other to what the application costs beside its models.

merged    one worker does everything: what is not the model's is the way there and back
split     other workers encode and decode: what it takes more is the way between workers
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.profiles.host import HostCosts, Overhead, PromptRule
from epd.profiles.profile import Profile
from epd.workload import Resolution, VideoSpec

IMAGE_SIZE = Resolution(224, 224)
VIDEO = VideoSpec(4.0, 24, Resolution(320, 192))
SHORT_TEXT, LONG_TEXT, NUM_STEPS, NUM_AT_ONCE = 32, 96, 32, 4


@dataclass(frozen=True, slots=True)
class Asked:
    """Lower quartiles of requests of one kind, for noise only adds; of CPU time the mean. Seconds.

    encode_s, prefill_s: work of these stages, as the application reports it. cpu_s: of all processes, without
    what they take when idle.
    """

    ttft_s: float
    e2e_s: float
    cpu_s: float
    encode_s: float
    prefill_s: float
    prompt_tokens: float
    cached_tokens: float

    @property
    def step_s(self) -> float:
        """Per token after the first, of a request with NUM_STEPS of them."""
        return (self.e2e_s - self.ttft_s) / NUM_STEPS

    @property
    def new_tokens(self) -> float:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class AskedAll:
    """One worker: a text with 1 output token, with NUM_STEPS + 1, NUM_AT_ONCE of these at once, a long text;
    an image, a video, each with 1. Three workers: a text with NUM_STEPS + 1, an image."""

    text: Asked
    answer: Asked
    answers_at_once: Asked
    long_text: Asked
    image: Asked
    video: Asked
    split_answer: Asked
    split_image: Asked


def prompt_rule(asked: AskedAll) -> PromptRule:
    per_token = (asked.long_text.new_tokens - asked.text.new_tokens) / (LONG_TEXT - SHORT_TEXT)
    return PromptRule(asked.text.new_tokens - per_token * SHORT_TEXT, per_token)


def host_costs(profile: Profile, asked: AskedAll, num_cores: int, idle_cores: float) -> HostCosts:
    """What is left of wall and CPU time when the model's share is taken away."""
    model = _Model(profile)
    text, answer = asked.text, asked.answer
    prefill_s = max(0.0, text.prefill_s - model.prefill_s(text))
    encode_s = max(0.0, asked.image.encode_s - model.image_s)
    in_text_s = model.prefill_s(text) + prefill_s
    sequence_s = max(0.0, _per_sequence_s(asked, in_text_s) - profile.decode.cost.per_unit_s)
    return HostCosts(
        num_cores=num_cores,
        idle_cores=idle_cores,
        request=Overhead.of(text.ttft_s - in_text_s, text.cpu_s - in_text_s),
        split=Overhead.of(asked.split_answer.ttft_s - answer.ttft_s, asked.split_answer.cpu_s - answer.cpu_s),
        image=_group(asked.image, text, model.read_image_s + model.image_s + encode_s, model),
        video=_group(asked.video, text, model.read_video_s + model.video_s + encode_s, model),
        sent=_sent(asked),
        second=Overhead.of(NUM_STEPS * (asked.split_answer.step_s - answer.step_s), 0.0),
        token_s=max(0.0, (answer.cpu_s - text.cpu_s) / NUM_STEPS - answer.step_s),
        encode_s=encode_s,
        prefill_s=prefill_s,
        decode_s=max(0.0, answer.step_s - model.step_s(answer) - sequence_s),
        sequence_s=sequence_s,
    )


def _group(asked: Asked, text: Asked, in_stages_s: float, model: _Model) -> Overhead:
    """More than a text, and not of its stages."""
    more_s = in_stages_s + model.prefill_s(asked) - model.prefill_s(text)
    return Overhead.of(asked.ttft_s - text.ttft_s - more_s, asked.cpu_s - text.cpu_s - more_s)


def _sent(asked: AskedAll) -> Overhead:
    """What an image takes more where another worker encodes it."""
    split, merged = asked.split_image, asked.image
    text_more_s = asked.split_answer.ttft_s - asked.answer.ttft_s
    cpu_more_s = asked.split_answer.cpu_s - asked.answer.cpu_s
    return Overhead.of(split.ttft_s - merged.ttft_s - text_more_s, split.cpu_s - merged.cpu_s - cpu_more_s)


def _per_sequence_s(asked: AskedAll, prefill_s: float) -> float:
    """A step of several sequences, less a step of one. While one decodes, the others are prefilled once."""
    crowd, alone = asked.answers_at_once, asked.answer
    share = (crowd.e2e_s - crowd.ttft_s) / crowd.e2e_s
    num_others = NUM_AT_ONCE * share - 1
    stalled_s = prefill_s * (NUM_AT_ONCE - 1) / NUM_STEPS
    return (crowd.step_s - stalled_s - alone.step_s) / num_others if num_others > 0 else 0.0


class _Model:
    """What the stages of a profile take of the requests that were asked."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        media, images = profile.media, profile.images
        self.image_s = profile.encode.cost.seconds(media.image(IMAGE_SIZE).num_patches, 1)
        self.read_image_s = (
            images.cost.seconds(IMAGE_SIZE.width * IMAGE_SIZE.height, 1) if images is not None else 0.0
        )
        groups = media.video(VIDEO)
        self.video_s = profile.encode.cost.seconds(sum(each.num_patches for each in groups), len(groups))
        pixels = VIDEO.num_frames * VIDEO.size.width * VIDEO.size.height
        self.read_video_s = profile.video_cost("h264").seconds(
            pixels, sum(each.num_frames for each in groups)
        )

    def prefill_s(self, asked: Asked) -> float:
        new = asked.new_tokens
        return self._profile.prefill.cost.seconds(new, new * (asked.cached_tokens + (new + 1) / 2))

    def step_s(self, asked: Asked) -> float:
        return self._profile.decode.cost.seconds(1, asked.prompt_tokens + NUM_STEPS / 2)
