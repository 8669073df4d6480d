"""Decoding with drafts and without: tokens per pass, and tokens per second, by who drafts.

    python -m benchmarks.engine.drafting [--only SECTION ...] [--draft METHOD ...] [--repeats N] [--no-save]
    python -m benchmarks.engine.drafting --only stories --model shapes-vl-2 --no-save

records   JSON of 60 like records, held to a schema, so the text repeats itself: greedy, and drawn at 0.7
text      a long JSON string drawn at 1.0, which does not repeat itself
answers   what shapes-vl answers about a drawn image, to its natural end
stories   descriptions of drawn videos of 32 frames, in sentences and as JSON in turn, by a model that tells

1, 8 and 32 requests at once, in one process, with shapes-vl. Seconds are CPU time of the thread that decodes,
from the first tokens to the last: other processes do not count. Methods take turns after each round of
requests, and ratios are medians of those within a repeat; every repeat checks that tokens are those without
drafts. What a method has learnt lives through all sections and repeats, as a server's. Model, engine and
caches are the same for all: of two that are alike, the one loaded later was up to 7 % slower.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from benchmarks.reporting import Row, Section, median_ratio, run_sections, setting
from benchmarks.serving.structured import LONG_DOCUMENTS
from epd.engine_config import EngineConfig
from epd.eval.plan import HELD_OUT_SEED
from epd.kv.drafting import DEFAULT_MAX_DRAFT, DRAFT_METHODS, DraftConfig, Drafting
from epd.models import DEFAULT_MODEL, model_folder
from epd.sampling_params import SamplingParams
from epd.shapes import SceneRenderer, make_questions, make_scene
from epd.stages.grammar.formats import format_of, grammar_text
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline, MediaContext

# The embedded model has no head of its own for drafts.
_METHODS = tuple(method for method in DRAFT_METHODS if method != "mtp")
_COUNTS = (1, 8, 32)
_DOCUMENT_TOKENS = 160
_NUM_ANSWERS = 32  # one after the other, or in as many rounds as requests at once allow
# Videos that are described in each repeat, in two ways.
_NUM_VIDEOS, _NUM_FRAMES, _STORY_TOKENS = 16, 32, 256


@dataclass(frozen=True, slots=True)
class Asked:
    """One question. place: what it is about."""

    place: str
    text: str
    sampling: SamplingParams


@dataclass(slots=True)
class Measured:
    """Holds what one method did in one task, a number for each repeat."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int = 0  # of one request: each pass counts for every request in it


class Contender:
    """Runs one method with the pipeline that all share."""

    def __init__(
        self, method: str, pipeline: ColocatedPipeline, contexts: Mapping[str, MediaContext]
    ) -> None:
        self.pipeline, self.contexts = pipeline, contexts
        config = DraftConfig(method, DEFAULT_MAX_DRAFT)
        self._drafting = None if method == "none" else Drafting(config, len(pipeline.adapter.tokenizer))

    @torch.inference_mode()
    def decode(self, asked: Sequence[Asked], measured: Measured) -> list[list[int]]:
        """Answers all at once, and returns the tokens of each."""
        engine, seconds = self.pipeline.engine, 0.0
        engine._drafting = engine._maker.drafting = self._drafting
        tokens: dict[str, list[int]] = {}
        for number, each in enumerate(asked):
            name, context = f"r{number}", self.contexts[each.place]
            request = context.question(name, each.text, max_tokens=None)
            engine.add(replace(request, sampling=each.sampling, seed=number))
            tokens[name] = []
        while engine.has_work():
            is_decoding = all(tokens.values())
            start_s = time.thread_time()
            outputs = engine.step().outputs
            if is_decoding:
                seconds += time.thread_time() - start_s
                measured.num_tokens += len(outputs)
                measured.num_passes += len({output.request_id for output in outputs})
            for output in outputs:
                tokens[output.request_id].append(output.token.token_id)
        measured.seconds[-1] += seconds
        return list(tokens.values())


def _documents(name: str, temperature: float, _repeat: int) -> list[Asked]:
    schema = json.dumps(LONG_DOCUMENTS[name])
    grammar = grammar_text(format_of("json_schema", json.loads(schema), None))
    sampling = SamplingParams(max_tokens=_DOCUMENT_TOKENS, temperature=temperature, grammar=grammar)
    return [
        Asked("text", f"Give an example, number {number}.", replace(sampling))
        for number in range(max(_COUNTS))
    ]


def _questions(seed: int, _repeat: int) -> list[Asked]:
    asked = make_questions(make_scene(seed, 10.0), random.Random(seed))
    texts = [asked[number % len(asked)].text for number in range(_NUM_ANSWERS)]
    return [Asked("image", text, SamplingParams(max_tokens=64)) for text in texts]


def _stories(repeat: int) -> list[Asked]:
    """Asks for sentences and JSON in turn, about videos that nobody has been asked about before."""
    return [
        Asked(f"video {number}", text, SamplingParams(max_tokens=_STORY_TOKENS))
        for number in range(repeat * _NUM_VIDEOS, (repeat + 1) * _NUM_VIDEOS)
        for text in ("Describe the video.", "Describe the video as JSON.")
    ]


# By name: title, and what is asked in each repeat.
_SECTIONS: dict[str, tuple[str, Callable[[int], list[Asked]]]] = {
    "greedy": ("Records, greedy", partial(_documents, "records", 0.0)),
    "drawn": ("Records, drawn at 0.7", partial(_documents, "records", 0.7)),
    "text": ("Text, drawn at 1.0", partial(_documents, "text", 1.0)),
    "answers": ("Answers of shapes-vl", partial(_questions, 3)),
    "stories": ("Descriptions of videos by shapes-vl-2", _stories),
}
# The embedded model tells nothing.
_USUAL = tuple(_SECTIONS)[:4]


def _prefilled(pipeline: ColocatedPipeline, folder: Path, num_videos: int) -> dict[str, MediaContext]:
    """Returns what can be asked about: no medium, a drawn image, and drawn videos."""
    image = folder / "scene.png"
    Image.fromarray(SceneRenderer(make_scene(3, 10.0), 224, 224).frame(5.0)).save(image)
    contexts = {"text": pipeline.prefill_media([]), "image": pipeline.prefill_media([image])}
    for number in range(num_videos):
        path, scene = folder / f"{number}.mp4", make_scene(HELD_OUT_SEED + number, float(_NUM_FRAMES))
        write_demo_video(path, scene, fps=4, height=360, width=640)
        contexts[f"video {number}"] = pipeline.prefill_media([path], num_frames=_NUM_FRAMES)
    return contexts


def rows(contenders: Mapping[str, Contender], asked: Callable[[int], list[Asked]], repeats: int) -> list[Row]:
    """Measures all methods in turns, after one repeat that is not counted. asked: for each repeat."""
    found = []
    for count in [each for each in _COUNTS if each <= len(asked(0))]:
        measured = {method: Measured() for method in contenders}
        for repeat in range(repeats + 1):
            for each in measured.values():
                each.seconds.append(0.0)
            for number, questions in enumerate(_rounds(asked(repeat), count)):
                first = (repeat + number) % len(contenders)
                tokens = {
                    method: contenders[method].decode(questions, measured[method])
                    for method in (list(contenders) * 2)[first : first + len(contenders)]
                }
                assert all(each == tokens["none"] for each in tokens.values()), "drafts have changed tokens"
            if repeat == 0:
                measured = {method: Measured() for method in contenders}
        found += [_row(count, method, each, measured["none"]) for method, each in measured.items()]
    return found


def _rounds(asked: Sequence[Asked], count: int) -> list[Sequence[Asked]]:
    """Returns what is asked at once; of documents, which are all alike, one round."""
    size = count if asked[0].place == "text" else len(asked)
    return [asked[at : at + count] for at in range(0, size, count)]


def _row(count: int, method: str, measured: Measured, plain: Measured) -> Row:
    repeats = len(measured.seconds)
    return {
        "requests": count,
        "draft": method,
        "tokens per pass": round(measured.num_tokens / measured.num_passes, 2),
        "tokens/s": round(measured.num_tokens / sum(measured.seconds)),
        "speed over none": round(median_ratio(plain.seconds, measured.seconds), 3),
        "least": round(min(a / b for a, b in zip(plain.seconds, measured.seconds, strict=True)), 3),
        "tokens": measured.num_tokens // repeats,
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=list(_USUAL), choices=_SECTIONS)
    parser.add_argument(
        "--draft", nargs="*", default=[], choices=_METHODS, help="beside none; by default all"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder or embedded model")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    pipeline = ColocatedPipeline.load(model_folder(args.model), EngineConfig(num_kv_tokens=2**15))
    num_videos = _NUM_VIDEOS * (args.repeats + 1) if "stories" in args.only else 0
    with tempfile.TemporaryDirectory() as folder:
        contexts = _prefilled(pipeline, Path(folder), num_videos)
    wanted = dict.fromkeys(["none", *(args.draft or _METHODS)])
    contenders = {method: Contender(method, pipeline, contexts) for method in wanted}
    sections = {
        name: Section(title, partial(rows, contenders, asked, args.repeats))
        for name, (title, asked) in _SECTIONS.items()
    }
    run_sections(
        "drafting",
        "Decoding with drafts",
        sections,
        args.only,
        lambda: setting(["torch", "llguidance"], max_draft=DEFAULT_MAX_DRAFT),
        save=not args.no_save,
    )


if __name__ == "__main__":
    main()
