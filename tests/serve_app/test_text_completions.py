"""The whole application continues prompts as `model.generate` does, and tokens of a chat as the chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from openai import BadRequestError, OpenAI

from epd.encoders import load_adapter
from epd.models import embedded_model_path
from tests.clear_draws import clear_draws
from tests.reference import MAX_TOKENS, generated_as_it_is
from tests.serve_app.conftest import JSON
from tests.serve_app.real_app import RealApp, real_app
from tests.tiny_models import load_reference

PROMPTS = ("Which shapes are there?", "a red circle and", "x", "how many ä 漢 🙂 are")
DRAWN: JSON = {"temperature": 1.8, "seed": 3, "max_tokens": 12}


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with real_app(embedded_model_path(), "1e1p1d") as running:
        yield running
        running.wait_until_empty()
        assert running.num_workers_lost == 0


@pytest.fixture
def client(app: RealApp) -> Iterator[OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=200) as http,
        OpenAI(base_url=f"{app.url}/v1", api_key="none", http_client=http, max_retries=0) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_adapter(embedded_model_path()).tokenizer


@pytest.fixture(scope="module")
def expected(tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """The tokens of `generate`, of each prompt."""
    model = load_reference(embedded_model_path())
    found = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        found[prompt] = generated_as_it_is(
            model, {"input_ids": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["input_ids"])}
        )
    return found


def test_tokens_equal_generate(client: OpenAI, tokenizer: Any, expected: dict[str, tuple[int, ...]]) -> None:
    found = client.completions.create(
        model="tiny", prompt=list(PROMPTS), max_tokens=MAX_TOKENS, temperature=0
    )
    assert [choice.text for choice in found.choices] == [
        tokenizer.decode(expected[prompt], skip_special_tokens=True) for prompt in PROMPTS
    ]
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(map(len, expected.values()))
    assert found.usage.prompt_tokens == sum(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)


def test_tokens_of_a_chat_are_continued_as_the_chat_is(app: RealApp, client: OpenAI) -> None:
    messages: JSON = {"messages": [{"role": "user", "content": "Which shapes are there?"}]}
    token_ids = app.http.post("/tokenize", json=messages).json()["tokens"]
    for options in (DRAWN, {"temperature": 0, "max_tokens": 20}):
        with clear_draws():
            chat = client.chat.completions.create(model="tiny", **messages, **options)
        found = client.completions.create(model="tiny", prompt=token_ids, **options)
        assert found.choices[0].text == chat.choices[0].message.content
        assert found.usage is not None
        assert chat.usage is not None
        assert found.usage.completion_tokens == chat.usage.completion_tokens


def test_several_prompts_are_answered_as_each_alone(client: OpenAI) -> None:
    together = client.completions.create(model="tiny", prompt=list(PROMPTS), n=2, **DRAWN).choices
    with clear_draws():
        alone = [
            client.completions.create(model="tiny", prompt=each, n=2, **DRAWN).choices for each in PROMPTS
        ]
    assert [choice.index for choice in together] == list(range(2 * len(PROMPTS)))
    assert [choice.text for choice in together] == [one.text for choices in alone for one in choices]
    pairs = zip(together[::2], together[1::2], strict=True)
    assert any(one.text != other.text for one, other in pairs)


def test_a_stream_adds_up_to_the_whole(client: OpenAI) -> None:
    options: JSON = {"prompt": list(PROMPTS), "n": 2, "logprobs": 2, **DRAWN}
    with clear_draws():
        whole = client.completions.create(model="tiny", **options)
    chunks = list(
        client.completions.create(
            model="tiny", stream=True, stream_options={"include_usage": True}, **options
        )
    )
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        streamed = {
            name: [value for one in mine if one.logprobs for value in getattr(one.logprobs, name)]
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        }
        assert streamed["tokens"] == choice.logprobs.tokens
        assert streamed["text_offset"] == choice.logprobs.text_offset
        rounded = pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)  # another batch, another rounding
        assert streamed["token_logprobs"] == rounded
        assert len(streamed["top_logprobs"]) == len(streamed["tokens"])
    assert chunks[-1].usage == whole.usage


def test_logprobs_point_into_the_text(client: OpenAI, tokenizer: Any) -> None:
    choice = client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=20, temperature=0, logprobs=3
    ).choices[0]
    found = choice.logprobs
    assert found is not None
    for token, offset in zip(found.tokens or (), found.text_offset or (), strict=True):
        assert choice.text.startswith(token, offset)
    assert len(found.tokens or ()) == 20 or choice.finish_reason == "stop"
    for logprob, likeliest in zip(found.token_logprobs or (), found.top_logprobs or (), strict=True):
        assert logprob == max(likeliest.values()), "of a greedy answer"
        assert len(likeliest) <= 4


def test_echo_and_stop(client: OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="a red", temperature=0).choices[0]
    echoed = client.completions.create(model="tiny", prompt="a red", temperature=0, echo=True).choices[0]
    assert echoed.text == "a red" + plain.text
    assert (
        client.completions.create(model="tiny", prompt="a red", echo=True, max_tokens=0).choices[0].text
        == "a red"
    )
    stop = plain.text[2:4]
    cut = client.completions.create(model="tiny", prompt="a red", temperature=0, stop=stop).choices[0]
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_an_answer_can_be_held_to_a_format(client: OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    found = client.completions.create(
        model="tiny", prompt=list(PROMPTS), temperature=1.5, extra_body=body
    ).choices
    assert {choice.text for choice in found} <= {"yes", "no"}
    assert {choice.finish_reason for choice in found} == {"stop"}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([[5], [481]], r"prompt\[1\]: received the token 481; allowed: 0 to 480"),
        ([2**62], "prompt: received the token 4611686018427387904"),
        ("", "prompt: received 0 tokens; allowed: 1 to"),
        (["a", ""], r"prompt\[1\]: received 0 tokens"),
        ([7] * 40_000, "prompt: received 40,000 tokens; allowed: 1 to 32,767"),
        ("a " * 40_000, "prompt: received 80,000|prompt: received [0-9,]+ tokens; allowed: 1 to 32,767"),
    ],
)
def test_what_cannot_be_a_prompt_is_named(client: OpenAI, prompt: Any, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        client.completions.create(model="tiny", prompt=prompt)


def test_pads_of_media_are_tokens_like_others(app: RealApp, client: OpenAI, tokenizer: Any) -> None:
    """No medium is behind them: they cost no worker."""
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    found = client.completions.create(model="tiny", prompt=[[pad] * 40, [5, pad, 6]], max_tokens=4)
    assert len(found.choices) == 2
    assert app.num_workers_lost == 0
