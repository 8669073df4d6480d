"""Prefills [system][media] of a prompt once, group by group, for any number of questions after it.

blocks     [system][media     )                     held under the name of the prefix
question a [      shared      )[question a][answer
question b [      shared      )[question b][answer
"""

from __future__ import annotations

from collections.abc import Sequence

from epd.chat import ChatMessage
from epd.encoders import Adapter, MediaPlan
from epd.encoders.identity import prompt_identity
from epd.encoders.reduction import reduce_prompt
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.stages.encode.embedding_receiver import EmbeddingSplicer
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import Extent, GenerateRequest, GenerationSettings
from epd.stages.media import EncodedGroup
from epd.types import Int64Array


class MediaPrefix:
    """Holds the common beginning of questions about the same media; empty without media."""

    def __init__(
        self,
        name: str,
        plans: Sequence[MediaPlan],
        mm_hashes: Sequence[str],
        adapter: Adapter,
        settings: GenerationSettings,
        reduction: ReductionPolicy = KEEP_ALL,
        messages: Sequence[ChatMessage] = (),
    ) -> None:
        """Lays out the prefix.

        name: of the request that holds the blocks.
        plans: of the media.
        reduction: which of their tokens are kept.
        messages: a conversation that begins like all that follow; by default the media begin.
        Raises RequestError for messages that cannot be used.
        """
        self.name = name
        self.prompt = reduce_prompt(adapter.plan_prefix(plans, messages), reduction)
        self.num_missing = self.prompt.num_visual_tokens
        self._plans = plans
        self._mm_hashes = mm_hashes
        self._adapter = adapter
        self._settings = settings
        self._reduction = reduction
        self._splicer = EmbeddingSplicer(adapter, self.prompt)

    @property
    def token_ids(self) -> Int64Array:
        """Returns int64 [prefix_length]."""
        return self.prompt.token_ids[: self.prompt.prefix_length]

    @property
    def parent(self) -> str | None:
        """Returns the request whose blocks questions share."""
        return self.name if self.prompt.media else None

    def request(self) -> GenerateRequest:
        """Creates the request to prefill the media as their embeddings come."""
        identity = prompt_identity(self.prompt, self._mm_hashes)
        return GenerateRequest(self.name, self.prompt, identity, self._settings.defaults, extent=Extent.MEDIA)

    def add(self, group: EncodedGroup, engine: LanguageEngine) -> int:
        """Adds what the next group completes to the engine. Returns the number of visual tokens."""
        placed = self._splicer.push(*group)
        if placed is None:
            return 0
        engine.add_embeddings(self.name, placed)
        self.num_missing -= len(placed.indices)
        return len(placed.indices)

    def question(
        self, request_id: str, messages: Sequence[ChatMessage], sampling: SamplingParams, seed: int = 0
    ) -> GenerateRequest:
        """Creates the request to answer a question about the media.

        messages: the whole conversation, with the same media.
        sampling: max_tokens may be open.
        Raises RequestError, and ModelError if the prompt begins otherwise.
        """
        prompt = reduce_prompt(self._adapter.plan_chat(self._plans, messages), self._reduction)
        prompt.check_begins_with(self.token_ids)
        identity = prompt_identity(prompt, self._mm_hashes)
        sampling = self._settings.completed(sampling, len(prompt), self._adapter.tokenizer)
        return GenerateRequest(request_id, prompt, identity, sampling, seed, parent=self.parent)
