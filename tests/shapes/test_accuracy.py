"""The committed weights answer held-out questions, through the whole path from H.264 to words."""

from __future__ import annotations

from epd.models import embedded_model_path
from tests.colocated import ColocatedPipeline
from training.clips import HELD_OUT_SEED
from training.evaluate import accuracy, evaluate


def test_the_embedded_model_is_as_good_as_its_card_says_at_32_frames() -> None:
    pipeline = ColocatedPipeline.load(embedded_model_path())
    verdicts = list(evaluate(pipeline, num_frames=32, num_videos=10))
    assert len(verdicts) >= 50
    assert all(verdict.seed >= HELD_OUT_SEED for verdict in verdicts)
    assert accuracy(verdicts) >= 0.97, [verdict for verdict in verdicts if not verdict.is_right]
