"""The server of `tests/serve_app`, for the commands that ask one, and what a command drops at each stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from epd.encoders.reduction import tower_merging
from epd.stages.engine.engine import LanguageEngine
from epd.stages.reduction.question_views import QuestionView
from tests.bench.conftest import server
from tests.serve_app.conftest import front, run_front, shared_front

__all__ = ["front", "run_front", "server", "shared_front"]


@dataclass
class Dropped:
    """Records what commands drop at each stage.

    tower: of each call, the cells of a unit, and those that later layers compute.
    read: of each question, the visual tokens that each layer reads.
    held: of each step that decodes, the tokens of the prompt, and those that the cache holds.
    """

    tower: set[tuple[int, int]] = field(default_factory=set)
    read: list[tuple[int, ...]] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Dropped:
    seen = Dropped()
    merge, survivors, step = tower_merging.merge_cells, QuestionView.survivors, LanguageEngine.step

    def merge_seen(cells: Any, blocks: Any, num_kept: int) -> Any:
        seen.tower.add((cells.shape[1], num_kept))
        return merge(cells, blocks, num_kept)

    def survivors_seen(view: QuestionView, num_tokens: int) -> Any:
        seen.read.append(view.num_read())
        return survivors(view, num_tokens)

    def step_seen(engine: LanguageEngine) -> Any:
        result = step(engine)
        for each in engine.scheduler.running:
            if each.is_decoding:
                seen.held.append((each.num_prompt_tokens, engine.kv.num_tokens(each.request_id)))
        return result

    monkeypatch.setattr(tower_merging, "merge_cells", merge_seen)
    monkeypatch.setattr(QuestionView, "survivors", survivors_seen)
    monkeypatch.setattr(LanguageEngine, "step", step_seen)
    return seen
