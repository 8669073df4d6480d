"""Operations of a prefill against figures computed by hand, and of prompts as each method lays them out.

The decoder by hand: 3 layers of 144 weights, 4 x 2 x (2 x 2 + 2 x 1) for attention and 3 x 4 x 8 for the MLP;
a pair of tokens takes 4 x 2 heads x 2 = 16. The prompt: 2 tokens of text, a window of 4 of which 1 is kept,
and 1 of text.
"""

from __future__ import annotations

import pytest

from benchmarks.prefill_flops import Piece, Propagation, pieces_of, prefill_flops, prompt_flops
from encoders import FrameSampling, VideoFacts, load_adapter
from encoders.adapter import PromptPlan
from encoders.reduction import reduce_prompt
from epd.models import embedded_model_path
from epd.profiles.catalog import Transformer
from epd.reduction import ReductionPolicy

DECODER = Transformer(num_layers=3, hidden=4, num_heads=2, num_kv_heads=1, head_dim=2, mlp_hidden=8)
PRUNED = (Piece(2, 2), Piece(4, 1), Piece(1, 1))


def test_all_tokens() -> None:
    # 7 rows and 7 x 8 / 2 = 28 pairs in each layer
    assert prefill_flops(DECODER, [Piece(7, 7)]) == 3 * (2 * 144 * 7 + 16 * 28) == 7392


def test_text_and_a_window_that_is_kept_are_one_prompt() -> None:
    assert prefill_flops(DECODER, [Piece(2, 2), Piece(4, 4), Piece(1, 1)]) == 7392


def test_pruned_keys_save_attention_alone() -> None:
    # text 1 + 2; the window 4 x 2 before it and 1 + 2 + 3 + 4; the last token 3 and itself: 25 pairs
    assert prefill_flops(DECODER, PRUNED) == 3 * (2 * 144 * 7 + 16 * 25) == 7248


def test_propagation_saves_rows_in_the_later_layers() -> None:
    # the first layer as above, and 2 observing rows x 6 keys at half a pair's price; then 4 rows, 10 pairs
    first = 2 * 144 * 7 + 16 * 25 + 8 * 2 * 6
    assert prefill_flops(DECODER, PRUNED, Propagation(1, 2)) == first + 2 * (2 * 144 * 4 + 16 * 10) == 5136


@pytest.fixture(scope="module")
def prompt() -> PromptPlan:
    adapter = load_adapter(embedded_model_path())
    plan = adapter.plan_video(VideoFacts(64, 1.0, 360, 640), FrameSampling(num_frames=64))
    return adapter.plan_prompt([plan], "Which shape appears first?")


def test_methods_in_order_of_what_they_compute(prompt: PromptPlan) -> None:
    whole = prompt_flops(DECODER, prompt)
    gains = {
        method: whole / prompt_flops(DECODER, reduce_prompt(prompt, ReductionPolicy(method, 0.25)))
        for method in ("quickprefill", "fastkv", "balanced")
    }
    assert 1 < gains["quickprefill"] < gains["fastkv"] < gains["balanced"]


def test_pieces_add_up_to_the_prompt(prompt: PromptPlan) -> None:
    reduced = reduce_prompt(prompt, ReductionPolicy("fastkv", 0.25))
    pieces = list(pieces_of(reduced))
    assert sum(piece.num_computed for piece in pieces) == len(prompt)
    assert sum(piece.num_kept for piece in pieces) == len(reduced)


def test_a_method_that_reads_by_question_is_refused(prompt: PromptPlan) -> None:
    with pytest.raises(ValueError, match="mustdrop"):
        prompt_flops(DECODER, reduce_prompt(prompt, ReductionPolicy("mustdrop", 0.25)))
