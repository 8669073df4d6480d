"""Plans one question of each kind that a model takes, so that a folder is refused before it is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from epd.chat import ChatMessage, ContentPart, text_message
from epd.encoders.adapter import Adapter, MediaPlan, VideoFacts
from epd.errors import ModelError, RequestError, UnsupportedMediaError
from epd.frame_sampling import FrameSampling

_SIDE = 224  # pixels
_QUESTION = text_message("user", "What?")
_TOOL = (
    '{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}'
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Holds a kind of question that the chat template of a model fails for. reason: in one line."""

    kind: str
    reason: str


def refused_kinds(adapter: Adapter) -> tuple[Refusal, ...]:
    """Lists the kinds of questions that every request is refused for. Takes milliseconds.

    Raises ModelError if not even a text can be asked.
    """
    refused = tuple(_refused(adapter))
    if refused and refused[0].kind == "texts":
        raise ModelError(f"no question can be asked: {refused[0].reason}; get another chat_template.jinja")
    return refused


def _refused(adapter: Adapter) -> Iterator[Refusal]:
    def image() -> MediaPlan:
        return adapter.plan_image(_SIDE, _SIDE)

    def video() -> MediaPlan:
        return adapter.plan_video(VideoFacts(4, 2.0, _SIDE, _SIDE), FrameSampling(num_frames=4))

    def audio() -> MediaPlan:
        return adapter.plan_audio(adapter.audio.rate)

    trials: list[tuple[str, list[Callable[[], MediaPlan]], ChatMessage | None]] = [
        ("texts", [], None),
        ("images", [image], None),
        ("several images", [image, image], None),
        ("videos", [video], None),
        ("audio", [audio], None),
        ("messages of the system", [], text_message("system", "Be kind.")),
        ("tools", [], text_message("tools", _TOOL)),
    ]
    for kind, plans, first in trials:
        try:
            media = [plan() for plan in plans]
            parts = (*(ContentPart(plan.kind) for plan in media), *_QUESTION.parts)
            adapter.plan_chat(media, (*([first] if first else []), ChatMessage("user", parts)))
        except UnsupportedMediaError:  # the model takes none
            continue
        except RequestError as error:
            yield Refusal(kind, str(error))
