"""Encoders and receivers of one family in one process, with counts of what they had to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epd.encode.encoder_cache import EncoderCacheManager
from epd.encoders import Adapter, FrameSampling, MediaPlan
from epd.encoders.adapter import Embeddings
from epd.encoders.groups import FrameEncoder, MediaGroup, plan_groups
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingLayout, EmbeddingReceiver, EncoderPool
from epd.transfer.connectors import Ticket
from tests.encoders.families import Clip, Family, Picture
from tests.stages.encode.sharded_encoding import ShardedEncoding

SAMPLING = FrameSampling(num_frames=16)


class Workers:
    """Encoders and receivers of one family, with counts of what they had to do."""

    def __init__(
        self,
        family: Family,
        num_encoders: int,
        max_batch_patches: int = 200,
        num_blocks: int = 400,
        skip_static: float | None = None,
    ):
        self.family = family
        self.hub = InProcessHub()
        self.layout = EmbeddingLayout(64, torch.float32, 2 if family.name == "qwen3_vl" else 0)
        self.frames_asked: list[MediaGroup] = []
        self.encoders = []
        for number in range(num_encoders):
            cache, pool = self._memory(num_blocks)
            self.encoders.append(
                EncodeStage(
                    FrameEncoder(family.adapter, family.tower, skip_static, max_patches=max_batch_patches),
                    cache,
                    pool,
                    self.hub.connect(f"e{number}", pool),
                )
            )
        self.receiver = self.new_receiver("p0", num_blocks)

    def _memory(self, num_blocks: int) -> tuple[EncoderCacheManager, EncoderPool]:
        return EncoderCacheManager(num_blocks, 8), EncoderPool(num_blocks, 8, self.layout)

    def new_receiver(self, name: str, num_blocks: int = 400) -> EmbeddingReceiver:
        cache, pool = self._memory(num_blocks)
        return EmbeddingReceiver(cache, pool, self.hub.connect(name, pool))

    @property
    def num_encoded(self) -> int:
        return sum(encoder.counts.num_groups for encoder in self.encoders)

    def encode(
        self,
        media: Sequence[Picture | Clip],
        groups: Sequence[MediaGroup],
        receiver: EmbeddingReceiver | None = None,
        request_id: str = "r",
    ) -> list[tuple[MediaGroup, Embeddings]]:
        sharded = ShardedEncoding(self.encoders, receiver or self.receiver)
        results = list(sharded.encode(request_id, groups, lambda group: self.frames(media, group)))
        sharded.settle()
        return results

    def frames(self, media: Sequence[Picture | Clip], group: MediaGroup) -> Tensor:
        self.frames_asked.append(group)
        item = media[group.item]
        if isinstance(item, Clip):
            return self.family.frames(item, group.plan)
        tiles = self.family.frames(item, self.family.plan(item, SAMPLING))
        return tiles[group.start : group.stop]

    def job(self, media: Sequence[Picture | Clip], group: MediaGroup, ticket: Ticket) -> EncodeJob:
        return EncodeJob(ticket, group.plan, lambda: self.frames(media, group))

    def check(self) -> None:
        for worker in (*self.encoders, self.receiver):
            worker.check_integrity()
            assert worker.cache.num_held == 0


def merged(
    adapter: Adapter, plans: Sequence[MediaPlan], results: Sequence[tuple[MediaGroup, Embeddings]]
) -> list[Embeddings]:
    """Of each item, its embeddings joined."""
    items = []
    for item, plan in enumerate(plans):
        parts = [embeddings for group, embeddings in results if group.item == item]
        whole = Embeddings(
            torch.cat([part.rows for part in parts]),
            tuple(torch.cat(layers) for layers in zip(*(part.deepstack for part in parts), strict=True)),
        )
        items.append(adapter.join(whole, plan, 0, plan.num_units))
    return items


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def clip_of(family: Family, length: int = 40) -> Clip:
    rough = Clip(torch.zeros(length, 56, 56, 3, dtype=torch.uint8), 4.0)
    height, width = family.plan(rough, SAMPLING).size
    return Clip(noise(length, height, width, 3), 4.0)


def plan_all(
    family: Family, media: Sequence[Picture | Clip], group_tokens: int = 1
) -> tuple[list[MediaPlan], list[MediaGroup]]:
    plans = [family.plan(item, SAMPLING) for item in media]
    hashes = [f"item {index}" for index in range(len(media))]
    return plans, plan_groups(plans, hashes, model="tiny", group_tokens=group_tokens)
