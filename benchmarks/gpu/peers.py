"""Times transformers' own modules with the same weights: its tower, and its decodes, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, StaticCache

from benchmarks.gpu.measures import video_plan
from benchmarks.gpu.setup import Setup
from benchmarks.reporting import Row
from epd.encoders.groups import FrameEncoder

_ROOM = 64  # tokens behind the prompt
_NUM_PREFILLED = 2048  # tokens of a pass that fills the cache


def peers(setup: Setup) -> Iterator[Row]:
    """The tower, then decodes from a static cache; compiled, with CUDA graphs, on a GPU alone."""
    model = AutoModelForImageTextToText.from_pretrained(
        setup.path, dtype=setup.placement.dtype, attn_implementation="sdpa", local_files_only=True
    )
    model = model.to(setup.placement.device).eval()
    for units in setup.sizes.encode_units:
        yield _tower(setup, model, units)
    for batch in (setup.sizes.decode_batches[0], setup.sizes.decode_batches[-1]):
        for is_compiled in (False, True) if setup.placement.is_cuda else (False,):
            yield _decodes(setup, model, batch, is_compiled=is_compiled)


def _tower(setup: Setup, model: Any, units: int) -> Row:
    plan = video_plan(setup, 2 * units)
    frames = torch.randint(0, 256, (plan.num_frames, *plan.size, 3), dtype=torch.uint8)
    tower = model.model.visual
    with torch.inference_mode():
        patches = FrameEncoder(setup.adapter, tower).patches(frames, plan).values.to(tower.dtype)
        grid = torch.tensor([[plan.grid.t, plan.grid.h, plan.grid.w]], device=setup.placement.device)
        seconds = setup.seconds(partial(tower, patches, grid))
    return {"what": "transformers' tower", "units": units, "ms": round(seconds * 1e3, 2)}


def _decodes(setup: Setup, model: Any, batch: int, *, is_compiled: bool) -> Row:
    context, decoder, device = setup.sizes.step_context, model.get_decoder(), setup.placement.device
    cache = StaticCache(config=decoder.config, max_cache_len=context + _ROOM)

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        found = decoder(input_ids=token_ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return model.lm_head(found.last_hidden_state[:, -1]).argmax(-1)  # type: ignore[no-any-return]

    def places(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=device).expand(3, batch, stop - start)

    with torch.no_grad():
        for start in range(0, context, _NUM_PREFILLED // batch):
            stop = min(start + _NUM_PREFILLED // batch, context)
            forward(torch.ones(batch, stop - start, dtype=torch.int64, device=device), places(start, stop))
        step: Callable[..., Tensor] = forward
        if is_compiled:
            step = torch.compile(forward, mode="reduce-overhead", dynamic=False)
        one, place = (
            torch.ones(batch, 1, dtype=torch.int64, device=device),
            places(context, context + 1).clone(),
        )
        seconds = setup.seconds(lambda: step(one, place).tolist(), warm_up=4)
    what = "transformers' decode, compiled" if is_compiled else "transformers' decode"
    return {"what": what, "requests": batch, "context": context, "ms": round(seconds * 1e3, 2)}
