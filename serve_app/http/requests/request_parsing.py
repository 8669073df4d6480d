"""Converts the JSON of a request to the types of the pipeline, refusing what is not supported.

Also computes what it asks for, before any work is done for it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from epd.chat import ChatMessage, ContentPart, ToolCall, check_chat
from epd.control.request_budget import RequestBudget
from epd.data_uri import num_listed_frames
from epd.errors import ModelNotFoundError, RequestError
from epd.frame_sampling import FrameSampling, ListedTimes, check_sampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits
from epd.reduction import ReductionPolicy, VisualBudget
from epd.sampling_params import SamplingParams
from epd.serve_app.http.requests.chat_messages import (
    AssistantMessage,
    AudioPart,
    AudioUrl,
    FunctionText,
    ImagePart,
    ImageUrl,
    InputAudioPart,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ThoughtPart,
    ToolMessage,
    UserMessage,
    VideoPart,
    VideoUrl,
)
from epd.serve_app.http.requests.chat_request import ChatRequest, EpdOptions
from epd.serve_app.http.requests.request_fields import CHAT_FIELDS
from epd.serve_app.service import MediaReference, ModelCard
from epd.types import MediaKind

_MediaPart = ImagePart | VideoPart | AudioPart | InputAudioPart
_Text = TextPart | RefusalPart | str
_Part = _Text | ThoughtPart | _MediaPart

# Fields of a request that are options of SamplingParams under the same name.
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "ignore_eos", "min_tokens", "include_stop_str_in_output", "n",
)  # fmt: skip
# Fields of media_io_kwargs.video that say when the frames of a list were on screen.
_LISTED = ("frames_indices", "total_num_frames", "duration")
# How PNG, JPEG, GIF and WebP begin in base64, for clients that leave "data:image/png;base64," out.
_IMAGES_IN_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGODlh", "R0lGODdh", "UklGR")
_MAX_SHOWN_ERRORS = 3
_MAX_SHOWN_NAME = 60  # characters of a field that a client may have made up
_MAX_SHOWN_MESSAGE = 200  # of a message that may quote it
# Errors beyond this number are not listed: a request may have an error in each of its values.
_MAX_LISTED_ERRORS = 1000


def describe(error: ValidationError) -> RequestError:
    """Names the invalid fields of a body in one line, without their values."""
    if error.error_count() > _MAX_LISTED_ERRORS:
        return RequestError(f"invalid request body: {error.error_count()} errors; send a shorter one")
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    deep = [one for one in errors if one["loc"][-1:] != ("str",)]  # a list of parts is also not a text
    shown = [f"{_place(one['loc'])}: {_wrong(one)}" for one in deep or errors]
    more = f" and {len(shown) - _MAX_SHOWN_ERRORS} more" if len(shown) > _MAX_SHOWN_ERRORS else ""
    return RequestError(f"invalid request body: {'; '.join(shown[:_MAX_SHOWN_ERRORS])}{more}")


def _wrong(error: ErrorDetails) -> str:
    is_unknown = error["type"] == "extra_forbidden"
    return "unknown field; leave it out" if is_unknown else error["msg"][:_MAX_SHOWN_MESSAGE]


def _place(location: tuple[int | str, ...]) -> str:
    """Formats as in messages[0].content[1].text: without names of union members, which follow an index."""
    shown = ""
    for before, one in pairwise(("", *location)):
        is_first = isinstance(before, int) or before.startswith("tagged-union[")
        is_member = isinstance(one, str) and (is_first or one == "str" or "[" in one)
        if not is_member:
            shown += f"[{one}]" if isinstance(one, int) else f".{one[:_MAX_SHOWN_NAME]}"
    return shown.lstrip(".") or "the body"


def check_supported(chat: ChatRequest) -> None:
    """Raises RequestError for features of OpenAI's interface that this server lacks."""
    CHAT_FIELDS.check(chat.model_extra or {}, ChatRequest.model_fields)
    if set(chat.modalities or ["text"]) != {"text"}:
        raise RequestError(
            f"received modalities {reprlib.repr(chat.modalities)}; allowed: text; leave it out"
        )
    if chat.top_logprobs and not chat.logprobs:
        raise RequestError("received top_logprobs without logprobs; allowed: with logprobs true; set it")


def model_named(name: str | None, models: Sequence[ModelCard]) -> ModelCard:
    """Returns the requested model, or the default. Raises ModelNotFoundError."""
    if name is None:
        return models[0]
    cards = {card.name: card for card in models}
    if name not in cards:
        allowed = ", ".join(cards)
        raise ModelNotFoundError(f"received the model {name[:100]!r}; allowed: {allowed}; use one")
    return cards[name]


def sampling_params(chat: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Returns the sampling options of a request. Raises RequestError as SamplingParams does."""
    said: dict[str, Any] = {name: getattr(chat, name) for name in _SAME_NAME}
    said["max_tokens"] = chat.max_completion_tokens or chat.max_tokens
    said["stop_token_ids"] = None if chat.stop_token_ids is None else tuple(chat.stop_token_ids)
    if chat.logit_bias is not None:
        said["logit_bias"] = tuple((int(each), bias) for each, bias in chat.logit_bias.items())
    if chat.bad_words is not None:
        said["bad_words"] = tuple(chat.bad_words)
    if chat.stop is not None:
        said["stop"] = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop)
    if chat.logprobs:
        said["logprobs"] = chat.top_logprobs or 0
    return defaults.with_options({name: value for name, value in said.items() if value is not None})


def video_sampling(chat: ChatRequest, references: Sequence[MediaReference]) -> FrameSampling:
    """Returns which frames of each video are used. references: the request's media.

    Raises RequestError if places, or a rate and a number, disagree, for an empty part of a video, and for
    fields that only videos, or only lists of frames, have.
    """
    given = chat.frame_options()
    rates = {options.fps for options in given} - {None}
    numbers = {options.num_frames for options in given} - {None}
    urls = [each.url for each in references if each.kind == "video"]
    lists = [url for url in urls if num_listed_frames(url)]
    listed = _listed_times(chat, next(iter(rates), None), has_lists=bool(lists))
    has_lists_alone = bool(lists) and len(lists) == len(urls)
    if max(len(rates), len(numbers)) > 1 or (rates and numbers and not has_lists_alone):
        raise RequestError(
            f"received fps {sorted(map(str, rates))} and num_frames {sorted(map(str, numbers))}; "
            "allowed: one of the two, once; leave out the rest"
        )
    has_choice = bool(rates or numbers) and not has_lists_alone
    _check_sampled(chat, has_choice=has_choice, has_lists=bool(lists))
    ours = chat.epd or EpdOptions()
    sampling = FrameSampling(
        None if has_lists_alone else next(iter(rates), None),
        next(iter(numbers), None),
        ours.start_s or 0.0,
        ours.end_s,
        listed=listed,
        takes_all=chat.samples_frames() is False,
    )
    check_sampling(sampling)
    return sampling


def _check_sampled(chat: ChatRequest, *, has_choice: bool, has_lists: bool) -> None:
    """Raises RequestError where do_sample_frames contradicts others. has_choice: of frames of videos."""
    if chat.samples_frames() is False and has_choice:
        raise RequestError(
            "received do_sample_frames false with fps or num_frames; allowed: every frame, or a choice; "
            "leave one out"
        )
    if chat.samples_frames() and has_lists:
        raise RequestError(
            "received do_sample_frames true with a list of frames; allowed: false, all of a list are used; "
            "leave it out"
        )


def _listed_times(chat: ChatRequest, rate: float | None, *, has_lists: bool) -> ListedTimes | None:
    """Returns when listed frames were on screen; None without any. Raises RequestError."""
    ours, loading = chat.epd or EpdOptions(), chat.video_loading()
    if not has_lists:
        named = [name for name in _LISTED if getattr(loading, name) is not None]
        if named:
            raise RequestError(
                f"received media_io_kwargs.video.{named[0]} without a list of frames; allowed: with a "
                "video_url data:video/jpeg;base64,F1,F2,...; leave it out"
            )
        return None
    if ours.start_s or ours.end_s is not None:
        raise RequestError(
            "received start_s or end_s with a list of frames; allowed: frames of the wanted part alone; "
            "leave both out"
        )
    indices = None if loading.frames_indices is None else tuple(loading.frames_indices)
    return ListedTimes(1.0 if rate is None else rate, indices, loading.total_num_frames, loading.duration)


def pixel_limits(chat: ChatRequest) -> PixelLimits:
    """Returns how many pixels images and frames are to have."""
    said = chat.mm_processor_kwargs
    if said is None:
        return OWN_LIMITS
    size = None if said.size is None else (said.size.shortest_edge, said.size.longest_edge)
    return PixelLimits(said.min_pixels, said.max_pixels, size, cap_pixels_per_frame=said.cap_pixels_per_frame)


def heard_part(chat: ChatRequest) -> tuple[float, float | None]:
    """Returns the part of each clip of sound that is heard, seconds; None for its end."""
    ours = chat.epd or EpdOptions()
    return ours.start_s or 0.0, ours.end_s


def reduction_policy(chat: ChatRequest, default: ReductionPolicy) -> ReductionPolicy:
    """Returns which visual tokens are kept. Raises RequestError as ReductionPolicy does.

    With a retention or a method of its own a request has its own compute_share, too.
    """
    ours = chat.epd or EpdOptions()
    is_default = ours.reduction is None and ours.retention is None
    has_share = ours.compute_share is not None or not is_default
    return ReductionPolicy(
        method=default.method if ours.reduction is None else ours.reduction,
        retention=default.retention if ours.retention is None else ours.retention,
        compute_share=ours.compute_share if has_share else default.compute_share,
    )


def visual_budget(chat: ChatRequest, most: int | None) -> VisualBudget:
    """Returns what the visual tokens are held to. most: of this server, None for any number."""
    ours = chat.epd or EpdOptions()
    given = [each for each in (ours.max_visual_tokens, most) if each is not None]
    return VisualBudget(
        min(given, default=None), ours.retention is not None, ours.retention or ours.retention_min or 0.0
    )


def conversation(
    messages: Sequence[Message],
    no_turns: tuple[ChatMessage, ...] = (),
    pixels: PixelLimits = OWN_LIMITS,
    heard_s: tuple[float, float | None] = (0.0, None),
) -> tuple[tuple[ChatMessage, ...], tuple[MediaReference, ...]]:
    """Returns the messages and their media, in order. no_turns: come first. Raises RequestError.

    pixels: what the media are resized within. heard_s: the part of each clip of sound, None for its end.
    """
    chat = (*no_turns, *map(_message, messages))
    check_chat(chat)
    return chat, tuple(_references(messages, pixels, heard_s))


def _message(message: Message) -> ChatMessage:
    name = message.name or ""
    if isinstance(message, SystemMessage):
        return ChatMessage("system", _parts(message.content), name=name)
    if isinstance(message, AssistantMessage):
        content = message.refusal if message.content is None else message.content
        return ChatMessage("assistant", _parts(content), _tool_calls(message), name=name)
    if isinstance(message, UserMessage):
        return ChatMessage("user", _parts(message.content), name=name)
    call_id = message.tool_call_id if isinstance(message, ToolMessage) else None
    return ChatMessage("tool", _parts(message.content), tool_call_id=call_id or "", name=name)


def _tool_calls(message: AssistantMessage) -> tuple[ToolCall, ...]:
    calls = [_tool_call(call.function, call.id) for call in message.tool_calls or ()]
    old = message.function_call
    return (*calls, *([_tool_call(old)] if old else []))


def _tool_call(called: FunctionText, call_id: str | None = None) -> ToolCall:
    arguments = called.arguments or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(called.name, arguments, call_id or "")


def _parts(content: str | Sequence[_Part] | None) -> tuple[ContentPart, ...]:
    """Returns the parts of a content: an empty text for none."""
    if content is None or isinstance(content, str):
        return (ContentPart("text", content or ""),)
    parts = tuple(_part(part) for part in content if not isinstance(part, ThoughtPart))
    return parts or (ContentPart("text"),)


def _part(part: _Text | _MediaPart) -> ContentPart:
    match part:
        case str():
            return ContentPart("text", part)
        case TextPart():
            return ContentPart("text", part.text)
        case RefusalPart():
            return ContentPart("text", part.refusal)
        case _:
            return ContentPart(_kind(part))


def _kind(part: _MediaPart) -> MediaKind:
    if isinstance(part, AudioPart | InputAudioPart):
        return "audio"
    return "image" if isinstance(part, ImagePart) else "video"


def _url(part: _MediaPart) -> str | None:
    """Returns the URL of a medium, None if it came by its name alone."""
    match part:
        case InputAudioPart():
            data, kind = part.input_audio.data, f"audio/{part.input_audio.format}"
            return data if data[:5].lower() == "data:" else f"data:{kind};base64,{data}"
        case AudioPart():
            place: AudioUrl | ImageUrl | VideoUrl | str | None = part.audio_url
        case ImagePart():
            place = part.image_url
        case VideoPart():
            place = part.video_url
    url = place.url if isinstance(place, BaseModel) else place
    file_id = None if isinstance(part, AudioPart) else part.file_id
    if file_id is not None and url is not None:
        raise RequestError(
            f"received {file_id} and a URL for one medium; allowed: one of them; leave one out"
        )
    if url is None:
        return file_id
    url = url.strip()
    return f"data:;base64,{url}" if url.startswith(_IMAGES_IN_BASE64) else url


def _references(
    messages: Sequence[Message], pixels: PixelLimits, heard_s: tuple[float, float | None]
) -> Iterator[MediaReference]:
    contents = (message.content for message in messages if isinstance(message, UserMessage | ToolMessage))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    media = (part for part in parts if not isinstance(part, TextPart | str))
    for number, part in enumerate(media, start=1):
        kind = _kind(part)
        label = f"{kind}, number {number} of the media"
        url, uuid = _url(part), None if isinstance(part, InputAudioPart) else part.uuid
        if url == "" or (url is None and uuid is None):
            raise RequestError(
                f"{label}: received neither a URL nor a uuid; allowed http, https, data, file as the url of "
                f"{kind}_url, or null with the uuid of one sent before; send one"
            )
        heard = heard_s if kind == "audio" else (0.0, None)
        yield MediaReference(kind, url or "", label, _limits(part, pixels), uuid or "", *heard)


def _limits(part: _MediaPart, pixels: PixelLimits) -> PixelLimits:
    if not isinstance(part, ImagePart):
        return replace(pixels, is_low_detail=False)
    inner = part.image_url.detail if isinstance(part.image_url, ImageUrl) else None
    return replace(pixels, is_low_detail=(inner or part.detail) == "low")


def budget_of(
    chat: ChatRequest,
    messages: Sequence[ChatMessage],
    references: Sequence[MediaReference],
    *,
    num_bytes: int = 0,
    context_tokens: int | None = None,
) -> RequestBudget:
    """Returns the amounts of a request.

    messages, references: its conversation
    num_bytes: of its body
    context_tokens: of the model, the limit of any answer
    """
    return RequestBudget(
        num_messages=len(messages),
        num_parts=sum(len(message.parts) + len(message.tool_calls) for message in messages),
        num_media=len(references),
        num_json_bytes=max(0, num_bytes - sum(len(one.url) for one in references)),
        num_text_bytes=sum(map(_num_bytes, messages)),
        num_frames=sum(_num_frames(chat, one.url) for one in references if one.kind == "video"),
        num_answer_tokens=_num_answer_tokens(chat, context_tokens),
        **stop_amounts(chat),
    )


def stop_amounts(chat: ChatRequest) -> dict[str, int]:
    """Returns what a request asks for to end its answers, as `RequestBudget` has it."""
    stops = [chat.stop] if isinstance(chat.stop, str) else chat.stop or []
    return {
        "num_stop_strings": len(stops),
        "num_stop_chars": sum(map(len, stops)),
        "num_stop_token_ids": len(chat.stop_token_ids or ()),
    }


def _num_bytes(message: ChatMessage) -> int:
    called = [text for call in message.tool_calls for text in (call.name, call.arguments, call.call_id)]
    texts = (*(part.text for part in message.parts), *called, message.tool_call_id, message.name)
    return sum(len(text.encode()) for text in texts)


def _num_frames(chat: ChatRequest, url: str) -> int:
    """Returns the number of frames requested of a video, of a list those sent; 0 if not given."""
    asked = max((options.num_frames or 0 for options in chat.frame_options()), default=0)
    return num_listed_frames(url) or asked


def _num_answer_tokens(chat: ChatRequest, context_tokens: int | None) -> int:
    asked = chat.max_completion_tokens or chat.max_tokens or 0
    return (asked if context_tokens is None else min(asked, context_tokens)) * (chat.n or 1)
