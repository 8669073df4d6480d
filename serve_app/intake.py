"""From the JSON of a request to the nouns of the pipeline, refusing what cannot be done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from encoders import Sampling
from encoders.chat import ChatMessage, ContentPart, check_chat
from encoders.sampling import check_sampling
from epd.errors import ModelNotFoundError, RequestError, RequestLimitError
from epd.reduction import ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.types import MediaKind
from serve_app.media_spool import MediaReference
from serve_app.protocol import (
    ChatRequest,
    EpdOptions,
    ImagePart,
    Message,
    SystemMessage,
    TextPart,
    UserMessage,
    VideoPart,
)
from serve_app.service import ModelCard

# Fields of a request that are options of SamplingParams under the same name.
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "ignore_eos", "min_tokens", "include_stop_str_in_output", "n",
)  # fmt: skip
# Fields that change the answer and that nobody here does: silence would be a lie.
_REFUSED_UNLESS_EMPTY = ("tools", "functions", "logit_bias")
_MAX_SHOWN_ERRORS = 3


def describe(error: ValidationError) -> RequestError:
    """Where and how a body is not as it should be, in one line, without what was received."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    deep = [one for one in errors if one["loc"][-1:] != ("str",)]  # a list of parts is no text either
    shown = [f"{_place(one['loc'])}: {one['msg']}" for one in deep or errors]
    more = f" and {len(shown) - _MAX_SHOWN_ERRORS} more" if len(shown) > _MAX_SHOWN_ERRORS else ""
    return RequestError(f"the request does not fit: {'; '.join(shown[:_MAX_SHOWN_ERRORS])}{more}")


def _place(location: tuple[int | str, ...]) -> str:
    """As in messages[0].content[1].text: without the names of a union's members, which follow an index."""
    shown = ""
    for before, one in pairwise(("", *location)):
        is_member = isinstance(one, str) and (isinstance(before, int) or one == "str" or "[" in one)
        if not is_member:
            shown += f"[{one}]" if isinstance(one, int) else f".{one}"
    return shown.lstrip(".") or "the body"


def check_supported(chat: ChatRequest) -> None:
    """Raises RequestError for what OpenAI's interface has and this server has not."""
    for name in _REFUSED_UNLESS_EMPTY:
        if getattr(chat, name):
            raise RequestError(f"received {name}; allowed: none, this server does not do it; leave it out")
    if chat.response_format and chat.response_format.type != "text":
        raise RequestError(
            f"received response_format {chat.response_format.type}; allowed: text; leave it out and say in "
            "the question which format you want"
        )
    if set(chat.modalities or ["text"]) != {"text"}:
        raise RequestError(f"received modalities {chat.modalities}; allowed: text; leave it out")
    if chat.stream_options and not chat.stream:
        raise RequestError("received stream_options without stream; allowed: with stream true; set it")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise RequestError("received top_logprobs without logprobs; allowed: with logprobs true; set it")


def model_name(chat: ChatRequest, models: Sequence[ModelCard]) -> str:
    """The model asked for, or the default. Raises ModelNotFoundError."""
    names = [card.name for card in models]
    name = chat.model if chat.model is not None else names[0]
    if name not in names:
        raise ModelNotFoundError(f"received the model {name[:100]!r}; allowed: {', '.join(names)}; use one")
    return name


def sampling_params(chat: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises RequestError as SamplingParams does."""
    said: dict[str, Any] = {name: getattr(chat, name) for name in _SAME_NAME}
    said["max_tokens"] = chat.max_completion_tokens or chat.max_tokens
    said["stop_token_ids"] = None if chat.stop_token_ids is None else tuple(chat.stop_token_ids)
    if chat.stop is not None:
        said["stop"] = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop)
    if chat.logprobs:
        said["logprobs"] = chat.top_logprobs or 0
    return defaults.with_options({name: value for name, value in said.items() if value is not None})


def video_sampling(chat: ChatRequest) -> Sampling:
    """Which frames of each video.

    Raises RequestError where two places, or a rate and a number, disagree, and for an empty part of a video.
    """
    given = [options for options in (chat.epd, chat.mm_processor_kwargs) if options]
    rates = {options.fps for options in given} - {None}
    numbers = {options.num_frames for options in given} - {None}
    if len(rates) + len(numbers) > 1:
        raise RequestError(
            f"received fps {sorted(map(str, rates))} and num_frames {sorted(map(str, numbers))}; "
            "allowed: one of the two, once; leave out the rest"
        )
    ours = chat.epd or EpdOptions()
    sampling = Sampling(next(iter(rates), None), next(iter(numbers), None), ours.start_s or 0.0, ours.end_s)
    check_sampling(sampling)
    return sampling


def reduction_policy(chat: ChatRequest, default: ReductionPolicy) -> ReductionPolicy:
    """Which visual tokens are kept. Raises RequestError as ReductionPolicy does."""
    ours = chat.epd or EpdOptions()
    return ReductionPolicy(
        method=default.method if ours.reduction is None else ours.reduction,
        retention=default.retention if ours.retention is None else ours.retention,
    )


def conversation(
    messages: Sequence[Message], max_media: int
) -> tuple[tuple[ChatMessage, ...], tuple[MediaReference, ...]]:
    """The messages, and their media in order. Raises RequestError, RequestLimitError."""
    chat = tuple(_message(message) for message in messages)
    check_chat(chat)
    references = tuple(_references(messages))
    if len(references) > max_media:
        raise RequestLimitError(f"received {len(references)} media; allowed {max_media}; send fewer")
    return chat, references


def _message(message: Message) -> ChatMessage:
    role = "system" if isinstance(message, SystemMessage) else message.role
    if isinstance(message.content, str):
        return ChatMessage(role, (ContentPart("text", message.content),))
    return ChatMessage(role, tuple(_part(part) for part in message.content))


def _part(part: TextPart | ImagePart | VideoPart) -> ContentPart:
    return ContentPart("text", part.text) if isinstance(part, TextPart) else ContentPart(_kind(part))


def _kind(part: ImagePart | VideoPart) -> MediaKind:
    return "image" if isinstance(part, ImagePart) else "video"


def _references(messages: Sequence[Message]) -> Iterator[MediaReference]:
    parts = (
        part
        for message in messages
        if isinstance(message, UserMessage) and not isinstance(message.content, str)
        for part in message.content
    )
    media = (part for part in parts if not isinstance(part, TextPart))
    for number, part in enumerate(media, start=1):
        kind = _kind(part)
        url = part.image_url.url if isinstance(part, ImagePart) else part.video_url.url
        yield MediaReference(kind, url, f"{kind}, number {number} of the media")
