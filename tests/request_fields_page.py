"""Writes the table of request fields in docs/api.md: `python -m tests.request_fields_page`."""

from __future__ import annotations

import json

from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from serve_app.http.chat_request import ChatRequest
from serve_app.http.honoured_fields import HONOURED
from serve_app.http.request_fields import NO_EFFECT, REFUSED
from tests import ROOT

PAGE = ROOT / "docs" / "api.md"
BEGIN = "<!-- fields: `python -m tests.request_fields_page` -->\n"
END = "<!-- end of fields -->\n"
_HEAD = "| field | OpenAI | vLLM | here | test |\n|---|---|---|---|---|\n"

OPENAI = frozenset(CompletionCreateParamsBase.__annotations__) | {"stream"}
# Fields of vLLM's ChatCompletionRequest, as of November 2026.
VLLM = {
    "messages", "model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "presence_penalty", "response_format", "seed", "stop", "stream",
    "stream_options", "temperature", "top_p", "tools", "tool_choice", "reasoning_effort",
    "thinking_token_budget", "include_reasoning", "parallel_tool_calls", "user", "use_beam_search",
    "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "prompt_logprobs",
    "logprob_token_ids", "allowed_token_ids", "bad_words", "echo", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "documents", "chat_template", "chat_template_kwargs",
    "media_io_kwargs", "mm_processor_kwargs", "structured_outputs", "priority", "request_id",
    "session_id", "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start",
    "return_token_offsets", "return_prompt_text", "return_mm_kwargs", "cache_salt", "kv_transfer_params",
    "ec_transfer_params", "vllm_xargs", "repetition_detection", "stream_interval",
}  # fmt: skip
# Where a field that is done has its test: a file of tests/serve_app/http.
_TEST = "test_completions.py"
TESTS = {
    "response_format": "test_answer_format.py",
    "structured_outputs": "test_answer_format.py",
    "tools": "test_tools.py",
    "tool_choice": "test_tools.py",
    "parallel_tool_calls": "test_tools.py",
    "media_io_kwargs": "test_frame_lists.py",
    "mm_processor_kwargs": "test_media_size.py",
    "modalities": "test_refusals.py",
    "priority": "test_admin.py",
    "cache_salt": "test_cache_salt.py",
}
_OTHER_FIELDS = "test_request_fields.py"


def table() -> str:
    """The table: fields that are done, in the order of a request, then those with no effect or refused."""
    rows = [_row(name, HONOURED[name], TESTS.get(name, _TEST)) for name in ChatRequest.model_fields]
    rows += [_row(name, f"no effect: {reason}", _OTHER_FIELDS) for name, reason in NO_EFFECT.items()]
    rows += [_row(name, _refused(values), _OTHER_FIELDS) for name, values in REFUSED.items()]
    return _HEAD + "".join(rows)


def _row(name: str, here: str, test: str) -> str:
    openai, vllm = ("yes" if name in fields else "" for fields in (OPENAI, VLLM))
    return f"| `{name}` | {openai} | {vllm} | {here} | `{test}` |\n"


def _refused(values: tuple[object, ...]) -> str:
    return "refused, except " + " or ".join(f"`{json.dumps(value)}`" for value in (None, *values))


def with_table(text: str) -> str:
    """Returns the page with the present table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
