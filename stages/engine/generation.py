"""Defines the requests to a language model, its outputs, step by step, and what a failing one costs.

A pass that raises is run again in parts, so that it costs only the requests that it raises for alone:

[ a b c d ]  raises
[ a b ] done   [ c d ]  raises
               [ c ]  raises alone: c fails   [ d ] done
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from epd.encoders import Adapter, PromptPlan
from epd.encoders.checkpoint import read_config, read_generation_config
from epd.errors import EPDError, InputError, InternalError, RankLostError
from epd.kv.prefix_cache import TokenIdentity
from epd.sampling_params import SamplingParams, expected_tokens, held_to_context
from epd.stages.sampling.sampler import SampledToken
from epd.stages.sampling.sampling_state import with_bad_tokens
from epd.transfer.handover import HandoverEnd
from epd.types import Reuse

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Holds a checkpoint's defaults for generation.

    eos_ids: the tokens that end an answer.
    max_tokens: of an answer, where the request says nothing; None: what the context has room for.
    sampling: of a server's answers, where the request says nothing; without max_tokens.
    context_tokens: of the model.
    num_embeddings: rows of the model's vocabulary; the last of them may pad it and be no token's.
    suppressed_ids: tokens that no answer may hold.
    """

    eos_ids: frozenset[int]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    context_tokens: int | None = None
    num_embeddings: int = 0
    suppressed_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        config: Any,
        tokenizer_eos_id: int | None,
        context_tokens: int | None = None,
        num_embeddings: int = 0,
    ) -> GenerationSettings:
        """Reads a transformers GenerationConfig; without end tokens there, the tokenizer's own counts."""
        configured: int | Sequence[int] | None = config.eos_token_id
        ids = tokenizer_eos_id if configured is None else configured
        return cls(
            eos_ids=frozenset([ids] if isinstance(ids, int) else ids or ()),
            max_tokens=config.max_new_tokens,
            sampling=_own_sampling(config),
            context_tokens=context_tokens,
            num_embeddings=num_embeddings,
            suppressed_ids=tuple(config.suppress_tokens or ()),
        )

    @property
    def defaults(self) -> SamplingParams:
        """Returns greedy defaults, as the checkpoint has them; `completed` settles max_tokens."""
        return SamplingParams(repetition_penalty=self.sampling.repetition_penalty)

    def completed(self, params: SamplingParams, num_prompt_tokens: int, tokenizer: Any) -> SamplingParams:
        """Completes params: see `held_to_context` and `with_bad_tokens`. tokenizer: lent to the caller."""
        return with_bad_tokens(self._held(params, num_prompt_tokens), tokenizer, self.suppressed_ids)

    def _held(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        return held_to_context(params, num_prompt_tokens, self.context_tokens, self.max_tokens)

    def expected_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Estimates the tokens of all answers to a request with these params."""
        asked = self.max_tokens if params.max_tokens is None else params.max_tokens
        return expected_tokens(self._held(params, num_prompt_tokens), asked)


def _own_sampling(config: Any) -> SamplingParams:
    """Reads a transformers GenerationConfig as vLLM does, but stays greedy where it does not sample."""
    own: dict[str, Any] = {"repetition_penalty": config.repetition_penalty or 1.0}
    if config.do_sample:
        own["temperature"] = 1.0
        names = ("temperature", "top_p", "top_k", "min_p")
        own |= {name: value for name in names if (value := getattr(config, name, None)) is not None}
    return SamplingParams(**own)


def generation_settings(path: Path, adapter: Adapter) -> GenerationSettings:
    """Reads the folder's generation_config.json, without loading weights; see `read_generation_config`."""
    model_config = read_config(path)
    num_embeddings = getattr(model_config.get_text_config(), "vocab_size", None) or 0
    return GenerationSettings.of(
        read_generation_config(path),
        adapter.tokenizer.eos_token_id,
        context_tokens(model_config),
        num_embeddings,
    )


def context_tokens(config: Any) -> int | None:
    """Reads a model's context from its transformers configuration; None where it is unspecified."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(most) if most else None


class Extent(StrEnum):
    """Limits a worker's part of a request."""

    ANSWER = "answer"  # to its end
    FIRST_TOKEN = "first token"  # then another worker continues; blocks are held until `release`
    MEDIA = "media"  # up to the last visual token; blocks are held, for questions to start from


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Describes one prompt to be answered.

    identity: of the prompt's tokens.
    sampling: complete, with a number of max_tokens.
    seed: of the first of `sampling.n` answers; the next has the next.
    parent: a held request of extent MEDIA whose tokens are the first of this prompt.
    priority: the lower, the sooner.
    num_dropped: prompt tokens that are not in the cache it is adopted with.
    """

    request_id: str
    prompt: PromptPlan
    identity: TokenIdentity
    sampling: SamplingParams
    seed: int = 0
    extent: Extent = Extent.ANSWER
    parent: str | None = None
    priority: int = 0
    num_dropped: int = 0

    def __post_init__(self) -> None:
        if self.sampling.bad_words and self.sampling.bad_token_ids is None:
            raise ValueError(
                f"request '{self.request_id}' has bad words without tokens; complete its sampling"
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Counts the prompt tokens that are to be computed."""
        return self.prompt.prefix_length if self.extent is Extent.MEDIA else len(self.prompt)

    @property
    def max_tokens(self) -> int:
        """Returns the most tokens of an answer."""
        if self.sampling.max_tokens is None:
            raise ValueError(
                f"request '{self.request_id}' leaves max_tokens open; complete its sampling first"
            )
        return self.sampling.max_tokens


class TokenOutput(NamedTuple):
    """Reports a token that one answer has gained.

    choice: number of the answer among the request's, from 0.
    index: of the token in its answer. It identifies tokens that are repeated: a request that is
        retried on another worker gives the same tokens again.
    text: what has become readable; all texts of a sequence add up to its whole text.
    """

    request_id: str
    choice: int
    index: int  # type: ignore[assignment] # hides the tuple's search, which nobody needs
    token: SampledToken
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """Reports that a request has its blocks.

    num_cached: prompt tokens that need not be computed, nor encoded.
    reused: where keys and values of them were, unless in memory.
    """

    request_id: str
    num_cached: int
    reused: tuple[Reuse, ...] = ()


@dataclass(slots=True)
class EngineCounts:
    """Counts an engine's work.

    num_cached_tokens: of prompts, that did not have to be computed.
    num_drafts: runs of drafted tokens that a pass has checked for a sequence.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """Reports the results of one step.

    prefilled: requests of extent FIRST_TOKEN or MEDIA that are complete, and held.
    computed: requests whose cache has grown.
    num_tokens: computed in all.
    handovers: those that have ended. On the decode side, delivered ones continue there at once.
    faults: requests that raised, and are forgotten.
    """

    admissions: list[Admission] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    prefilled: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    handovers: list[HandoverEnd] = field(default_factory=list)
    faults: list[RequestFault] = field(default_factory=list)
    num_tokens: int = 0


logger = logging.getLogger(__name__)

_PartT = TypeVar("_PartT")
# After this many failures in a row with no success between them, the worker itself is broken.
MAX_FAULTS_IN_A_ROW = 16


@dataclass(frozen=True, slots=True)
class RequestFault:
    """Reports a request that its worker cannot continue, and has forgotten. cause: what was raised."""

    request_id: str
    cause: Exception

    @property
    def error(self) -> EPDError:
        """Returns the client's error: of a bug no more than its type."""
        return InternalError.of(self.cause)


def logged_fault(request_id: str, cause: Exception) -> RequestFault:
    """Returns the fault, with its traceback in the log unless the request itself is at fault."""
    if not isinstance(cause, InputError):
        logger.error("request %s failed alone; others go on", request_id, exc_info=cause)
    return RequestFault(request_id, cause)


class FaultCount:
    """Counts the requests that have failed in a row; decides when the worker itself is to end."""

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def succeeded(self) -> None:
        self._num_in_a_row = 0

    def failed(self, request_id: str, cause: Exception) -> RequestFault:
        """Logs the cause. Raises it where too many requests have failed in a row by no fault of their own."""
        self._num_in_a_row += not isinstance(cause, InputError)
        if self._num_in_a_row > MAX_FAULTS_IN_A_ROW:
            raise cause
        return logged_fault(request_id, cause)


def run_apart(
    parts: Sequence[_PartT],
    run: Callable[[Sequence[_PartT]], None],
    fail: Callable[[_PartT, Exception], None],
) -> None:
    """Runs all parts at once; where that raises, runs halves, and reports which of them raises alone.

    run: has no effect if it raises.
    Raises RankLostError, which no request is to blame for.
    """
    try:
        run(parts)
    except RankLostError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it costs the part that it belongs to
        if len(parts) == 1:
            fail(parts[0], error)
            return
        middle = len(parts) // 2
        run_apart(parts[:middle], run, fail)
        run_apart(parts[middle:], run, fail)
