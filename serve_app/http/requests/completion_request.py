"""Defines the JSON of `/v1/completions`: a prompt that is continued as it is, without a chat template."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Discriminator, Field, Tag

from epd.sampling_params import MAX_CHOICES, MAX_INT64, MAX_LOGPROBS
from epd.serve_app.http.requests.chat_messages import UserMessage
from epd.serve_app.http.requests.chat_request import (
    AnswerFields,
    ChatRequest,
    Count0,
    Filled,
    ResponseFormat,
    StreamOptions,
)
from epd.serve_app.http.requests.request_fields import NO_EFFECT, REFUSED, OtherFields

DEFAULT_MAX_TOKENS = 16  # as OpenAI and vLLM have it

_NOT_HERE = (
    "prompt_cache_key", "metadata", "prediction", "safety_identifier", "store", "include_reasoning",
    "separate_reasoning", "service_tier", "stream_reasoning",
)  # fmt: skip
_NOT_REFUSED_HERE = (
    "add_generation_prompt", "add_special_tokens", "audio", "chat_template",
    "continue_final_message", "documents", "echo", "enable_thinking", "function_call", "functions",
    "moderation", "reasoning", "reasoning_effort", "return_prompt_text", "thinking", "verbosity",
    "web_search_options",
)  # fmt: skip
COMPLETION_FIELDS = OtherFields(
    no_effect={
        name: reason
        for name, reason in NO_EFFECT.items()
        if name not in _NOT_HERE and not name.startswith("prompt_cache")
    },
    refused={
        **{name: values for name, values in REFUSED.items() if name not in _NOT_REFUSED_HERE},
        "prompt_embeds": (),
        "suffix": ("",),
    },
)

_KINDS = (
    "a string, a list of strings, a list of token ids, or a list of lists of token ids, none of them empty"
)


def _kind(prompt: object) -> str | None:
    """Returns the tag of a prompt, by its first element; None for what is none."""
    if isinstance(prompt, str):
        return "str"
    if not isinstance(prompt, list) or not prompt:
        return None
    kinds = {str: "list[str]", int: "list[int]", list: "list[list[int]]"}
    return kinds.get(type(prompt[0]))


_TokenIds = Filled[Annotated[int, Field(ge=0, le=MAX_INT64)]]
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Filled[str], Tag("list[str]")]
    | Annotated[_TokenIds, Tag("list[int]")]
    | Annotated[Filled[_TokenIds], Tag("list[list[int]]")],
    Discriminator(
        _kind, custom_error_type="prompt", custom_error_message=f"received something else; allowed: {_KINDS}"
    ),
]


class CompletionRequest(AnswerFields):
    """A completion. Omitted fields take the server's defaults; temperature 0 is greedy."""

    model_config = ConfigDict(json_schema_extra=COMPLETION_FIELDS.add_to)

    prompt: Prompt
    stream_options: StreamOptions | None = None
    max_tokens: Count0 | None = Field(
        default=DEFAULT_MAX_TOKENS, description="0 with echo generates nothing."
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = Field(default=None, description="Puts the prompt before its answer.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="Whether texts get those that the tokenizer adds; by default true."
    )

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or token ids."""
        received: Any = self.prompt
        is_one = isinstance(received, str) or isinstance(received[0], int)
        return [received] if is_one else received

    def options(self) -> ChatRequest:
        """Returns a chat request with the same options; its message stands for no prompt."""
        given = {name: getattr(self, name) for name in _SAME_NAME if name in self.model_fields_set}
        return ChatRequest(
            messages=[UserMessage(role="user", content="any")],
            max_tokens=self.max_tokens or None,
            logprobs=None if self.logprobs is None else True,
            top_logprobs=self.logprobs,
            **given,
        )


_OWN = {"prompt", "echo", "logprobs", "max_tokens", "add_special_tokens"}
_SAME_NAME = [name for name in CompletionRequest.model_fields if name not in _OWN]
