"""Writes the tables of request fields in docs/api.md: `python -m tests.request_fields_page`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.completion_request import (
    COMPLETION_FIELDS,
    COMPLETION_HONOURED,
    CompletionRequest,
)
from epd.serve_app.http.requests.honoured_fields import HONOURED
from epd.serve_app.http.requests.request_fields import CHAT_FIELDS, OtherFields
from epd.serve_app.http.requests.response_request import RESPONSE_FIELDS, RESPONSE_HONOURED, ResponseRequest
from tests import ROOT

PAGE = ROOT / "docs" / "api.md"
_HEAD = "| fields | here |\n|---|---|\n"

OPENAI = frozenset(ChatParams.__annotations__) | {"stream"}
# Fields of vLLM's ChatCompletionRequest, as of November 2026.
VLLM = frozenset({
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
})  # fmt: skip
# Of its CompletionRequest.
_VLLM_COMPLETIONS = frozenset({
    "model", "prompt", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n",
    "presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user",
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "allowed_token_ids",
    "prompt_logprobs", "logprob_token_ids", "bad_words", "prompt_embeds", "add_special_tokens",
    "response_format", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start",
    "return_token_offsets", "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params",
    "vllm_xargs", "repetition_detection", "thinking_token_budget", "stream_interval",
})  # fmt: skip
# Of its ResponsesRequest.
_VLLM_RESPONSES = frozenset({
    "background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "model", "logit_bias", "parallel_tool_calls", "previous_response_id", "prompt", "reasoning",
    "service_tier", "store", "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs",
    "top_p", "top_k", "truncation", "user", "skip_special_tokens", "include_stop_str_in_output",
    "prompt_cache_key", "request_id", "mm_processor_kwargs", "priority", "cache_salt",
    "enable_response_messages", "previous_input_messages", "previous_response", "structured_outputs",
    "repetition_penalty", "seed", "stop", "ignore_eos", "vllm_xargs", "chat_template_kwargs",
})  # fmt: skip
# Files of tests/serve_app/http that test a field of chat; test_completions.py has the others that are done.
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


@dataclass(frozen=True)
class Route:
    """A table of the page. mark: its name there. honoured, others: what it shows.

    openai, vllm: names of their fields, all of which are known here.
    """

    mark: str
    model: type[BaseModel]
    honoured: Mapping[str, str]
    others: OtherFields
    openai: frozenset[str]
    vllm: frozenset[str]

    @property
    def begin(self) -> str:
        return f"<!-- {self.mark}: `python -m tests.request_fields_page` -->\n"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.mark} -->\n"

    def here(self) -> dict[str, str]:
        """Returns what each field does, required ones first, then those with no effect or refused."""
        fields = sorted(self.model.model_fields.items(), key=lambda field: not field[1].is_required())
        done = {name: self.honoured.get(name) or HONOURED[name] for name, _ in fields}
        no_effect = dict.fromkeys(self.others.no_effect, "no effect")
        refused = {name: _refused(self.others.advice.get(name, "")) for name in self.others.refused}
        return done | no_effect | refused

    def table(self) -> str:
        """Fields that are done, and not as a chat's, alike ones in one row."""
        chats = CHAT.here() if self is not CHAT else {}
        rows: dict[str, list[str]] = {}
        for name, here in self.here().items():
            if here != chats.get(name) and name in self.model.model_fields:
                rows.setdefault(here, []).append(f"`{name}`")
        return _HEAD + "".join(f"| {', '.join(names)} | {words} |\n" for words, names in rows.items())

    def put_into(self, text: str) -> str:
        before, _, rest = text.partition(self.begin)
        return before + self.begin + "\n" + self.table() + "\n" + self.end + rest.partition(self.end)[2]


CHAT = Route("fields", ChatRequest, HONOURED, CHAT_FIELDS, OPENAI, VLLM)
COMPLETIONS = Route(
    "fields of completions",
    CompletionRequest,
    COMPLETION_HONOURED,
    COMPLETION_FIELDS,
    frozenset(CompletionCreateParamsBase.__annotations__) | {"stream"},
    _VLLM_COMPLETIONS,
)
RESPONSES = Route(
    "fields of responses",
    ResponseRequest,
    RESPONSE_HONOURED,
    RESPONSE_FIELDS,
    frozenset(ResponseCreateParamsBase.__annotations__) | {"stream"},
    _VLLM_RESPONSES,
)
ROUTES = (CHAT, COMPLETIONS, RESPONSES)


def _refused(advice: str) -> str:
    return "refused" + (f": {advice}" if advice else ", unless the value asks for nothing")


def with_tables(text: str) -> str:
    """Returns the page with the present tables."""
    for route in ROUTES:
        text = route.put_into(text)
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
