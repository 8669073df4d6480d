"""The pipeline over sound: tokens equal those of transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from epd.chat import ChatMessage, ContentPart
from epd.encoders import load_adapter
from epd.encoders.adapter import PatchRun
from epd.errors import MediaLimitError, RequestError, UnsupportedMediaError
from epd.serve_app.cli.program import app
from tests.colocated import ColocatedPipeline
from tests.encoders.tolerances import BATCHING, assert_close_to
from tests.reference import MAX_TOKENS
from tests.tiny_audio import WINDOW_S, Reference, heard, tones, with_sound, write_audio

QUESTION = "What is heard? Ä, 漢"


@pytest.fixture(scope="module")
def pipeline(audio_checkpoint: Path) -> ColocatedPipeline:
    return ColocatedPipeline.load(audio_checkpoint)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("clips")
    return {
        "short": write_audio(folder / "short.wav", tones(0.7, 16_000), 16_000),
        "stereo": write_audio(folder / "stereo.flac", tones(1.37, 44_100, 2, seed=1), 44_100, "flac"),
        "whole": write_audio(folder / "whole.wav", tones(WINDOW_S, 16_000, seed=2), 16_000),
        "long": write_audio(folder / "long.wav", tones(2.5 * WINDOW_S, 22_050, seed=3), 22_050),
    }


def test_tokens_equal_generate(
    audio_reference: Reference, pipeline: ColocatedPipeline, clips: dict[str, Path]
) -> None:
    answers = set()
    for names in [(), ("short",), ("whole",), ("stereo", "short", "stereo")]:
        paths = [clips[name] for name in names]
        expected = audio_reference.tokens([heard(path) for path in paths], [*[None] * len(paths), QUESTION])

        answer = pipeline.ask(paths, QUESTION, max_tokens=MAX_TOKENS)

        assert answer.token_ids == expected, names
        answers.add(answer.token_ids)
    assert len(answers) == 4, "what is heard makes no difference"


def test_a_part_of_a_long_clip_is_heard(
    audio_reference: Reference, pipeline: ColocatedPipeline, clips: dict[str, Path]
) -> None:
    """More than a window is refused, not cut off without a word: transformers hears its beginning."""
    long = clips["long"]
    with pytest.raises(MediaLimitError, match=f"more than {WINDOW_S} s of sound; allowed up to that"):
        pipeline.ask([long], QUESTION)
    with pytest.raises(RequestError, match="which has 5 s of sound"):
        pipeline.ask([long], QUESTION, start_s=60.0)

    beginning = pipeline.ask([long], QUESTION, end_s=float(WINDOW_S), max_tokens=MAX_TOKENS)
    part = pipeline.ask([long], QUESTION, start_s=2.25, end_s=3.5, max_tokens=MAX_TOKENS)

    assert beginning.token_ids == audio_reference.tokens([heard(long)], [None, QUESTION])
    assert part.token_ids == audio_reference.tokens([heard(long, 2.25, 3.5)], [None, QUESTION])
    assert beginning.token_ids != part.token_ids


def test_the_sound_of_a_video_is_heard_where_it_is_asked_for(
    audio_reference: Reference,
    audio_checkpoint: Path,
    clips: dict[str, Path],
    media: dict[str, Path],
    tmp_path: Path,
) -> None:
    film = with_sound(media["video"], clips["stereo"], tmp_path / "film.mkv")
    expected = audio_reference.tokens([heard(clips["stereo"])], [None, QUESTION])
    arguments = [
        "ask",
        film,
        QUESTION,
        "--model",
        audio_checkpoint,
        "--max-tokens",
        MAX_TOKENS,
        "--json",
        "--audio",
    ]

    answer = CliRunner().invoke(app, list(map(str, arguments)))
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["answer"] == audio_reference.processor.tokenizer.decode(
        expected, skip_special_tokens=True
    )

    silent = CliRunner().invoke(
        app, [*map(str, arguments[:1]), str(media["video"]), *map(str, arguments[2:])]
    )
    assert silent.exit_code == 2
    assert "has no sound, only streams of kind ['video']" in silent.stderr


def test_questions_share_what_was_heard(
    audio_reference: Reference, pipeline: ColocatedPipeline, clips: dict[str, Path]
) -> None:
    context = pipeline.prefill_media([clips["short"], clips["whole"]])
    sounds = [heard(clips["short"]), heard(clips["whole"])]

    for question in ("What?", "Who speaks, and when?"):
        answer = pipeline.answer(context, question, max_tokens=MAX_TOKENS)
        assert answer.token_ids == audio_reference.tokens(sounds, [None, None, question])
        assert answer.timings.encode_s == 0


def test_prompt_and_features_equal_the_processors(
    audio_reference: Reference, audio_checkpoint: Path, clips: dict[str, Path]
) -> None:
    """Clips of several lengths in one call of the tower, with text before, between and behind them."""
    adapter = load_adapter(audio_checkpoint)
    sounds = [heard(clips[name]) for name in ("short", "stereo", "whole")]
    sounds += [np.zeros(321, np.float32), np.ones(480, np.float32)]  # the shortest, and a token's border
    content = ["First: ", None, None, " then ", None, None, None, " which?"]
    theirs = audio_reference.inputs(sounds, content)
    plans = [adapter.plan_audio(len(each)) for each in sounds]
    parts = tuple(ContentPart("audio") if each is None else ContentPart("text", each) for each in content)
    prompt = adapter.plan_chat(plans, [ChatMessage("user", parts)])

    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    assert prompt.positions.tolist() == [list(range(len(prompt)))]
    bytes_of = [torch.from_numpy(each.view(np.uint8))[None] for each in sounds]
    runs = [
        PatchRun("audio", adapter.preprocess(each, plan), plan.grid)
        for each, plan in zip(bytes_of, plans, strict=True)
    ]
    values = torch.cat([run.values for run in runs])
    assert_close_to(values[:, :-1], theirs["input_features"], BATCHING)
    assert torch.equal(values[:, -1], theirs["feature_attention_mask"].float())

    with torch.inference_mode():
        encoded = adapter.encode_batch(adapter.vision_tower(audio_reference.model), runs)
        alone = [adapter.encode_batch(audio_reference.model.model, [run])[0] for run in runs]
    assert [len(each) for each in encoded] == [item.num_tokens for item in prompt.media]
    for together, by_itself in zip(encoded, alone, strict=True):
        torch.testing.assert_close(together.rows, by_itself.rows)


def test_models_refuse_what_they_cannot_take(
    pipeline: ColocatedPipeline, checkpoints: dict[str, Path], clips: dict[str, Path], media: dict[str, Path]
) -> None:
    with pytest.raises(UnsupportedMediaError, match="received an image for a model that hears"):
        pipeline.ask([media["image"]], QUESTION)
    with pytest.raises(UnsupportedMediaError, match="received a video for a model that hears"):
        pipeline.ask([media["video"]], QUESTION)
    sees = load_adapter(checkpoints["shapes-vl"])
    with pytest.raises(UnsupportedMediaError, match="hears nothing"):
        _ = sees.audio
    with pytest.raises(MediaLimitError, match=r"320 samples at 16000 a second is too short"):
        pipeline.adapter.plan_audio(320)
