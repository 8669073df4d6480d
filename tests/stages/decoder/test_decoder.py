"""Our decoder against its twin, the modules of transformers: logits, keys and values of every text stack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epd.errors import UnsupportedModelError
from epd.stages.decoder.decoder import FusedDecoder, ModulesDecoder, decoder_of
from epd.stages.decoder.text_model import rows_of_frequencies, text_model
from tests.stages.decoder.text_models import CONFIGS, NoAdapter, Runner, model_of

# Of the largest logit; sums are taken in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2}


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    if len(theirs):
        difference = (ours - theirs).abs().max() / theirs.abs().max()
        assert difference <= TOLERANCE[theirs.dtype], f"{difference:.2e}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_passes_equal_those_of_transformers_modules(name: str, dtype: torch.dtype) -> None:
    ours, theirs = Runner.of(name, dtype), Runner.of(name, dtype, by_modules=True)
    assert isinstance(ours.runner._decoder, FusedDecoder)
    assert isinstance(theirs.runner._decoder, ModulesDecoder)
    for one, other in zip(ours.passes(), theirs.passes(), strict=True):
        assert_close(one, other)
    assert_close(ours.pools.groups[0].storage, theirs.pools.groups[0].storage)


@pytest.mark.parametrize("name", ["qwen2", "qwen3-vl"])
def test_only_rows_with_logits_go_through_the_end_of_the_last_layer(name: str) -> None:
    runner = Runner.of(name)
    decoder: Any = runner.runner._decoder
    counts = []
    mix = decoder._mix

    def counted(index: int, residual: Tensor, attended: Tensor) -> Tensor:
        counts.append(len(residual))
        mixed: Tensor = mix(index, residual, attended)
        return mixed

    decoder._mix = counted
    logits = runner.runner.run(
        [runner.segment(12, 0, 0, num_logits=0), runner.segment(7, 0, 9, num_logits=2)]
    )
    assert counts == [19, 19, 2]
    assert len(logits) == 2


CHANGES = {
    "another model type": {"model_type": "gemma"},
    "another activation": {"hidden_act": "gelu"},
    "frequencies that depend on the length": {"rope_parameters": {"rope_type": "longrope"}},
    "frequencies that depend on it within the context": {
        "rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 1024}
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_another_text_model_is_left_to_its_modules(change: dict[str, Any]) -> None:
    decoder = model_of("qwen2").get_decoder()
    config = decoder.config
    same = {name: getattr(config, name) for name in (*config.to_dict(), "model_type")}
    decoder.config = SimpleNamespace(**same)
    assert text_model(decoder) is not None
    decoder.config = SimpleNamespace(**{**same, **change})
    assert text_model(decoder) is None


@pytest.mark.parametrize("at", ["", "layers.1", "layers.2.self_attn", "layers.0.mlp"])
def test_a_module_that_is_not_known_is_not_left_out(at: str) -> None:
    decoder = model_of("qwen3").get_decoder()
    assert text_model(decoder) is not None
    decoder.get_submodule(at).add_module("more", nn.Identity())
    assert text_model(decoder) is None


def test_attention_that_we_do_not_compute_is_refused_for_a_model_that_was_not_loaded_by_us() -> None:
    """Our decoder hands no argument to an attention function that could refuse it."""
    model = model_of("qwen2")
    model.config.text_config.layer_types = ["sliding_attention"] * 3
    model.config.text_config.sliding_window = 16
    with pytest.raises(UnsupportedModelError, match="sliding_window=16"):
        decoder_of(model, NoAdapter())  # type: ignore[arg-type]


def test_frequencies_are_dealt_as_mrope_does() -> None:
    """By hand: 3 for time, 2 for height, 1 for width; by turns each row begins at its own place."""
    sections = rows_of_frequencies("in_sections", [3, 2, 1], 6)
    turns = rows_of_frequencies("by_turns", [4, 2, 2], 8)
    assert sections is not None
    assert turns is not None
    assert sections.tolist() == [0, 0, 0, 1, 1, 2]
    assert turns.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert rows_of_frequencies("plain", [], 8) is None
