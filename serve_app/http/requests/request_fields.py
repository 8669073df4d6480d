"""Lists fields of other servers that are not implemented here, as either harmless or refused.

No field is ignored silently. A field that would change the answer is refused by name, unless its value asks
for nothing, as clients' defaults do. Unknown names are refused too: most are misspelt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from epd.errors import RequestError

# Accepted with any value: they do not change answers here.
NO_EFFECT: Mapping[str, str] = {
    "include_reasoning": "reasoning is not separated from the answer",
    "keep_alive": "the model stays loaded",
    "metadata": "nothing is stored",
    "prediction": "it would be for speed alone",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_options": "prefixes are found by their content",
    "prompt_cache_retention": "prefixes stay as long as there is room",
    "return_mm_kwargs": "only routes that render prompts read it",
    "return_token_offsets": "only routes that render prompts read it",
    "safety_identifier": "users are not distinguished",
    "separate_reasoning": "reasoning is not separated from the answer",
    "service_tier": "there is one",
    "session_id": "prefixes are found by their content",
    "store": "nothing is stored",
    "stream_reasoning": "reasoning is not separated from the answer",
    "usage": "it is in every answer, and in streams as `stream_options` says",
    "user": "users are not distinguished",
}

# Refused, except for null and these values, which ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": (),
    "echo": (False,),
    "enable_thinking": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "moderation": (),
    "prompt_logprobs": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}, {"enabled": False}),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structural_tag": (),
    "thinking": ({"type": "disabled"},),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

_MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class OtherFields:
    """Lists the fields of one route that are not in the model of its request.

    no_effect: accepted with any value, and why
    refused: except for null and these values
    advice: what to do instead of a refused one; by default to leave it out
    """

    no_effect: Mapping[str, str]
    refused: Mapping[str, tuple[Any, ...]]
    advice: Mapping[str, str] = field(default_factory=dict)

    def check(self, received: Mapping[str, Any], known: Collection[str]) -> None:
        """Checks received fields. known: names of those in the model of the request.

        Raises RequestError for the first that is unknown or asks for something not implemented here.
        """
        for name, value in received.items():
            if name in self.refused:
                self._check_neutral(name, value)
            elif name not in self.no_effect:
                hint = self._hint(name, known)
                raise RequestError(
                    f"received the field {_shown(name)}; allowed: those of docs/api.md; {hint}"
                )

    def _check_neutral(self, name: str, value: object) -> None:
        neutral = (None, *self.refused[name])
        if value not in neutral:
            allowed = " or ".join("null" if one is None else repr(one) for one in neutral)
            advice = self.advice.get(name, "leave it out")
            raise RequestError(f"received {name}; allowed: {allowed}, this server does not do more; {advice}")

    def _hint(self, name: str, known: Collection[str]) -> str:
        close = get_close_matches(name[:_MAX_SHOWN_CHARS], [*known, *self.no_effect, *self.refused], 1)
        return f"did you mean {close[0]}?" if close else "leave it out"

    def add_to(self, schema: dict[str, Any]) -> None:
        """Adds these fields to the JSON schema of a request."""
        properties = schema["properties"]
        for name, reason in self.no_effect.items():
            properties[name] = {"description": f"Changes nothing: {reason}."}
        for name, values in self.refused.items():
            properties[name] = {"enum": [None, *values], "description": "Another value is refused."}
        schema["additionalProperties"] = False


CHAT_FIELDS = OtherFields(NO_EFFECT, REFUSED)


def _shown(name: str) -> str:
    return repr(name) if len(name) <= _MAX_SHOWN_CHARS else f"{name[:_MAX_SHOWN_CHARS]!r}..."
