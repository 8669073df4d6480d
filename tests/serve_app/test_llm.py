"""The Python API: `from epd import LLM`. Its answers are those of `epd ask`; the example of the docs runs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

import epd
from epd import LLM
from epd.errors import MediaError, RequestError
from epd.models import model_folder
from tests.colocated import ColocatedPipeline
from tests.media import write_image, write_video
from tests.serve_app.server import START_S, wait_until

QUESTION = "What is shown?"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as opened:
        yield opened


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4")


def encoded_groups(llm: LLM) -> float:
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    url = f"{llm.url.removesuffix('/v1')}/metrics"
    text = httpx.get(url, headers=headers, trust_env=False, timeout=START_S).text
    (value,) = re.findall(r"^epd_encoded_groups_total (\S+)$", text, flags=re.MULTILINE)
    return float(value)


def test_it_answers_as_the_pipeline_does(llm: LLM, clip: Path, tmp_path: Path) -> None:
    image = write_image(tmp_path / "image.png")
    pipeline = ColocatedPipeline.load(model_folder(None))
    for media, frames in (([clip], 4), ([image, clip], None), ([], None)):
        expected = pipeline.ask([str(each) for each in media], QUESTION, num_frames=frames)
        found = llm.ask(media, QUESTION, frames=frames)
        assert (found.text, found.usage) == (expected.text, expected.usage)


def test_one_medium_needs_no_list_and_text_comes_in_pieces(llm: LLM, clip: Path) -> None:
    pieces: list[str] = []
    answer = llm.ask(clip, QUESTION, on_text=pieces.append)
    assert "".join(pieces) == answer.text == llm.ask([str(clip)], QUESTION).text != ""


def test_a_dialogue_remembers_its_turns(llm: LLM, clip: Path) -> None:
    dialogue = llm.conversation(clip, frames=4)
    first, second = dialogue.ask(QUESTION), dialogue.ask("And after it?")
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_chat_is_the_api_of_openai(llm: LLM, clip: Path) -> None:
    parts = [
        {"type": "video_url", "video_url": {"url": clip.as_uri()}},
        {"type": "text", "text": QUESTION},
    ]
    messages = [{"role": "user", "content": parts}]
    whole = llm.chat(messages, max_tokens=4)
    assert whole["object"] == "chat.completion"
    with (
        httpx.Client(trust_env=False, timeout=START_S) as http,
        openai.OpenAI(base_url=llm.url, api_key=llm.api_key, http_client=http) as client,
    ):
        model = client.models.list().data[0].id
        theirs = client.chat.completions.create(model=model, messages=messages, max_tokens=4)  # type: ignore[arg-type]
    assert theirs.choices[0].message.content == whole["choices"][0]["message"]["content"]
    with pytest.raises(RequestError, match="temperature"):
        llm.chat(messages, temperature=-1)


def test_questions_about_one_medium_encode_it_once(llm: LLM, tmp_path: Path) -> None:
    clip = write_video(tmp_path / "new.mp4", seed=7)
    encoded = encoded_groups(llm)
    llm.ask(write_video(tmp_path / "other.mp4", seed=8), QUESTION)
    of_one, encoded = encoded_groups(llm) - encoded, encoded_groups(llm)
    asked = [(clip, f"{QUESTION} {number}") for number in range(5)]
    together = list(llm.ask_all(asked, max_tokens=3))
    assert [each.text for each in together] == [llm.ask(*each, max_tokens=3).text for each in asked]
    assert encoded_groups(llm) - encoded == of_one > 0


def test_an_event_loop_may_ask(llm: LLM, clip: Path) -> None:
    async def both() -> list[str]:
        answers = await asyncio.gather(*(llm.ask_async(clip, QUESTION, frames=number) for number in (2, 4)))
        return [answer.text for answer in answers]

    assert asyncio.run(both()) == [llm.ask(clip, QUESTION, frames=number).text for number in (2, 4)]


def test_errors_are_typed(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="missing"):
        llm.ask(tmp_path / "missing.mp4", QUESTION)
    with pytest.raises(RequestError, match="framez"):
        llm.ask([], QUESTION, framez=4)
    with pytest.raises(RequestError, match=r"topolgy.*epd serve --help"):
        LLM(topolgy="1epd")


def test_nothing_is_left_when_it_is_closed() -> None:
    before = set(threading.enumerate())
    LLM().close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_the_package_is_light_until_a_model_is_asked_for() -> None:
    code = "import sys, epd; print([n for n in ('torch', 'pydantic', 'av') if n in sys.modules], epd.__all__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[] ['LLM', '__version__', 'plan', 'verify']"
    with pytest.raises(AttributeError, match="'epd' has no attribute 'LLm'"):
        _ = epd.LLm  # type: ignore[attr-defined]
