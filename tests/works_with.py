"""The features of docs/works-with.md: each as options of a server or fields of a question, and pairs tried.

`python -m tests.works_with` tries every pair and prints what each gave; with the name of a feature its pairs,
with several names these features together.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from epd import LLM
from epd.control.retention import RetentionConfig
from epd.errors import EPDError
from epd.models import model_folder
from epd.serve_app.app_args import AppArgs
from epd.serve_app.local.own_service import OwnService, own_service
from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video
from tests.encoders.tiny_gemma import build_gemma3
from tests.media import draw_frames
from tests.models import lora, quantized, shrunk
from tests.tiny_models import add_head, build_qwen3_5

_MODEL = "shapes-vl-2"
_IMAGES_ALONE = "gemma3"  # is asked about an image, since it takes no videos
_QUESTION = "Describe the video."
_FIELDS = {"max_tokens": 40, "temperature": 0}
# With more that wait for room, retention by load keeps fewer tokens.
_AT_ONCE = RetentionConfig(slo_ttft_s=1.0).max_waiting
_SCHEMA = {
    "type": "object",
    "properties": {"shape": {"type": "string", "maxLength": 4}},
    "required": ["shape"],
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "shape", "schema": _SCHEMA}}


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """Names a feature as the page does, and says how to ask for it.

    options: of `epd serve`
    fields: of a request
    checkpoint: a random model to build, in place of the embedded one
    has_adapter: whether an adapter is drawn for the model, and asked
    changes_answers: whether an answer may differ from one without the feature
    is_asked_alone: whether a question beside others in a pass may get other tokens
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    has_adapter: bool = False
    changes_answers: bool = False
    is_asked_alone: bool = False

    @property
    def is_of_server(self) -> bool:
        """Returns whether a server starts with it; else one server has questions with and without it."""
        return bool(self.options or self.checkpoint or self.has_adapter)

    @property
    def of_request(self) -> Feature:
        """Returns the same, asked for by questions where they can."""
        return (
            replace(self, options={}, fields={"epd": self.options}) if "reduction" in self.options else self
        )


Features = tuple[Feature, ...]
Token = tuple[str, bytes]


def _reduction(method: str) -> Feature:
    return Feature(method, {"reduction": method, "retention": 0.5}, changes_answers=True)


def _model(name: str, checkpoint: str) -> Feature:
    return Feature(name, checkpoint=checkpoint, changes_answers=True)


FEATURES = (
    Feature("tensor parallelism", {"tensor_parallel_size": 2}),
    Feature("split stages", {"topology": "1e1p1d"}),
    Feature("several encoders", {"topology": "2e1pd"}),
    Feature("role switching", {"topology": "2e1pd", "elastic": True}),
    Feature(
        "classes of workers",
        {"topology": "2e1pd", "worker_classes": ["small=roles:e,count:1,device:cpu"]},
    ),
    Feature("drafts", {"draft": "recycling"}),
    Feature("asynchronous scheduling", {"async_scheduling": True}),
    Feature("retention by load", {"retention_min": 0.25, "slo_ttft_s": 600.0}),
    Feature("static frames skipped", {"skip_static": 0.0}),
    Feature("merging in the tower", {"tower_share": 0.5}, changes_answers=True),
    Feature("values in 8 bits", {"kv_cache_dtype": "int8_values"}, changes_answers=True),
    Feature("layers in FP8", {"quantization": "fp8"}, changes_answers=True, is_asked_alone=True),
    *map(_reduction, ("balanced", "evs", "funnel", "mustdrop", "quickprefill", "fastkv")),
    _model("FP8 weights", "fp8"),
    _model("AWQ weights", "awq"),
    _model("experts", "InternVL3.5-30B-A3B"),
    _model("experts in FP8", "fp8-packed"),
    _model("recurrent states", "qwen3_5"),
    Feature("keys and values on disk", {"cache_dir": Path("kept")}),
    Feature("an object store", {"cache_dir": Path("kept"), "cache_objects": "objects"}),
    _model("sliding windows", _IMAGES_ALONE),
    Feature("drafts by a head", {"draft": "mtp"}, checkpoint="headed", changes_answers=True),
    Feature("parsers", {"reasoning_parser": "qwen3", "tool_call_parser": "qwen3_coder"}),
    Feature("LoRA adapters", has_adapter=True, changes_answers=True),
    Feature("a schema", fields={"response_format": _FORMAT}, changes_answers=True),
    Feature("several choices", fields={"n": 2}),
    Feature("logprobs", fields={"logprobs": True, "top_logprobs": 2}),
)
# Asked for besides, where `Given.distance` is to be known.
LIKELIHOODS = Feature("likelihoods", fields={"logprobs": True, "top_logprobs": 20}, changes_answers=True)


def together(count: int) -> Iterator[Features]:
    """Yields so many features that can be asked for at once: each two of them can."""
    for features in combinations(FEATURES, count):
        if all(_can_be_asked(*pair) for pair in combinations(features, 2)):
            yield features


def by_server(drawn: Iterable[Features]) -> dict[Features, list[Features]]:
    """Groups what questions to one server can have together: the server's own features, and all of each."""
    groups: dict[Features, list[Features]] = defaultdict(list)
    for features in drawn:
        asked = tuple(each.of_request for each in features)
        groups[tuple(each for each in asked if each.is_of_server)].append(asked)
    return groups


def _can_be_asked(one: Feature, other: Feature) -> bool:
    """An option has one value, and a server one model."""
    clash = any(other.options.get(name, value) != value for name, value in one.options.items())
    return not clash and not (one.checkpoint and other.checkpoint)


@dataclass(frozen=True, slots=True)
class Given:
    """Holds the texts of an answer's choices, or the error in their place.

    steps: of the first choice each token and the logarithms of the likeliest ones' likelihoods, if asked for
    """

    texts: frozenset[str] = frozenset()
    refusal: str = ""
    steps: tuple[tuple[Token, Mapping[Token, float]], ...] = field(default=(), compare=False)

    def distance(self, other: Given) -> float:
        """Returns by how much the logarithms of tokens' likelihoods differ, at most; infinity without any.

        The last tokens that are compared are the first ones that differ: what follows has another beginning.
        """
        found = [] if self.steps and other.steps else [math.inf]
        for (token, ours), (another, theirs) in zip(self.steps, other.steps, strict=False):
            found += [
                abs(ours.get(each, -math.inf) - theirs.get(each, math.inf)) for each in (token, another)
            ]
            if token != another:
                break
        return max(found)


class Trials:
    """Asks one question about one video or image of servers with drawn features.

    folder: for files that it writes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clip = folder / "clip.mp4"
        write_demo_video(self._clip, make_scene(5, 6.0), fps=4, height=120, width=160)
        self._image = folder / "image.png"
        Image.fromarray(next(draw_frames(1, 120, 160, seed=1))).save(self._image)
        self._given: dict[tuple[str, ...], Given] = {}

    def expected(self, features: Iterable[Feature]) -> Given:
        """Returns what those of the features give that change answers, without the others."""
        return self.given([each for each in features if each.changes_answers])

    def given(self, features: Sequence[Feature]) -> Given:
        names = _names(features)
        if names not in self._given:
            self._given[names] = self._ask(features)
        return self._given[names]

    def ask_at_once(self, server: Features, asked: Iterable[Features]) -> None:
        """Asks one server of this process all that is not known yet, as `given` returns it from then on."""
        new = {_names(each): each for each in asked if _names(each) not in self._given}
        if not new:
            return
        model, options = self._server(server)
        args = AppArgs(**{"topology": "1epd", "model": model, "allowed_media_path": Path("/"), **options})
        num_at_once = 1 if any(each.is_asked_alone for each in server) else _AT_ONCE
        bodies = [self._body(each) for each in new.values()]
        with own_service(args, is_greedy=False) as service:
            answers = asyncio.run(_gathered(service, bodies, num_at_once))
        self._given |= zip(new, answers, strict=True)

    def _ask(self, features: Sequence[Feature]) -> Given:
        model, options = self._server(features)
        body = self._body(features)
        try:
            with LLM(model, **options) as llm:
                return _texts(llm.chat(**body))
        except EPDError as error:
            return Given(refusal=str(error))

    def _server(self, features: Sequence[Feature]) -> tuple[Path | str, dict[str, Any]]:
        """Returns the model of a server, and its options."""
        options = {name: value for each in features for name, value in each.options.items()}
        if "cache_dir" in options:  # one for all servers: none may find what another's features changed
            options["cache_dir"] = self._folder / options["cache_dir"]
        if "cache_objects" in options:
            options["cache_objects"] = f"file://{self._folder / options['cache_objects']}"
        model = next((self._built(each.checkpoint) for each in features if each.checkpoint), _MODEL)
        if any(each.has_adapter for each in features):
            options["lora_modules"] = [f"drawn={self._adapter(model)}"]
        return model, {"num_threads": 1, "num_kv_tokens": 4096, **options}

    def _body(self, features: Sequence[Feature]) -> dict[str, Any]:
        has_image = any(each.checkpoint == _IMAGES_ALONE for each in features)
        kind, path = ("image_url", self._image) if has_image else ("video_url", self._clip)
        medium = {"type": kind, kind: {"url": path.as_uri()}}
        fields = {name: value for each in features for name, value in each.fields.items()}
        if any(each.has_adapter for each in features):
            fields["model"] = "drawn"
        content = [medium, {"type": "text", "text": _QUESTION}]
        return {"messages": [{"role": "user", "content": content}], **_FIELDS, **fields}

    def _adapter(self, model: Path | str) -> Path:
        """Draws an adapter of a model, for the values that it has when it is not quantised."""
        base = model_folder(None) if isinstance(model, str) else model
        base = base.parent / "plain" if base.name == "quantized" else base
        folder = self._folder / f"lora-{base.parent.name}-{base.name}"
        if not folder.exists():
            folder.mkdir()
            lora.draw(base, folder, seed=1, strength=8.0)
        return folder / "adapter-1"

    def _built(self, checkpoint: str) -> Path:
        folder = self._folder / checkpoint
        if checkpoint == "headed":
            return folder if folder.exists() else add_head(build_qwen3_5(folder))
        if checkpoint == "qwen3_5":
            return folder if folder.exists() else build_qwen3_5(folder)
        if checkpoint == _IMAGES_ALONE:
            return folder if folder.exists() else build_gemma3(folder)
        layouts = quantized.LAYOUTS if checkpoint in quantized.LAYOUTS else quantized.EXPERT_LAYOUTS
        if checkpoint not in layouts:
            return folder if folder.exists() else shrunk.build(checkpoint, folder)
        if not folder.exists():
            quantized.build(checkpoint, folder, layouts)
        return folder / "quantized"


def _names(features: Iterable[Feature]) -> tuple[str, ...]:
    return tuple(each.name for each in features)


def _texts(completion: Mapping[str, Any]) -> Given:
    choices = completion["choices"]
    told = (choices[0].get("logprobs") or {}).get("content", ())
    likely = ({_token(each): each["logprob"] for each in (step, *step["top_logprobs"])} for step in told)
    steps = zip(map(_token, told), likely, strict=True)
    return Given(frozenset(choice["message"]["content"] for choice in choices), steps=tuple(steps))


def _token(told: Mapping[str, Any]) -> Token:
    """Returns a token's text and bytes: parts of characters have all the same text, and others no bytes."""
    return told["token"], bytes(told["bytes"] or ())


async def _gathered(service: OwnService, bodies: Iterable[dict[str, Any]], num_at_once: int) -> list[Given]:
    """Returns the answers to questions, of which so many are asked at once."""

    room = asyncio.Semaphore(num_at_once)

    async def answer(body: dict[str, Any]) -> Given:
        async with room:
            try:
                return _texts(await service.completion({"model": service.model, **body}))
            except EPDError as error:
                return Given(refusal=str(error))

    return await asyncio.gather(*map(answer, bodies))


def _verdict(trials: Trials, features: Sequence[Feature]) -> str:
    given, expected = trials.given(features), trials.expected(features)
    if given.refusal:
        return f"refused: {given.refusal}"
    return "works" if given == expected else f"WRONG: {sorted(given.texts)} for {sorted(expected.texts)}"


def main() -> None:
    with TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        wanted = set(sys.argv[1:])
        for features in together(max(2, len(wanted))):
            names = [each.name for each in features]
            if not wanted or (wanted & set(names) if len(wanted) < 2 else wanted == set(names)):
                print(f"{' + '.join(names)}: {_verdict(trials, features)}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
