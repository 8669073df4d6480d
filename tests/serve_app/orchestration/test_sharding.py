"""Which encoders get the groups of one request, by the kind of sharding."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from epd.encode.sharding import Sharding
from tests.serve_app.deployments import Question, deployed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [("groups", ["e0", "e1"]), ("request", ["e0", "e0"]), ("local", ["epd0", "epd0"])],
)
def test_groups_go_where_the_kind_of_sharding_says(
    checkpoints: dict[str, Path], media: dict[str, Path], sharding: Sharding, expected: list[str]
) -> None:
    """Two groups of a video; three workers encode, one of them prefills and decodes too."""
    assert asyncio.run(encode_workers(checkpoints["qwen2_5_vl"], media["video"], sharding)) == expected


async def encode_workers(model: Path, video: Path, sharding: Sharding) -> list[str]:
    """Of each group, in order. Whoever gets one stays busier than the others, however soon it is done."""
    async with deployed(model, "2e1epd", sharding=sharding) as deployment:
        dispatcher = deployment.service._shared.dispatcher
        record = dispatcher.record

        def record_more(worker: str, *others: Any) -> None:
            record(worker, *others)
            deployment.service.router.add(worker, encode_patches=1000)

        dispatcher.record = record_more  # type: ignore[method-assign]
        answered = await deployment.ask(Question((video,)), wants_spans=True)
    spans = [span for span in answered.spans if span.stage == "encode"]
    return [span.worker for span in sorted(spans, key=lambda span: span.group or 0)]
