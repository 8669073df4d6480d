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
    CompletionRequest,
)
from epd.serve_app.http.requests.request_fields import CHAT_FIELDS, OtherFields
from epd.serve_app.http.requests.response_request import RESPONSE_FIELDS, ResponseRequest
from tests import ROOT

PAGE = ROOT / "docs" / "api.md"
_HEAD = "| fields | here |\n|---|---|\n"

# Of each field of ChatRequest, in its order, in Markdown.
HONOURED: Mapping[str, str] = {
    "model": "one of `/v1/models`, by default the first",
    "stream": "server-sent events; a comment while nothing comes; the last text has the reason of its end",
    "temperature": "0 is greedy; by default as the checkpoint's generation configuration",
    "top_p": "as OpenAI's",
    "presence_penalty": "as OpenAI's",
    "frequency_penalty": "as OpenAI's",
    "seed": "of the draws; the same gives the same answer",
    "stop": "strings that end the answer",
    "structured_outputs": "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar`",
    "top_k": "as vLLM's",
    "min_p": "as vLLM's",
    "repetition_penalty": "as vLLM's",
    "min_tokens": "as vLLM's",
    "ignore_eos": "as vLLM's",
    "stop_token_ids": "as vLLM's",
    "include_stop_str_in_output": "as vLLM's",
    "logit_bias": "at most 1,024 tokens, from -100 to 100, added before penalties",
    "bad_words": (
        "as vLLM's: at most 512 words of 8,192 characters that the answer has not, with or without a space "
        "before; other cases, and words that begin within a longer token, are other words; where a format "
        "allows nothing else the word comes"
    ),
    "priority": "the lower, the sooner, as vLLM's; below 0 with the admin key",
    "cache_salt": "caches are shared only with requests of the same salt, at most 1,024 characters",
    "messages": "the conversation: roles system (or developer), user, assistant, tool and function",
    "stream_options": "`include_usage`: tokens in the last event; `continuous_usage_stats`: in every event",
    "max_completion_tokens": (
        "longest answer, tokens; without it the checkpoint's `max_new_tokens`, else up to the context's end"
    ),
    "max_tokens": "the old name of it",
    "n": "independent answers, at most 128",
    "logprobs": "of each token",
    "top_logprobs": "at most 20; 0 without `logprobs` asks for nothing",
    "response_format": "`text`, `json_object`, `json_schema`",
    "tools": "functions that the answer may call",
    "tool_choice": "`none`, `auto`, `required`, or one function by its name",
    "parallel_tool_calls": "whether `required` allows several calls; by default it does",
    "modalities": "`text` alone",
    "mm_processor_kwargs": (
        "`fps` or `num_frames` of videos, or `do_sample_frames` false: every frame; `min_pixels`, "
        "`max_pixels` or `size` of images and frames, `cap_pixels_per_frame`"
    ),
    "media_io_kwargs": (
        "`video`: `fps` or `num_frames`, the same as in `mm_processor_kwargs`; with a list "
        "of frames `frames_indices`, `total_num_frames` and `duration`"
    ),
    "chat_template_kwargs": (
        "variables of the model's chat template; one that it does not read changes nothing, one that "
        "rendering itself takes is refused"
    ),
    "epd": (
        "`fps`, `num_frames`, `start_s`, `end_s` of videos, `retention`, `reduction`, "
        "`compute_share`, `retention_min`, `max_visual_tokens`, `deadline_s`, `events`"
    ),
}
# What is not the same of a completion.
_COMPLETION_HONOURED: Mapping[str, str] = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "max_tokens": (
        "longest answer, tokens; 16 by default, `null` as a chat's; 0 with `echo`: nothing is generated"
    ),
    "n": "independent answers to each prompt, at most 128",
    "logprobs": "the number of likeliest tokens given with each token, at most 20; not with `echo`",
    "echo": "the prompt stands before its answer",
    "add_special_tokens": "whether texts get those that the tokenizer adds; by default they do",
}
# What is not the same of a response.
_RESPONSE_HONOURED: Mapping[str, str] = {
    "input": (
        "a text, or items: messages, `function_call`, `function_call_output` with texts and `input_image`, "
        "`reasoning`, which is left out"
    ),
    "instructions": "a message of the system before the input",
    "stream": "OpenAI's typed events, with a comment while nothing comes",
    "stream_options": "`include_obfuscation`, which changes nothing",
    "max_output_tokens": "as a chat's `max_completion_tokens`",
    "text": "`format`: `text`, `json_object`, `json_schema`, `verbosity`: `medium`",
    "tool_choice": "`none`, `auto`, `required`, or `{type: function, name}`",
    "include": (
        "`message.output_text.logprobs`, not with tools; `reasoning.encrypted_content`, which changes nothing"
    ),
    "top_logprobs": "at most 20, with the logprobs that `include` names",
    "metadata": "comes back in the response; nothing is stored",
    "epd": "as a chat's, without `events`",
}

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
    _COMPLETION_HONOURED,
    COMPLETION_FIELDS,
    frozenset(CompletionCreateParamsBase.__annotations__) | {"stream"},
    _VLLM_COMPLETIONS,
)
RESPONSES = Route(
    "fields of responses",
    ResponseRequest,
    _RESPONSE_HONOURED,
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
