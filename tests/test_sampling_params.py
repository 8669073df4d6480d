"""Options of a request: vLLM's names and ranges, refused in one line."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from epd.errors import RequestError
from epd.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams


def test_without_options_the_choice_is_greedy_and_plain() -> None:
    params = SamplingParams()
    assert (params.is_greedy, params.has_penalties, params.max_tokens, params.n) == (True, False, None, 1)
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", (None, 1, 10**9)),
        ("temperature", (0, 0.0, 2, 1e300)),
        ("top_p", (1e-9, 0.5, 1)),
        ("top_k", (-1, 0, 1, 10**9)),
        ("min_p", (0, 1)),
        ("repetition_penalty", (1e-9, 1, 100)),
        ("presence_penalty", (-2, 2)),
        ("frequency_penalty", (-2.0, 2.0)),
        ("seed", (None, -(2**63), 2**63 - 1)),
        ("min_tokens", (0, 7)),
        ("logprobs", (None, 0, MAX_LOGPROBS)),
        ("n", (1, MAX_CHOICES)),
        ("stop", ((), ("a", "b"))),
        ("stop_token_ids", ((), (0, 7))),
    ],
)
def test_the_ends_of_each_range_are_allowed(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("max_tokens", (0, -1, 1.0, "1", True, 2**63), "an integer at least 1 and below 2**63"),
        ("temperature", (-0.1, math.nan, math.inf, "hot", None, 10**400), "a number at least 0 and finite"),
        ("top_p", (0, 1.01, math.nan), "a number above 0 and at most 1"),
        ("top_k", (-2, 1.5), "an integer at least -1 and below 2**63"),
        ("min_p", (-0.1, 1.1), "a number at least 0 and at most 1"),
        ("repetition_penalty", (0, -1, math.inf), "a number above 0 and finite"),
        ("presence_penalty", (-2.1, 2.1), "a number at least -2 and at most 2"),
        ("frequency_penalty", (-2.1, 2.1), "a number at least -2 and at most 2"),
        ("seed", (-(2**63) - 1, 2**63, 1.0), "an integer at least -9223372036854775808 and below 2**63"),
        ("min_tokens", (-1, None), "an integer at least 0 and below 2**63"),
        ("logprobs", (-1, MAX_LOGPROBS + 1), f"an integer at least 0 and at most {MAX_LOGPROBS}"),
        ("n", (0, MAX_CHOICES + 1), f"an integer at least 1 and at most {MAX_CHOICES}"),
    ],
)
def test_what_is_outside_is_refused_in_one_short_line(
    name: str, values: tuple[Any, ...], allowed: str
) -> None:
    for value in values:
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**{name: value})
        message = str(refusal.value)
        assert message.startswith(f"{name} must be {allowed}, got ")
        assert "\n" not in message
        assert len(message) < 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "abc"}, "stop must be strings of at least one character, got 'abc'"),
        ({"stop": ("a", "")}, r"stop must be strings of at least one character, got \('a', ''\)"),
        ({"stop": (1,)}, "stop must be strings"),
        ({"stop": ("a",) * 65}, "stop may hold at most 64 strings, got 65"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids must be token ids of at least 0, got \(-1,\)"),
        ({"stop_token_ids": (2**63,)}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": [1]}, "stop_token_ids must be token ids"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output must be true or false, got 'no'"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\), got 5"),
    ],
)
def test_other_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_options_of_a_request_overrule_defaults() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, max_tokens=64)
    params = defaults.with_options({"temperature": 0.0, "seed": 7})
    assert params == SamplingParams(temperature=0.0, top_k=20, max_tokens=64, seed=7)
    assert defaults.with_options({}) == defaults
    with pytest.raises(RequestError, match="no sampling option 'heat'; the options are max_tokens, temp"):
        defaults.with_options({"heat": 1})
    with pytest.raises(RequestError, match="top_p must be"):
        defaults.with_options({"top_p": 2})


def test_tokens_that_end_an_answer() -> None:
    eos_ids = frozenset([1, 2])
    assert SamplingParams().ending_ids(eos_ids) == {1, 2}
    assert SamplingParams(stop_token_ids=(5,)).ending_ids(eos_ids) == {1, 2, 5}
    assert SamplingParams(stop_token_ids=(2,), ignore_eos=True).ending_ids(eos_ids) == {2}


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_needs_the_tokens_before(name: str) -> None:
    assert SamplingParams(**{name: 1.5}).has_penalties
