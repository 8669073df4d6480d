"""Opens a model folder with the adapter of its family, and refuses one that cannot be served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from epd.chat import ChatMessage, ContentPart, text_message
from epd.encoders.adapter import Adapter
from epd.encoders.checkpoint import Checkpoint, open_checkpoint, read_model_type
from epd.encoders.plans import MediaPlan, VideoFacts
from epd.encoders.prompt.prompt import PositionLayout
from epd.errors import ModelError, RequestError, UnsupportedMediaError, UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.models.families import FAMILIES, REFUSED
from epd.pixel_settings import AUTHORS_LIMITS, ModelImpl, PixelSettings

_SIDE = 224  # pixels
_QUESTION = text_message("user", "What?")
_TOOL = (
    '{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}'
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Family:
    """Creates adapters of a class whose module, and with it transformers', is imported when one is created.

    name: "module of the families: class"
    """

    name: str

    def __call__(self, checkpoint: Checkpoint) -> Adapter:
        module, _, adapter = self.name.partition(":")
        created: Adapter = getattr(import_module(f"epd.encoders.families.{module}"), adapter)(checkpoint)
        return created


ADAPTERS: dict[str, Callable[[Checkpoint], Adapter]] = {
    "ernie4_5_vl_moe": _Family("ernie4_5_vl:Ernie4_5VLAdapter"),
    "gemma3": _Family("gemma3:Gemma3Adapter"),
    "gemma4": _Family("gemma4:Gemma4Adapter"),
    "glm46v": _Family("glm4v:Glm4vAdapter"),
    "glm4v": _Family("glm4v:Glm4vAdapter"),
    "glm4v_moe": _Family("glm4v:Glm4vAdapter"),
    "glm_ocr": _Family("glm4v:Glm4vAdapter"),
    "internvl": _Family("internvl:InternVLAdapter"),
    "llava_onevision": _Family("llava_onevision:LlavaOnevisionAdapter"),
    "minicpmv4_6": _Family("minicpmv:MiniCPMVAdapter"),
    "minicpmv4_7": _Family("minicpmv:MiniCPMVAdapter"),
    "qwen2_5_vl": _Family("qwen2_5_vl:Qwen2_5VLAdapter"),
    "qwen2_audio": _Family("qwen2_audio:Qwen2AudioAdapter"),
    "qwen2_vl": _Family("qwen2_5_vl:Qwen2VLAdapter"),
    "qwen3_5": _Family("qwen3_vl:Qwen3VLAdapter"),
    "qwen3_5_moe": _Family("qwen3_vl:Qwen3VLAdapter"),
    "qwen3_vl": _Family("qwen3_vl:Qwen3VLAdapter"),
    "qwen3_vl_moe": _Family("qwen3_vl:Qwen3VLAdapter"),
    "smolvlm": _Family("smolvlm:SmolVLMAdapter"),
    "video_llama_3": _Family("video_llama_3:VideoLlama3Adapter"),
}


_GENERIC = _Family("generic:GenericAdapter")
# Of families that transformers' code serves, those that differ in their prompts.
_GENERIC_OF = {"molmo2": _Family("molmo2:Molmo2Adapter")}


def load_adapter(
    path: str | Path, *, positions: PositionLayout | None = None, pixels: PixelSettings = AUTHORS_LIMITS
) -> Adapter:
    """Opens the model folder at `path` without its weights.

    positions: where text after a video is, for models with M-RoPE; by default as its config.json says in
    `position_layout`, and as the authors of Qwen2.5-VL place it when that is not there (docs/decisions/0009).
    pixels: of images and frames; by default as the model's authors have them.
    Raises ModelNotFoundError, UnsupportedModelError naming what is supported, ModelError for a broken folder,
    RequestError for pixels that change nothing for the family.
    """
    folder = Path(path)
    model_type = read_model_type(folder)
    adapter_of = _adapter_of(folder, model_type, pixels.model_impl)
    pixels.check_family(model_type)
    checkpoint = open_checkpoint(folder, pixels)
    if positions is not None:
        checkpoint.config.position_layout = positions
    adapter = adapter_of(checkpoint)
    for refusal in refused_kinds(adapter):
        logger.warning("'%s' takes no %s: %s", folder.name, refusal.kind, refusal.reason)
    return adapter


def _adapter_of(folder: Path, model_type: str, impl: ModelImpl) -> Callable[[Checkpoint], Adapter]:
    """Returns what adapts a family. Raises UnsupportedModelError for one that nothing adapts."""
    if model_type in REFUSED:
        raise UnsupportedModelError(
            f"'{folder}' is a '{model_type}' model, {REFUSED[model_type]}, which is not computed here; "
            "use a checkpoint of another family: epd models lists them"
        )
    if model_type in ADAPTERS and impl != "transformers":
        return ADAPTERS[model_type]
    if impl == "transformers" or (impl == "auto" and model_type in FAMILIES):
        return _GENERIC_OF.get(model_type, _GENERIC)
    supported = ", ".join(FAMILIES if impl == "auto" else ADAPTERS)
    raise UnsupportedModelError(
        f"'{folder}' is a '{model_type}' model; supported model types: {supported}; to try another with "
        "transformers' own processor and tower, add --model-impl transformers, and check it by epd verify"
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
