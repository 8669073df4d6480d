"""Two ranks of models with layers of other kinds: tokens of `generate`, and half of all.

Modules: epd.stages.decoder.rank_cut, epd.stages.engine.state_pool
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.kv.drafting import DraftConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.stages.engine.model_runner import kv_layouts
from epd.stages.engine.state_pool import state_layout
from tests.stages.conftest import BUILDERS_HERE, GLM, RECURRENT, WINDOWED, Subject, make
from tests.stages.prompts import Drive, draft_in_part, expected_texts
from tests.stages.ranks.test_split_ranks import Ranked, group_of
from tests.stages.split_deployment import GREEDY

# Of Gemma 4, layers without a window have heads of their own, of which each rank needs one.
_TWO_HEADS = {"num_global_key_value_heads": 2}
_OPTIONS: dict[str, dict[str, Any]] = {"gemma4": _TWO_HEADS, "gemma4_experts": _TWO_HEADS}


@pytest.fixture(scope="module", params=[*WINDOWED, *RECURRENT, *GLM, "video_llama_3", "minicpmv4_7"])
def ranked(
    request: pytest.FixtureRequest, media: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranked]:
    name, folder = request.param, tmp_path_factory.mktemp("ranks")
    path = BUILDERS_HERE[name](folder / name, **_OPTIONS.get(name, {}))
    groups = [group_of(path) for _ in range(2)]
    yield Ranked(make(name, path, media), (groups[0], groups[1]))
    for group in groups:
        group.ranks.close()


def expected(subject: Subject, count: int) -> dict[str, tuple[int, ...]]:
    return {name: prompt.expected for name, prompt in subject.mix(count).items()}


def test_prefix_hits_and_preempted_answers_keep_their_tokens(ranked: Ranked) -> None:
    longest = max(len(prompt.plan) for prompt in ranked.subject.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, preemption="offload")
    ranked.workers, steps = [ranked.groups[1]], ranked.groups[1].ranks.steps
    steps.clear()
    engine = ranked.engine(
        config=config, num_kv_tokens=2 * longest + 24, block_size=4, enable_prefix_caching=True
    )
    for seed in range(2):
        assert Drive(engine, seed).run(ranked.subject.mix(12)) == expected(ranked.subject, 12)
    assert engine.counts.num_cached_tokens > 0
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"
    assert {"OffloadTokens", "RestoreTokens"} <= set(steps)


def test_ranks_check_drafts_together(ranked: Ranked) -> None:
    ranked.workers, prompts = [ranked.groups[1]], ranked.subject.mix(5)
    engine = ranked.engine(drafting=DraftConfig("recycling"))
    draft_in_part(engine, expected_texts(prompts))
    assert Drive(engine, seed=1).run(prompts) == expected(ranked.subject, 5)
    assert engine.counts.num_drafted_tokens > engine.counts.num_accepted_tokens > 0


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
def test_tokens_equal_generate_after_a_hand_over(ranked: Ranked, sizes: tuple[int, int]) -> None:
    deployment = ranked.deployment(*sizes)
    assert deployment.run(ranked.subject.mix(5), GREEDY) == expected(ranked.subject, 5)
    deployment.settle()


def test_each_rank_holds_half(ranked: Ranked) -> None:
    whole, part = ranked.subject.model, ranked.groups[0].part
    halves = [2 * layout.bytes_per_token for layout, _ in kv_layouts(part)]
    assert halves == [layout.bytes_per_token for layout, _ in kv_layouts(whole)]
    state, half = state_layout(whole), state_layout(part)
    assert (state is None) == (half is None)
    if state is not None and half is not None:
        assert half.bytes_per_sequence * 2 == state.bytes_per_sequence
    held, all_of_it = (sum(each.nbytes for each in _matrices(model)) for model in (part, whole))
    assert 0.49 < held / all_of_it < 0.53


def _matrices(model: Any) -> list[torch.Tensor]:
    """What is cut: all but norms, routers and what makes embeddings of layers from rows."""
    return [
        each
        for name, each in model.get_decoder().named_parameters()
        if each.ndim > 1 and not any(part in name for part in ("router", "mlp.gate.", "per_layer_"))
    ]
