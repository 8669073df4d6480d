"""Which tokens of a video are kept is told by unit, row and column, and reaches whom asks for spans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from epd.encoders.reduction import reduce_prompt
from epd.models import embedded_model_path
from epd.reduction import KeptCells, ReductionPolicy
from epd.stages.encode.encoder_pool import EmbeddingSplicer
from tests.colocated import ColocatedPipeline, EncodedMedia
from tests.serve_app.deployments import Answered, Question, deployed

Cell = tuple[int, int, int]  # unit, row, column


def cells(windows: Sequence[KeptCells]) -> Iterator[Cell]:
    for each in windows:
        (start, stop), (rows, columns) = each.units, each.grid
        num_tokens = (stop - start) * rows * columns
        is_kept = np.unpackbits(np.frombuffer(each.bits, np.uint8))[:num_tokens].reshape(-1, rows, columns)
        yield from ((start + int(unit), int(row), int(column)) for unit, row, column in np.argwhere(is_kept))


@pytest.mark.parametrize("method", ["balanced", "random", "mustdrop"])
def test_cells_lie_where_the_positions_of_the_kept_tokens_say(
    method: str, pipeline: ColocatedPipeline, encoded: EncodedMedia
) -> None:
    """M-RoPE gives each token its time, row and column: those of the prompt are the truth."""
    plan = encoded.plans[0]
    prompt = reduce_prompt(pipeline.adapter.plan_prompt(encoded.plans, "What?"), ReductionPolicy(method, 0.2))
    splicer = EmbeddingSplicer(pipeline.adapter, prompt)
    pushed = (splicer.push(group, embeddings) for group, embeddings in encoded.groups)
    placed = [each.positions for each in pushed if each is not None]
    positions = np.concatenate([each for each in placed if each is not None], axis=1)
    assert prompt.reduction is not None
    time, row, column = positions - prompt.reduction.positions[0].min(axis=1, keepdims=True)
    step = (prompt.reduction.positions[0][0].max() - prompt.reduction.positions[0][0].min()) / (
        plan.num_units - 1
    )
    expected = zip((time / step).round().astype(int).tolist(), row.tolist(), column.tolist(), strict=True)
    taken = splicer.take_cells()
    assert {item for item, _ in taken} == {0}
    assert list(cells([windows for _, windows in taken])) == sorted(expected)
    assert [windows.units for _, windows in taken] == [(w.start, w.stop) for w in prompt.media[0].windows]
    assert not splicer.take_cells()


@pytest.mark.parametrize("topology", ["1epd", "2e1p1d"])
def test_they_come_with_the_spans(
    topology: str, pipeline: ColocatedPipeline, clip: Path, media: dict[str, Path]
) -> None:
    def kept(answer: Answered, item: int) -> list[KeptCells]:
        return [each for span in answer.spans if span.item == item for each in span.kept]

    async def run() -> None:
        async with deployed(embedded_model_path(), topology) as deployment:
            options = {"reduction": ReductionPolicy("balanced", 0.25), "wants_spans": True}
            both = (clip, media["image"], media["video"])
            answer = await deployment.ask(Question(both, "What?"), **options)
            assert answer.end is not None
            found = {item: list(cells(kept(answer, item))) for item in range(3)}
            assert found[1] == []
            plans = [pipeline.encode_media([path], num_frames=6).plans[0] for path in both]
            assert len(found[0]) == round(plans[0].num_tokens / 4)
            assert len(found[2]) == round(plans[2].num_tokens / 4)
            assert {windows.frames_per_unit for windows in kept(answer, 0)} == {plans[0].frames_per_unit}
            again = await deployment.ask(Question(both, "And now?"), **options)
            assert kept(again, 0) == kept(again, 2) == [], "it is cached, and nothing is chosen"
            whole = await deployment.ask(Question(both, "What?"), wants_spans=True)
            assert kept(whole, 0) == []
            await deployment.settle()

    asyncio.run(run())
