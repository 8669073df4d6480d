"""Runs Qwen3's decoder layers in bfloat16 for training, without a product for tokens that see each other not.

    tokens       [video 1) [question 1) [question 2) [video 2) [question 1) ...       T in all, no padding
    attention    a video: its tokens             a question: its video and its own tokens

The arithmetic is that of transformers' own layers under a mask, which compute all S x S products of a row.
Shapes: T tokens, C hidden size, H heads, K of keys and values, D of each; N blocks of L tokens see J others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

PADDING = 99  # the segment of positions that hold no token
# Blocks of about one length are computed together: up to so many tokens, and all others.
_LENGTHS = (28, 44, 90, 10**9)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Describes N blocks of L queries. queries: int64 [N, L]; keys: int64 [N, J]; both index tokens.

    mask: bfloat16 [N, 1, 1, L, J], added to the scores.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Says which tokens see which. place: int64 [T], where all blocks' outputs in a row hold each token's."""

    blocks: list[Blocks]
    place: Tensor

    @classmethod
    def of(cls, segments: Tensor) -> Plan:
        """Plans rows of segments, int64 [B, S]: 0 a video, then questions, which see it and themselves."""
        videos, questions = _spans(segments)
        groups = [[(span, range(0)) for span in videos]]
        low = 0
        for high in _LENGTHS:
            some = [(span, videos[row]) for row, span in questions if low < len(span) <= high]
            groups += [some] if some else []
            low = high
        blocks = [_blocks(group) for group in groups]
        order = [token for group in groups for token in _padded([span for span, _ in group], -1)]
        place = torch.zeros(max(order) + 1, dtype=torch.int64)
        at = torch.tensor(order)
        place[at[at >= 0]] = (at >= 0).nonzero().flatten()
        return cls(blocks, place)

    def to(self, device: torch.device) -> Plan:
        blocks = [Blocks(*(each.to(device) for each in (b.queries, b.keys, b.mask))) for b in self.blocks]
        return Plan(blocks, self.place.to(device))


def _spans(segments: Tensor) -> tuple[list[range], list[tuple[int, range]]]:
    """Returns the tokens of each row's video, and (row, tokens) of each question."""
    videos: list[range] = []
    questions: list[tuple[int, range]] = []
    start = 0
    for row, values in enumerate(segments):
        numbers, counts = torch.unique_consecutive(values[values != PADDING], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            span = range(start, start + count)
            if number:
                questions.append((row, span))
            else:
                videos.append(span)
            start += count
    return videos, questions


def _padded(spans: Sequence[range], fill: int) -> list[int]:
    length = max(len(span) for span in spans)
    return [token for span in spans for token in [*span, *[fill] * (length - len(span))]]


def _blocks(group: Sequence[tuple[range, range]]) -> Blocks:
    """Returns the blocks of (own tokens, tokens before them that are seen)."""
    own, before = ([pair[side] for pair in group] for side in (0, 1))
    size = len(group)
    queries = torch.tensor(_padded(own, -1)).view(size, -1)
    seen = torch.tensor(_padded(before, -1), dtype=torch.int64).view(size, -1)
    length = queries.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(size, -1, -1)
    may = torch.cat([(seen >= 0)[:, None].expand(-1, length, -1), causal & (queries >= 0)[:, None]], dim=2)
    may = may | (queries < 0)[:, :, None]  # padding sees anything
    mask = torch.zeros(may.shape, dtype=torch.bfloat16).masked_fill(~may, -torch.inf)
    return Blocks(queries.clamp(min=0), torch.cat([seen, queries], dim=1).clamp(min=0), mask[:, None, None])


def _attended(query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
    """Returns what heads see, [T, H * D], of queries [T, H, D], keys and values [T, K, D]."""
    num_keys, size = key.shape[1:]
    found = []
    for block in plan.blocks:
        count, length = block.queries.shape
        queries = _rows(query, block.queries).view(count, length, num_keys, -1, size).permute(0, 2, 3, 1, 4)
        keys, values = (_rows(each, block.keys).transpose(1, 2).flatten(0, 1) for each in (key, value))
        shared = queries.shape[2]
        scores = torch.bmm(queries.reshape(count * num_keys, shared * length, size), keys.mT) * size**-0.5
        masked = scores.view(count, num_keys, shared, length, -1) + block.mask
        seen = torch.bmm(masked.softmax(-1).view(scores.shape), values)
        seen = seen.view(count, num_keys, shared, length, size).permute(0, 3, 1, 2, 4)
        found.append(seen.reshape(count * length, -1))
    return torch.cat(found).index_select(0, plan.place)


def _rows(values: Tensor, at: Tensor) -> Tensor:
    """Returns values[at]; its gradient is faster than that of indexing."""
    return values.index_select(0, at.flatten()).view(*at.shape, *values.shape[1:])


def _normed(hidden: Tensor, weight: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-6)
    return (hidden.float() * scale * weight).bfloat16()


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns rotated states [T, H, D]; cos and sin are [T, 1, D]."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _layer(hidden: Tensor, cos: Tensor, sin: Tensor, plan: Plan, layer: nn.Module) -> Tensor:
    """Returns the hidden states [T, C], float32, after a layer."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([each.weight for each in projections]).bfloat16()
    mixed = functional.linear(_normed(hidden, layer.input_layernorm.weight), weight)
    mixed = mixed.view(len(hidden), -1, attention.head_dim)
    counts = [each.weight.shape[0] // attention.head_dim for each in projections]
    query, key, value = mixed.split(counts, dim=1)
    query = _turned(_normed(query, attention.q_norm.weight), cos, sin)
    key = _turned(_normed(key, attention.k_norm.weight), cos, sin)
    seen = _attended(query, key, value, plan)
    hidden = hidden + functional.linear(seen, attention.o_proj.weight.bfloat16())
    weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).bfloat16()
    gate, up = functional.linear(_normed(hidden, layer.post_attention_layernorm.weight), weight).chunk(
        2, dim=-1
    )
    return hidden + functional.linear(functional.silu(gate) * up, mlp.down_proj.weight.bfloat16())


def decode(language: nn.Module, inputs: Tensor, positions: Tensor, segments: Tensor) -> list[Tensor]:
    """Returns the hidden states after each layer, then after the last norm: float32 [T, C] each.

    inputs: float32 [B, S, C]; positions: int64 [3, B, S]; segments: int64 [B, S]. Tokens come row by row,
    those of padding left out.
    """
    is_token = segments != PADDING
    plan = Plan.of(segments.cpu()).to(inputs.device)
    cos, sin = (each[is_token][:, None].bfloat16() for each in language.rotary_emb(inputs, positions))
    states = [inputs[is_token]]
    for layer in language.layers:
        states.append(_layer(states[-1], cos, sin, plan, layer))
    return [*states[1:], _normed(states[-1], language.norm.weight).float()]
