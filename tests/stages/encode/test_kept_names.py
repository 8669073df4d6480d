"""Names of what is kept: equal for equal inputs alone, over all pairs of some requests.

Modules: `epd/store/pieces.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from epd.encoders.groups import plan_groups, prompt_identity, salted
from epd.encoders.plans import Grid, MediaItem, MediaPlan, PromptPlan, PromptReduction
from epd.reduction import ReductionPolicy
from epd.stages.encode.embedding_store import group_name, unit_name
from epd.store.piece_files import namespace
from epd.store.pieces import pieces
from epd.types import PlaceholderRange

_NUM_UNITS = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides of a request about a video. model: digest of its weights."""

    content: int = 0
    start: int = 0
    rate: int = 1
    size: int = 28
    model: str = "m"
    dtype: str = "float32"
    reduction: str = ""
    salt: str = ""
    adapter: str = ""

    def times_s(self) -> tuple[float, ...]:
        return tuple(self.start + unit / self.rate for unit in range(_NUM_UNITS))


# Some are digits of others: names must not run together.
VALUES: dict[str, list[Any]] = {
    "content": [0, 1, 10],
    "start": [0, 1, 10],
    "rate": [1, 2],
    "size": [28, 56],
    "model": ["m", "mm"],
    "dtype": ["float32", "bfloat16"],
    "reduction": ["", "evs", "balanced"],
    "salt": ["", "a", "ab"],
    "adapter": ["", "a", "b"],
}


def plan_of(asked: Asked) -> MediaPlan:
    size = (asked.size, asked.size)
    grid = Grid(_NUM_UNITS, asked.size // 14, asked.size // 14)
    return MediaPlan("video", size, grid, 1, 1, asked.times_s(), (0, 1), 25.0, 1 / asked.rate)


def space(asked: Asked, kind: str) -> str:
    return namespace({"kind": kind, "dtype": asked.dtype, "weights": asked.model})


def group(asked: Asked) -> str:
    hashes = [salted(str(asked.content), asked.salt)]
    groups = plan_groups([plan_of(asked)], hashes, model="", group_tokens=2, cache_salt=asked.salt)
    return space(asked, "embeddings") + "".join(group_name(each.spec.key, each.plan) for each in groups)


def first_unit(asked: Asked) -> str:
    """What is shown at the start of a content is drawn from these alone."""
    hashes = [salted(str(asked.content), asked.salt)]
    first, *_ = plan_groups([plan_of(asked)], hashes, model="", group_tokens=1, cache_salt=asked.salt)
    pixels = torch.full((1, 2, 2, 3), 16 * asked.content + asked.start, dtype=torch.uint8)
    return space(asked, "embeddings") + unit_name(first.spec.key, first.plan.part(0, 1), pixels)


def keys_and_values(asked: Asked) -> str:
    units = tuple(PlaceholderRange(1 + unit, 1) for unit in range(_NUM_UNITS))
    policy = ReductionPolicy(asked.reduction, 0.5) if asked.reduction else None
    reduction = None if policy is None else PromptReduction(policy, ())
    item = MediaItem(plan_of(asked), units)
    prompt = PromptPlan(np.arange(4), np.zeros((1, 4), np.int64), 4, (item,), reduction)
    hashes = [salted(str(asked.content), asked.salt)]
    *_, last = pieces(prompt_identity(prompt, hashes, asked.salt, asked.adapter), prompt.prefix_length)
    return space(asked, "keys and values") + last.key


_SPACE = {"model", "dtype", "salt"}
# What a name must differ by, and all that it may differ by.
NAMES: dict[Callable[[Asked], str], set[str]] = {
    group: {*_SPACE, "content", "start", "rate", "size"},
    first_unit: {*_SPACE, "content", "start", "size"},
    keys_and_values: {each.name for each in fields(Asked)},
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.__name__)
def test_requests_share_a_name_where_they_share_what_decides(name: Callable[[Asked], str]) -> None:
    """All 7,556,328 pairs of 3,888 requests: names and what decides of them stand for each other."""
    every = [Asked(*values) for values in product(*VALUES.values())]
    pairs = {(name(each), tuple(getattr(each, fact) for fact in sorted(NAMES[name]))) for each in every}
    assert len(every) * (len(every) - 1) // 2 == 7_556_328
    assert len({facts for _, facts in pairs}) == len(pairs), "two names for equal requests"
    assert len({text for text, _ in pairs}) == len(pairs), "a false hit"


@pytest.mark.parametrize(
    ("bug", "other"),
    [
        ("llama.cpp #28580: two videos, one prompt", Asked(content=1)),
        ("vLLM #57810: other weights", Asked(model="mm")),
    ],
)
def test_published_bugs_are_no_hits(bug: str, other: Asked) -> None:
    for name in NAMES:
        assert name(Asked()) != name(other), bug
