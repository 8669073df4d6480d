"""Lists fields of other servers that are not implemented here, as either harmless or refused.

No field is ignored silently. A field that would change the answer is refused by name, unless its value asks
for nothing, as clients' defaults do. Unknown names are refused too: most are misspelt.

Inside of messages, parts, calls and functions, what is not defined is ignored: histories carry fields of
other servers, and none of them can change the answer. Three kinds are refused, since they could:
names one slip away from a field that is missing, fields of another kind of part, and options of media that
belong to the request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from epd.errors import RequestError

_MAX_NAME = 24  # longer names resemble none
_MAX_FIELDS = 64  # of one object that are not defined: each is looked at
_LOOKED = "mm_processor_kwargs, media_io_kwargs or epd of the request"
# Where clients of other servers put what this one takes elsewhere, and where it belongs.
_ELSEWHERE = {
    **dict.fromkeys(
        (
            "fps", "nframes", "num_frames", "max_frames", "min_frames", "sample_fps", "do_sample_frames",
            "video_start", "video_end", "start_s", "end_s", "min_pixels", "max_pixels", "total_pixels",
            "resized_height", "resized_width", "min_dynamic_patch", "max_dynamic_patch",
        ),
        _LOOKED,
    ),
    "input_schema": "parameters",
}  # fmt: skip
# What holds the content of parts and messages: ignored where it does not belong, something would be lost.
_CONTENT = frozenset({
    "text", "image", "images", "image_url", "video", "videos", "video_url", "audio_url", "input_audio",
    "file", "file_id", "tool_calls", "function_call",
})  # fmt: skip
_REASONING = "the server's reasoning_parser decides"
# Accepted with any value: they do not change answers here.
NO_EFFECT: Mapping[str, str] = {
    "include_reasoning": _REASONING,
    "keep_alive": "the model stays loaded",
    "metadata": "nothing is stored",
    "prediction": "it would be for speed alone",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_options": "prefixes are found by their content",
    "prompt_cache_retention": "prefixes stay as long as there is room",
    "return_mm_kwargs": "only routes that render prompts read it",
    "return_token_offsets": "only routes that render prompts read it",
    "safety_identifier": "users are not distinguished",
    "separate_reasoning": _REASONING,
    "service_tier": "there is one",
    "session_id": "prefixes are found by their content",
    "store": "nothing is stored",
    "stream_reasoning": _REASONING,
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


class Sent(BaseModel):
    """An object inside of a message as clients send it: with more fields than the defined ones.

    Fields whose value is null or empty ask for nothing, whatever their name.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    # Fields whose names may be misspelt, as they change nothing or are missed at once.
    harmless: ClassVar[frozenset[str]] = frozenset({"id", "uuid", "type", "role", "strict"})
    # Fields that are ignored, though others of their name are content.
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _leave_out_others(self) -> Self:
        others = self.__pydantic_extra__
        if others:
            if len(others) > _MAX_FIELDS:
                raise _refused(
                    f"received {len(others)} fields that are not known; send {_MAX_FIELDS} at most"
                )
            for name, value in others.items():
                if name not in self.ignored and value not in (None, "", [], {}):
                    self._check(name)
            others.clear()
        return self

    def _check(self, name: str) -> None:
        """Raises for a field that could change the answer."""
        if name in _CONTENT:
            raise _refused(f"received the field {name!r}, which does not belong here; move or leave it out")
        if name in _ELSEWHERE:
            raise _refused(f"received the field {name!r}; allowed: in {_ELSEWHERE[name]}; move it")
        if len(name) <= _MAX_NAME:
            for slip in _slips(_bare(name)):
                for meant in _by_slip(type(self)).get(slip, ()):
                    if getattr(self, meant) is None:
                        raise _refused(f"received the field {name!r}; did you mean {meant}?")


def _refused(message: str) -> PydanticCustomError:
    return PydanticCustomError("sent_field", "{message}", {"message": message})


@cache
def _by_slip(model: type[Sent]) -> dict[str, list[str]]:
    """Returns the fields that may be meant, by each text that a slip leaves of their names."""
    found: dict[str, list[str]] = {}
    for name in model.model_fields.keys() - model.harmless:
        for slip in _slips(_bare(name)):
            found.setdefault(slip, []).append(name)
    return found


def _bare(name: str) -> str:
    """Returns a name as it is in any case, and with any marks between its words."""
    return name.lower().replace("_", "").replace("-", "")


def _slips(name: str) -> Iterator[str]:
    """Yields what names share of which one has a letter more, less, changed or moved by one."""
    yield name
    for place in range(len(name)):
        yield name[:place] + name[place + 1 :]


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
