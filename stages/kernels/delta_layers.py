"""Computes what stands around the gated delta rule in a layer on a GPU, by a kernel before and one behind.

    delta_inputs    projected rows -> causal convolution, SiLU, directions | decays, strengths
    gate_norm       rows of the rule -> norm of each head, times SiLU of its gate

    rows of a pass     | a | b b b drafts | c c c c .. c | c c c |        pieces: a, b, and two of c
    inputs of a row    tail in the slot, row, row ..                      of the second of c: rows alone

A program convolves one head of queries, keys or values of a piece, row by row. A row is read from the device
once; the cache has it for those behind. One of values makes the decays and the strengths of its head, too.
Behind the known rows it writes the last inputs to the target: no slot that is written is read in a pass.

Import this module only where Triton is. The twins in plain torch: `stages/decoder/delta_layer.py`.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.encoders.kernels.dispatch import check_contiguous
from epd.types import ceil_div

_HEADS = 4  # that a program norms


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _window(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows, tail, row, source, is_read, channel, row_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Returns the inputs of a piece's row, float32 [BLOCK_T, BLOCK]: the last of TAPS is the row itself."""
    at = row - (TAPS - 1) + tl.arange(0, BLOCK_T)[:, None]
    is_row = at >= tl.where(source == -2, -TAPS, 0)  # of a later piece, rows before it are in the pass
    is_held = at < tl.where(source >= 0, 0, -TAPS)
    place = rows + at.to(tl.int64) * row_stride + channel
    held = tail + (at + (TAPS - 1)) * CHANNELS + channel
    inputs = tl.load(place, mask=is_read & is_row, other=0.0).to(tl.float32)
    return inputs + tl.load(held, mask=is_read & is_held, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator] # Triton is untyped
def _delta_inputs_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows,
    filters,
    tails,
    rates,
    biases,
    mixed,
    gates,
    pieces,
    num_tokens,
    row_stride,
    slot_stride,
    scale,
    length_eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = pieces + tl.program_id(0) * 5
    start = tl.load(item).to(tl.int64)
    num_rows = tl.load(item + 1)
    num_known = tl.load(item + 2)
    source = tl.load(item + 3).to(tl.int64)
    target = tl.load(item + 4).to(tl.int64)
    # Heads of queries, of keys and of values: where the head's channels begin, and those of its kind.
    part = tl.program_id(1)
    is_query = part < KEY_HEADS
    is_value = part >= 2 * KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    head = part - 2 * KEY_HEADS
    first = tl.where(is_value, 2 * KEYS + head * VALUE_DIM, part * KEY_DIM)
    of_kind = tl.where(is_value, 2 * KEYS, tl.where(is_query, 0, KEYS))
    width = tl.where(is_value, HEADS * VALUE_DIM, KEYS)
    at = tl.arange(0, BLOCK)
    inside = at < tl.where(is_value, VALUE_DIM, KEY_DIM)
    channel = (first + at)[None, :]
    tap = tl.arange(0, BLOCK_T)[:, None]
    is_read = inside[None, :] & (tap < TAPS)
    weights = tl.load(filters + tap * CHANNELS + channel, mask=is_read, other=0.0)
    of_piece = rows + start * row_stride
    tail = tails + source * slot_stride
    rate = tl.load(rates + head, mask=is_value, other=0.0)
    bias = tl.load(biases + head, mask=is_value, other=0.0)
    for row in range(num_rows):
        token = start + row
        window = _window(of_piece, tail, row, source, is_read, channel, row_stride, CHANNELS, TAPS, BLOCK_T)
        value = tl.sum(window * weights, 0).to(rows.dtype.element_ty).to(tl.float32)
        value = (value * tl.sigmoid(value)).to(rows.dtype.element_ty).to(tl.float32)
        length = tl.rsqrt(tl.sum(value * value, 0) + length_eps)
        value *= tl.where(is_value, 1.0, tl.where(is_query, length * scale, length))
        to = mixed + of_kind * num_tokens.to(tl.int64) + token * width + (first - of_kind)
        tl.store(to + at, value, mask=inside)
        # Behind the channels come the gates of what the rule gives, strengths, and what decays are made of.
        given = of_piece + row * row_stride + CHANNELS + HEADS * VALUE_DIM + head
        strength = tl.sigmoid(tl.load(given, mask=is_value, other=0.0).to(tl.float32))
        step = tl.load(given + HEADS, mask=is_value, other=0.0).to(tl.float32) + bias
        # log(1 + e^x) without the digits that 1 + e^x loses.
        power = tl.exp(tl.minimum(step, 20.0))
        more = 1.0 + power
        soft = tl.where(more == 1.0, power, tl.log(more) * (power / tl.where(more == 1.0, 1.0, more - 1.0)))
        decay = rate * tl.where(step > 20.0, step, soft)
        of_head = gates + token * HEADS + head
        tl.store(of_head, decay, mask=is_value)
        after = of_head + num_tokens.to(tl.int64) * HEADS
        tl.store(after, strength.to(rows.dtype.element_ty).to(tl.float32), mask=is_value)
    is_kept = inside[None, :] & (tap < TAPS - 1)
    is_written = inside[None, :] & (tap < tl.where(target >= 0, TAPS - 1, 0))
    kept = _window(of_piece, tail, num_known, source, is_kept, channel, row_stride, CHANNELS, TAPS, BLOCK_T)
    to_tail = tails + target * slot_stride + tap * CHANNELS + channel
    tl.store(to_tail, kept.to(tails.dtype.element_ty), mask=is_written)


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _gate_norm_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    attended, gates, weight, out, gate_stride, eps, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (at < DIM)
    place = head * DIM + at
    kind = out.dtype.element_ty
    values = tl.load(attended + token * (NUM_HEADS * DIM) + place, mask=inside, other=0.0)
    values = values.to(kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)[:, None]
    values *= scale * tl.load(weight + at, mask=at < DIM, other=0.0).to(tl.float32)
    gate = tl.load(gates + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    gated = values.to(kind).to(tl.float32) * (gate * tl.sigmoid(gate))
    tl.store(out + token * (NUM_HEADS * DIM) + place, gated.to(kind), mask=inside)


def delta_inputs_fused(
    rows: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor],
    tails: Tensor,
    pieces: Tensor,
    sizes: tuple[int, int, int, int],
    length_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Makes the rule's inputs of projected rows, and writes the targets of tails.

    rows: [T, channels + H * Dv + 2 H], in one piece. parameters: filters, float32 [K, channels], rates and
        biases of the decays, float32 [H].
    tails: [slots, K - 1, channels], of the rows' type; slots may lie apart.
    pieces: int32 [P, 5], of each its first row, its rows, how many of them are known, the slot that it reads
        (-1 for none, -2 where the rows before it are in the pass), and the one for its last known inputs
        (-1 for none).
    sizes: Hk, H, Dk, Dv. length_eps: added to the squares of a head before the root.
    Returns float32 query and key [T, Hk, Dk], value [T, H, Dv], decay and strength [T, H].
    """
    filters, rates, biases = parameters
    check_contiguous(rows, *parameters, tails[0])
    key_heads, heads, key_dim, value_dim = sizes
    num_tokens, num_channels = len(rows), filters.shape[1]
    mixed = torch.empty(num_tokens * num_channels, dtype=torch.float32, device=rows.device)
    gates = mixed.new_empty(2, num_tokens, heads)
    _delta_inputs_kernel[(len(pieces), 2 * key_heads + heads)](
        rows,
        filters,
        tails,
        rates,
        biases,
        mixed,
        gates,
        pieces,
        num_tokens,
        rows.stride(0),
        tails.stride(0),
        key_dim**-0.5,
        length_eps,
        KEY_HEADS=key_heads,
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TAPS=len(filters),
        BLOCK_T=int(triton.next_power_of_2(len(filters))),
        BLOCK=int(triton.next_power_of_2(max(key_dim, value_dim))),
        num_warps=1,
    )
    of_keys = num_tokens * key_heads * key_dim
    query, key, value = torch.split(mixed, [of_keys, of_keys, num_tokens * heads * value_dim])
    of_heads = (num_tokens, key_heads, key_dim)
    return query.view(of_heads), key.view(of_heads), value.view(num_tokens, heads, value_dim), *gates


def gate_norm_fused(attended: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the normed heads times SiLU of their gates: [T, H * D], of the gates' type.

    attended: float32 [T, H, D]. gates: [T, H * D], rows of which may lie apart. weight: [D].
    """
    check_contiguous(attended, gates[0], weight)
    num_tokens, num_heads, dim = attended.shape
    out = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    _gate_norm_kernel[(num_tokens, ceil_div(num_heads, _HEADS))](
        attended,
        gates,
        weight,
        out,
        gates.stride(0),
        eps,
        NUM_HEADS=num_heads,
        DIM=dim,
        HEADS=_HEADS,
        BLOCK=int(triton.next_power_of_2(dim)),
        num_warps=2,
    )
    return out
