"""Bounds how long an answer may get, and estimates how long it will be. No tensors.

    context   [ prompt ...... | room ............................. )
    answer                    [ requested length, at most the room )

A ceiling is not a wish: most answers end long before theirs. So memory is never set aside for it, and
planning ahead goes by `expected_tokens`.
"""

from __future__ import annotations

from dataclasses import replace

from epd.errors import RequestBudgetError, RequestError
from epd.sampling_params import MAX_INT64, SamplingParams

# Estimate for an answer whose length the request leaves open.
TYPICAL_TOKENS = 256


def held_to_context(
    params: SamplingParams,
    num_prompt_tokens: int,
    context_tokens: int | None,
    checkpoint_tokens: int | None = None,
) -> SamplingParams:
    """Returns the params with a definite max_tokens: the requested one, as far as the context has room.

    context_tokens: of the model, None where it has no end.
    checkpoint_tokens: longest answer of a request that names none; without either, all the room.
    Raises RequestBudgetError for a prompt that leaves no room, RequestError for min_tokens that do not fit.
    """
    room = MAX_INT64 if context_tokens is None else context_tokens - num_prompt_tokens
    if room < 1:
        raise RequestBudgetError(
            f"the prompt has {num_prompt_tokens} tokens; allowed: fewer than {context_tokens}; ask for less"
        )
    if params.min_tokens > room:
        raise RequestError(
            f"received min_tokens {params.min_tokens}; allowed: at most {room} behind a prompt of "
            f"{num_prompt_tokens} tokens in a context of {context_tokens}; lower it"
        )
    asked = checkpoint_tokens if params.max_tokens is None else params.max_tokens
    most = room if asked is None else min(asked, room)
    return replace(params, max_tokens=max(most, params.min_tokens))


def expected_tokens(params: SamplingParams, asked: int | None) -> int:
    """Returns how many tokens to plan for, over all answers to a request. params: held to the context.

    asked: what its request, or else the checkpoint, names as the longest answer; None: neither does.
    """
    most = MAX_INT64 if params.max_tokens is None else params.max_tokens
    return params.n * (most if asked is not None else min(most, TYPICAL_TOKENS))
