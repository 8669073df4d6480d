"""Defines a profile: the costs of one model's stages on one device, and the sizes of its memory. Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from epd.errors import RequestError
from epd.profiles.cost import StageCost, StageTable
from epd.profiles.media import MediaRule
from epd.profiles.memory import MemoryNeeds
from epd.profiles.parallel import ShardedModel

# Of a transfer, to see which link is slower.
_LARGE_UNITS = 1e9


@dataclass(frozen=True, slots=True)
class PromptRule:
    """Counts tokens of a prompt without media: fixed_tokens of the uncached template, and its text."""

    fixed_tokens: float = 0.0
    per_text_token: float = 1.0

    def num_tokens(self, text_tokens: int) -> int:
        return max(1, round(self.fixed_tokens + self.per_text_token * text_tokens))


@dataclass(frozen=True, slots=True)
class Profile:
    """Describes a model on a device for simulations.

    is_analytic: computed from FLOPs, bytes and the efficiencies that `assumptions` state; nothing measured
    transfer: of embeddings and of keys and values, from worker to worker
    video: by codec, on one CPU thread
    images: decoding one, by its pixels, on one CPU thread
    audio: the same of a clip of sound, by its seconds
    switch_s: of a worker that takes another role; measured, the time to load and build the stage
    price_per_hour: of one device, in `currency`; None if it is not known
    power_w: of one device at most
    cores_per_device: threads of the CPU beside each device, that read media; None if they are not known
    context_tokens: of a prompt and its answer at most; None if it is not known
    dtype: of the weights
    kv_cache_dtype, quantization: of keys and values, and of the language model, as in `EngineConfig`
    num_threads: of torch in a worker, None where the CPU does not compute
    prompt: tokens around a text
    parallel: to run a worker on several devices, None where the layers are not known
    beside: times as long that a batch and a pass of one worker take while both run; 2 is half a device each
    core_speed: of a CPU core when all of this was measured, by `core_speed`; None if not
    """

    name: str
    model: str
    device: str
    is_analytic: bool
    media: MediaRule
    memory: MemoryNeeds
    encode: StageTable
    prefill: StageTable
    decode: StageTable
    transfer: StageTable
    video: Mapping[str, StageTable] = field(default_factory=dict)
    images: StageTable | None = None
    audio: StageTable | None = None
    switch_s: float = 0.7
    price_per_hour: float | None = None
    assumptions: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    num_threads: int | None = None
    prompt: PromptRule = field(default_factory=PromptRule)
    core_speed: float | None = None
    parallel: ShardedModel | None = None
    beside: float = 2.0
    currency: str = "USD"
    power_w: float | None = None
    cores_per_device: int | None = None
    context_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.beside < 1:
            raise ValueError(f"beside is {self.beside}, it must be at least 1: nothing gains from company")

    def on(self, num_devices: int) -> Profile:
        """Returns the profile of a worker on several devices, whose first has the tower alone.

        Raises RequestError if layers are not known.
        """
        if num_devices == 1:
            return self
        if self.parallel is None:
            raise RequestError(
                f"profile {self.name!r} is of layers that devices cannot share, or does not know the model's "
                f"layers, and {num_devices} devices a worker are asked for; allowed is 1; take a profile "
                "MODEL@DEVICE of another model"
            )
        prefill, decode = self.parallel.stages(self.prefill, self.decode, num_devices)
        memory = self.parallel.memory(self.memory, num_devices)
        return replace(self, memory=memory, prefill=prefill, decode=decode)

    def encoding_on(self, other: Profile, num_encoders: int, num_others: int) -> Profile:
        """Returns the profile of workers whose encoders are on devices of another profile.

        The price and the power of a device are the means of all, and links are those of the slower ones.
        Raises RequestError for profiles that are not of one model,
        """
        if other.model != self.model:
            raise RequestError(
                f"received the profiles {self.name!r} and {other.name!r} for encoders; allowed: two of one "
                "model, each measured on a device or computed; take MODEL@DEVICE"
            )

        def mean(own: float | None, its: float | None) -> float | None:
            if own is None or its is None:
                return None
            return (num_encoders * its + num_others * own) / (num_encoders + num_others)

        is_one_currency = self.currency == other.currency
        return replace(
            self,
            name=f"{self.name} with encoders of {other.name}",
            encode=other.encode,
            transfer=max(self.transfer, other.transfer, key=lambda each: each.cost.seconds(_LARGE_UNITS, 1)),
            price_per_hour=mean(self.price_per_hour, other.price_per_hour) if is_one_currency else None,
            power_w=mean(self.power_w, other.power_w),
            assumptions=(*self.assumptions, f"encoders: {other.name}, and all links are the slower ones"),
        )

    def video_cost(self, codec: str) -> StageCost:
        """Returns the cost of decoding. Raises RequestError for a codec that was not measured."""
        if codec not in self.video:
            raise RequestError(
                f"profile {self.name!r} has no video codec {codec!r}; it has {', '.join(self.video)}; "
                "measure it with epd profile"
            )
        return self.video[codec].cost
