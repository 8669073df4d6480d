"""Describes the simulated system: workers, batching, sharding and hand-over. Frozen and resolved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.control.decoders import THREADS_OF_A_GPU
from epd.encode.sharding import DEFAULT_BATCH_PATCHES, Sharding
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.media import MediaRule
from epd.profiles.memory import MemoryLimits, WorkerMemory
from epd.profiles.profile import Profile
from epd.simulate.drafting import DraftPlan
from epd.simulate.kept_media import KeptMedia
from epd.topology import Stage, Topology, role_letters

_DEFAULT_LIMITS = SchedulerConfig()
# Maps groups to encoders by the patches of the groups and those outstanding at each encoder.
DealGroups = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Deployment:
    """Describes a topology and all settings that change its behaviour.

    language, decode: limits of workers that prefill, merged roles included, and of those that only decode
    max_batch_patches: that an encoder takes together; one group is always taken
    sharding: which encoders the groups of one request go to
    deal: how "groups" are dispatched if all of a request are ready; None: one by one, as in the server
    is_overlapped: groups are prefilled and handed over as they come, instead of all at once
    cpu_threads: that decode media, for the whole machine
    video_gpus: that decode videos beside them, as `epd serve --video-device` has it
    kv_tokens: of each worker; None for the most that fits the device
    num_embeddings: that an encoder keeps, and a prefill worker receives, each: as `epd serve` has it
    degrees: (letters of a group's roles, devices that each of its workers shares its layers over); else 1
    largest_group_patches: of the requests to come, a batch of its own if it is above max_batch_patches; of
        tiles a call of the tower takes no more than max_batch_patches all the same
    enable_prefix_caching: with the caches of embeddings, of encoders and of receivers
    drafts: None for none
    kept: what a disk has of media, with `enable_prefix_caching`; None for nothing
    max_waiting, max_wait_s: before requests are refused
    encode_beside: workers with other stages too encode beside these, as `epd serve` has it; else in turns
    is_stepwise: every decode step is an event of its own, a slow check of combined steps
    """

    topology: Topology
    language: SchedulerConfig = _DEFAULT_LIMITS
    decode: SchedulerConfig = _DEFAULT_LIMITS
    max_batch_patches: int = DEFAULT_BATCH_PATCHES
    sharding: Sharding = "groups"
    deal: DealGroups | None = None
    is_overlapped: bool = True
    cpu_threads: int = 16
    video_gpus: int = 0
    kv_tokens: int | None = None
    num_embeddings: int = 65_536
    largest_group_patches: int = 0
    degrees: tuple[tuple[str, int], ...] = ()
    block_size: int = 16
    enable_prefix_caching: bool = False
    drafts: DraftPlan | None = None
    kept: KeptMedia | None = None
    max_waiting: int = 4096
    max_wait_s: float = 600.0
    encode_beside: bool = True
    is_stepwise: bool = False

    def __post_init__(self) -> None:
        limits = (self.max_batch_patches, self.cpu_threads, self.block_size, self.max_waiting)
        if min(limits) < 1 or self.video_gpus < 0:
            raise ValueError(f"every limit must be at least 1, and video_gpus 0, got {self}")

    def scheduler_config(self, roles: frozenset[Stage]) -> SchedulerConfig:
        return self.language if "prefill" in roles else self.decode

    def degree(self, roles: frozenset[Stage]) -> int:
        """Returns the devices of one worker."""
        return dict(self.degrees).get(role_letters(roles), 1)

    @property
    def gpu_threads(self) -> int:
        """Returns how many threads the GPUs that decode videos stand for."""
        return THREADS_OF_A_GPU * self.video_gpus

    def encodes_beside(self, roles: frozenset[Stage]) -> bool:
        """Returns whether workers with these roles encode beside their other stages."""
        return self.encode_beside and "encode" in roles and len(roles) > 1

    @property
    def num_devices(self) -> int:
        return sum(group.num_workers * self.degree(group.roles) for group in self.topology.groups)

    def memory(self, profile: Profile, roles: frozenset[Stage]) -> WorkerMemory:
        """Returns the memory of one worker. Raises InfeasibleError when it does not fit its device."""
        limits = self.scheduler_config(roles)
        found = profile.on(self.degree(roles)).memory.worker(
            roles,
            MemoryLimits(
                max(self.max_batch_patches, self._largest_unit(profile.media)),
                limits.max_num_batched_tokens,
                limits.max_num_seqs,
                self.num_embeddings,
                self.kv_tokens,
                encode_beside=self.encode_beside,
                chunk_tokens=limits.max_chunk_tokens,
                block_size=self.block_size,
            ),
        )
        found.check(profile.model, profile.device, self.block_size)
        return found

    def _largest_unit(self, media: MediaRule) -> int:
        """Returns the most patches that a call of the tower takes at any limit: a group, or one tile."""
        is_tiled = media.kind == "tiles"
        return min(self.largest_group_patches, media.tile_patches) if is_tiled else self.largest_group_patches

    def num_blocks(self, profile: Profile, roles: frozenset[Stage]) -> int:
        """Returns KV blocks of one worker. Raises InfeasibleError when its weights leave no room for one."""
        return self.memory(profile, roles).kv_tokens // self.block_size
