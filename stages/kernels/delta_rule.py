"""Computes the gated delta rule on a GPU: a matrix for each head of a sequence, read from its slot.

    short runs    steps    one token after another. A program has some value channels of a head, and keeps
                           their part of the matrix in registers: one read and one write, however many tokens
    others        solve    each chunk of a head alone: what its tokens add, without the matrix before them
                  walk     a program has some value channels of a head, and goes from chunk to chunk

    tokens of a run | chunk 0 | chunk 1 | chunk 2 ..        solve:  own = R b v, of_state = R b exp(g) k
                         |         |          |                     with R = (1 + A)^-1
    slots  source -------+---------+----------+---> target  walk:   added = own - of_state S

A is strictly lower, since a token depends on those before it in its chunk. Blocks of 16 on its diagonal are
inverted row by row, and joined by 1 + A = D^-1 (1 + N) with N = D (A off the blocks): N^4 is zero. Powers of
A itself grow where keys repeat themselves: of 32 alike and undecayed they reach 1e17.

Between chunks the matrix is in the target's slot and not in registers, where all forms that were tried
spilled. Programs share no channels, so a barrier of the program orders its reads and writes.

All is float32, and products are three of TF32. With operands rounded so in the interpreter, what 256 tokens
read is off by 3e-6 of the largest, as in float32. With TF32 alone it is off by 5e-4, whatever the decays.
Import this module only where Triton is. The twin in plain torch: `stages/decoder/delta_rule.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.encoders.kernels.dispatch import check_contiguous
from epd.types import ceil_div

_STEP_VALUES = 16  # channels of a program that computes steps
_WALK_VALUES = 16  # of one that goes from chunk to chunk
_LEAST = 16  # channels of a product


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _delta_steps_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    query,
    key,
    value,
    decay,
    strength,
    matrices,
    out,
    steps,
    value_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    item = steps + tl.program_id(0) * 5
    head = tl.program_id(1)
    start = tl.load(item).to(tl.int64)
    num_rows = tl.load(item + 1)
    num_known = tl.load(item + 2)
    source = tl.load(item + 3).to(tl.int64)
    target = tl.load(item + 4).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key = k < KEY_DIM
    is_value = v < VALUE_DIM
    is_read = (k < tl.where(source >= 0, KEY_DIM, 0))[:, None] & is_value[None, :]
    is_written = (k < tl.where(target >= 0, KEY_DIM, 0))[:, None] & is_value[None, :]
    place = matrices + head * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    state = tl.load(place + source * slot_stride, mask=is_read, other=0.0)
    for row in range(num_rows):
        token = start + row
        of_key = (token * (NUM_HEADS // GROUP) + head // GROUP) * KEY_DIM + k
        asked = tl.load(query + of_key, mask=is_key, other=0.0)
        held = tl.load(key + of_key, mask=is_key, other=0.0)[:, None]
        given = tl.load(value + token * value_stride + head * VALUE_DIM + v, mask=is_value, other=0.0)
        of_head = token * NUM_HEADS + head
        state *= tl.exp(tl.load(decay + of_head))
        added = (given - tl.sum(held * state, 0)) * tl.load(strength + of_head)
        state += held * added[None, :]
        tl.store(out + of_head * VALUE_DIM + v, tl.sum(asked[:, None] * state, 0), mask=is_value)
        if row + 1 == num_known:
            tl.store(place + target * slot_stride, state, mask=is_written)


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _decays(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    decay, num_rows, NUM_HEADS: tl.constexpr, CHUNK: tl.constexpr
):
    """Returns the sums of a chunk's decays up to each token, [CHUNK], and of all."""
    at = tl.arange(0, CHUNK)
    total = tl.cumsum(tl.load(decay + at * NUM_HEADS, mask=at < num_rows, other=0.0), 0)
    return total, tl.sum(tl.where(at == CHUNK - 1, total, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _load_rows(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows, num_rows, first, stride, DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns channels [first, first + BLOCK) of a chunk's rows, [CHUNK, BLOCK], or zeros."""
    at = tl.arange(0, CHUNK)[:, None]
    channel = first + tl.arange(0, BLOCK)[None, :]
    inside = at < num_rows
    if DIM % BLOCK != 0:
        inside = inside & (channel < DIM)
    return tl.load(rows + (at * stride + channel), mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _store_rows(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows, num_rows, first, values, stride, DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes what `_load_rows` would return."""
    at = tl.arange(0, CHUNK)[:, None]
    channel = first + tl.arange(0, BLOCK)[None, :]
    tl.store(rows + (at * stride + channel), values, mask=(at < num_rows) & (channel < DIM))


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _inverse(system, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def] # a tile of numbers
    """Returns (1 + system)^-1, [CHUNK, CHUNK], of a strictly lower one of up to four blocks of 16."""
    BLOCKS: tl.constexpr = CHUNK // 16
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    is_block = row // 16 == column // 16
    blocks = tl.sum(tl.reshape(tl.where(is_block, system, 0.0), (BLOCKS, 16, BLOCKS, 16)), 2)
    at = tl.arange(0, 16)
    solved = tl.where(at[None, :, None] == at[None, None, :], 1.0, tl.zeros_like(blocks))
    for done in range(15):
        factors = tl.sum(tl.where(at[None, None, :] == done, blocks, 0.0), 2)
        finished = tl.sum(tl.where(at[None, :, None] == done, solved, 0.0), 1)
        solved -= factors[:, :, None] * finished[:, None, :]
    spread = tl.broadcast_to(solved[:, :, None, :], (BLOCKS, 16, BLOCKS, 16))
    diagonal = tl.where(is_block, tl.reshape(spread, (CHUNK, CHUNK)), 0.0)
    one = tl.where(row == column, 1.0, 0.0)
    joined = tl.dot(diagonal, tl.where(is_block, 0.0, system), input_precision="tf32x3")
    squared = tl.dot(joined, joined, input_precision="tf32x3") + one
    product = tl.dot(one - joined, squared, input_precision="tf32x3")
    return tl.dot(product, diagonal, input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _delta_solve_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    query,
    key,
    value,
    decay,
    strength,
    own,
    of_state,
    scores,
    chunks,
    value_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = chunks + tl.program_id(0) * 2
    head = tl.program_id(1)
    at = tl.arange(0, CHUNK)
    token = tl.load(item).to(tl.int64)
    num_rows = tl.load(item + 1)
    if num_rows <= 0:  # of a captured pass with fewer chunks
        return
    KEY_ROW: tl.constexpr = (NUM_HEADS // GROUP) * KEY_DIM
    keys = key + token * KEY_ROW + head // GROUP * KEY_DIM
    queries = query + token * KEY_ROW + head // GROUP * KEY_DIM
    of_head = token * NUM_HEADS + head
    total, _ = _decays(decay + of_head, num_rows, NUM_HEADS, CHUNK)
    is_seen = at[:, None] >= at[None, :]
    between = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], float("-inf")))
    alike = tl.zeros((CHUNK, CHUNK), tl.float32)
    asked = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in range(0, KEY_DIM, BLOCK):
        k = _load_rows(keys, num_rows, first, KEY_ROW, KEY_DIM, CHUNK, BLOCK)
        q = _load_rows(queries, num_rows, first, KEY_ROW, KEY_DIM, CHUNK, BLOCK)
        alike = tl.dot(k, tl.trans(k), alike, input_precision="tf32x3")
        asked = tl.dot(q, tl.trans(k), asked, input_precision="tf32x3")
    asked *= between
    _store_rows(scores + of_head * CHUNK, num_rows, 0, asked, NUM_HEADS * CHUNK, CHUNK, CHUNK, CHUNK)
    b = tl.load(strength + of_head + at * NUM_HEADS, mask=at < num_rows, other=0.0)
    system = tl.where(at[:, None] > at[None, :], b[:, None] * alike * between, 0.0)
    solved = _inverse(system, CHUNK)
    values = value + token * value_stride + head * VALUE_DIM
    to_own = own + of_head * VALUE_DIM
    for first in range(0, VALUE_DIM, BLOCK):
        v = _load_rows(values, num_rows, first, value_stride, VALUE_DIM, CHUNK, BLOCK)
        mine = tl.dot(solved, b[:, None] * v, input_precision="tf32x3")
        _store_rows(to_own, num_rows, first, mine, NUM_HEADS * VALUE_DIM, VALUE_DIM, CHUNK, BLOCK)
    grown = b * tl.exp(total)
    to_state = of_state + of_head * KEY_DIM
    for first in range(0, KEY_DIM, BLOCK):
        k = _load_rows(keys, num_rows, first, KEY_ROW, KEY_DIM, CHUNK, BLOCK)
        taken = tl.dot(solved, grown[:, None] * k, input_precision="tf32x3")
        _store_rows(to_state, num_rows, first, taken, NUM_HEADS * KEY_DIM, KEY_DIM, CHUNK, BLOCK)


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _delta_walk_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    query,
    key,
    decay,
    own,
    of_state,
    scores,
    matrices,
    out,
    walks,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    item = walks + tl.program_id(0) * 4
    head = tl.program_id(1)
    start = tl.load(item).to(tl.int64)
    num_rows = tl.load(item + 1)
    source = tl.load(item + 2).to(tl.int64)
    target = tl.load(item + 3).to(tl.int64)
    channel = tl.program_id(2) * BLOCK_V
    v = channel + tl.arange(0, BLOCK_V)[None, :]
    k = tl.arange(0, BLOCK)[:, None]
    is_value = v < VALUE_DIM
    place = matrices + head * (KEY_DIM * VALUE_DIM) + (k * VALUE_DIM + v)
    after = place + target * slot_stride
    num_written = tl.where(target >= 0, KEY_DIM, 0)
    KEY_ROW: tl.constexpr = (NUM_HEADS // GROUP) * KEY_DIM
    STATE_ROW: tl.constexpr = NUM_HEADS * KEY_DIM
    VALUE_ROW: tl.constexpr = NUM_HEADS * VALUE_DIM
    SCORE_ROW: tl.constexpr = NUM_HEADS * CHUNK
    for first in range(0, num_rows, CHUNK):
        left = num_rows - first
        token = start + first
        of_head = token * NUM_HEADS + head
        keys = key + token * KEY_ROW + head // GROUP * KEY_DIM
        queries = query + token * KEY_ROW + head // GROUP * KEY_DIM
        total, last = _decays(decay + of_head, left, NUM_HEADS, CHUNK)
        slot = tl.where(first > 0, target, source)
        num_held = tl.where(slot >= 0, KEY_DIM, 0)
        before = place + slot * slot_stride
        taken = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        asked = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        for part in range(0, KEY_DIM, BLOCK):
            state = tl.load(before + part * VALUE_DIM, mask=is_value & (k + part < num_held), other=0.0)
            w = _load_rows(of_state + of_head * KEY_DIM, left, part, STATE_ROW, KEY_DIM, CHUNK, BLOCK)
            taken = tl.dot(w, state, taken, input_precision="tf32x3")
            q = _load_rows(queries, left, part, KEY_ROW, KEY_DIM, CHUNK, BLOCK)
            asked = tl.dot(q, state, asked, input_precision="tf32x3")
        mine = _load_rows(own + of_head * VALUE_DIM, left, channel, VALUE_ROW, VALUE_DIM, CHUNK, BLOCK_V)
        added = mine - taken
        s = _load_rows(scores + of_head * CHUNK, left, 0, SCORE_ROW, CHUNK, CHUNK, CHUNK)
        asked = tl.dot(s, added, asked * tl.exp(total)[:, None], input_precision="tf32x3")
        _store_rows(out + of_head * VALUE_DIM, left, channel, asked, VALUE_ROW, VALUE_DIM, CHUNK, BLOCK_V)
        kept = added * tl.exp(last - total)[:, None]
        tl.debug_barrier()  # all have read the matrix before any of it is written
        for part in range(0, KEY_DIM, BLOCK):
            state = tl.load(before + part * VALUE_DIM, mask=is_value & (k + part < num_held), other=0.0)
            of_keys = _load_rows(keys, left, part, KEY_ROW, KEY_DIM, CHUNK, BLOCK)
            state = tl.dot(tl.trans(of_keys), kept, state * tl.exp(last), input_precision="tf32x3")
            tl.store(after + part * VALUE_DIM, state, mask=is_value & (k + part < num_written))
        tl.debug_barrier()  # and all have written it before the next chunk reads it


def delta_steps_fused(inputs: Sequence[Tensor], matrices: Tensor, steps: Tensor, out: Tensor) -> None:
    """Computes short runs row by row: fills their rows of out, and writes the targets of matrices.

    inputs: float32, contiguous but for the rows of value: query and key [T, Hk, Dk], each head for as
        many of values; value [T, H, Dv]; decay, strength [T, H].
    matrices: float32 [slots, H, Dk, Dv]; slots may lie apart. out: float32 [T, H, Dv].
    steps: int32 [N, 5], of each run its first row, its rows, how many of them are known, the slot that it
        reads, -1 for none, and the one with the state after the known rows, -1 to write none.
    """
    if len(steps):
        block_v = min(_STEP_VALUES, _padded(matrices.shape[3]))
        _delta_steps_kernel[_grid(steps, matrices, block_v)](
            *_checked(inputs, matrices, out),
            matrices,
            out,
            steps,
            inputs[2].stride(0),
            matrices.stride(0),
            **_sizes(inputs, matrices),
            BLOCK_K=_padded(matrices.shape[2]),
            BLOCK_V=block_v,
            num_warps=1,
        )


def delta_chunks_fused(
    inputs: Sequence[Tensor], matrices: Tensor, chunks: Tensor, walks: Tensor, size: int, out: Tensor
) -> None:
    """Computes runs in chunks of `size` tokens, 16, 32 or 64. Otherwise as `delta_steps_fused`.

    chunks: int32 [M, 2], of all runs: the first row of each chunk, and how many the run has from there.
    walks: int32 [R, 4], of each run its first row, its rows, the slot that it reads, and the one it writes.
    """
    if not len(walks):
        return
    query, key, value, decay, strength = _checked(inputs, matrices, out)
    own, of_state = torch.empty_like(out), out.new_empty(*out.shape[:2], query.shape[2])
    scores = out.new_empty(*out.shape[:2], size)
    sizes = _sizes(inputs, matrices) | {"CHUNK": size}
    block = min(32, max(_LEAST, _padded(query.shape[2])))
    block_v = min(_WALK_VALUES, max(_LEAST, _padded(matrices.shape[3])))
    _delta_solve_kernel[(len(chunks), matrices.shape[1])](
        query,
        key,
        value,
        decay,
        strength,
        own,
        of_state,
        scores,
        chunks,
        value.stride(0),
        **sizes,
        BLOCK=_LEAST,
        num_warps=4,
        num_stages=1,
    )
    _delta_walk_kernel[_grid(walks, matrices, block_v)](
        query,
        key,
        decay,
        own,
        of_state,
        scores,
        matrices,
        out,
        walks,
        matrices.stride(0),
        **sizes,
        BLOCK=block,
        BLOCK_V=block_v,
        num_warps=4,
        num_stages=1,
    )


def _checked(inputs: Sequence[Tensor], matrices: Tensor, out: Tensor) -> Sequence[Tensor]:
    """Returns the inputs. Raises ValueError for a layout that the kernels do not read."""
    check_contiguous(*inputs[:2], inputs[2][0], *inputs[3:], matrices[0], out)
    return inputs


def _sizes(inputs: Sequence[Tensor], matrices: Tensor) -> dict[str, Any]:
    num_heads, key_dim, value_dim = matrices.shape[1:]
    group = num_heads // inputs[0].shape[1]
    return {"NUM_HEADS": num_heads, "GROUP": group, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}


def _grid(runs: Tensor, matrices: Tensor, block_v: int) -> tuple[int, int, int]:
    return len(runs), matrices.shape[1], ceil_div(matrices.shape[3], block_v)


def _padded(size: int) -> int:
    return int(triton.next_power_of_2(size))
