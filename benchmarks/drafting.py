"""Decoding with drafts and without: tokens per pass, and tokens per second, by who drafts.

    python -m benchmarks.drafting [--only SECTION ...] [--draft METHOD ...] [--repeats N] [--no-save]

records   JSON of 60 like records, held to a schema, so the text repeats itself: greedy, and drawn at 0.7
text      a long JSON string drawn at 1.0, which does not repeat itself
answers   what shapes-vl answers about a drawn image, to its natural end

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from benchmarks.reporting import Row, Section, median_ratio, run_sections, setting
from benchmarks.structured import LONG_DOCUMENTS
from encoders.prompt.chat import one_turn
from epd.cli.options import draft_config
from epd.kv.drafting import DEFAULT_MAX_DRAFT, DRAFT_METHODS, Drafting
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.shapes import SceneRenderer, make_questions, make_scene
from stages.colocated import ColocatedPipeline, MediaContext
from stages.grammar.formats import format_of, grammar_text

_COUNTS = (1, 8, 32)
_DOCUMENT_TOKENS = 160
_NUM_ANSWERS = 32  # one after the other, or in as many rounds as requests at once allow


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
        config = draft_config(method, DEFAULT_MAX_DRAFT)
        self._drafting = None if method == "none" else Drafting(config, len(pipeline.adapter.tokenizer))

    @torch.inference_mode()
    def decode(
        self, context: MediaContext, asked: Sequence[tuple[str, SamplingParams]], measured: Measured
    ) -> list[list[int]]:
        """Answers all at once, and returns the tokens of each."""
        engine, seconds = self.pipeline.engine, 0.0
        engine._drafting = self._drafting
        kinds = [plan.kind for plan in context.plans]
        tokens: dict[str, list[int]] = {}
        for number, (question, sampling) in enumerate(asked):
            name = f"r{number}"
            messages = one_turn(kinds, question)
            engine.add(context.prefix.question(name, messages, sampling, seed=number))
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


def _documents(name: str, temperature: float) -> list[tuple[str, SamplingParams]]:
    schema = json.dumps(LONG_DOCUMENTS[name])
    grammar = grammar_text(format_of("json_schema", json.loads(schema), None))
    sampling = SamplingParams(max_tokens=_DOCUMENT_TOKENS, temperature=temperature, grammar=grammar)
    return [(f"Give an example, number {number}.", replace(sampling)) for number in range(max(_COUNTS))]


_SECTIONS = ("greedy", "drawn", "text", "answers")


def _sections() -> dict[str, tuple[str, str, list[tuple[str, SamplingParams]]]]:
    """Returns title, media and questions of each section."""
    found = (
        ("Records, greedy", "text", _documents("records", 0.0)),
        ("Records, drawn at 0.7", "text", _documents("records", 0.7)),
        ("Text, drawn at 1.0", "text", _documents("text", 1.0)),
        ("Answers of shapes-vl", "image", _questions(3)),
    )
    return dict(zip(_SECTIONS, found, strict=True))


def _questions(seed: int) -> list[tuple[str, SamplingParams]]:
    asked = make_questions(make_scene(seed, 10.0), random.Random(seed))
    texts = [asked[number % len(asked)].text for number in range(_NUM_ANSWERS)]
    return [(text, SamplingParams(max_tokens=64)) for text in texts]


def rows(
    contenders: Mapping[str, Contender], place: str, asked: Sequence[tuple[str, SamplingParams]], repeats: int
) -> list[Row]:
    """Measures all methods in turns, after one repeat that is not counted."""
    found = []
    for count in _COUNTS:
        rounds = [asked[at : at + count] for at in range(0, len(asked) if place == "image" else count, count)]
        measured = {method: Measured() for method in contenders}
        for repeat in range(repeats + 1):
            for each in measured.values():
                each.seconds.append(0.0)
            for number, questions in enumerate(rounds):
                first = (repeat + number) % len(contenders)
                tokens = {
                    method: contenders[method].decode(
                        contenders[method].contexts[place], questions, measured[method]
                    )
                    for method in (list(contenders) * 2)[first : first + len(contenders)]
                }
                assert all(each == tokens["none"] for each in tokens.values()), "drafts have changed tokens"
            if repeat == 0:
                measured = {method: Measured() for method in contenders}
        found += [_row(count, method, each, measured["none"]) for method, each in measured.items()]
    return found


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
    parser.add_argument("--only", nargs="*", default=list(_SECTIONS), choices=_SECTIONS)
    parser.add_argument(
        "--draft", nargs="*", default=[], choices=DRAFT_METHODS, help="beside none; by default all"
    )
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "scene.png"
        Image.fromarray(SceneRenderer(make_scene(3, 10.0), 224, 224).frame(5.0)).save(image)
        pipeline = ColocatedPipeline.load(embedded_model_path(), num_kv_tokens=2**15)
        contexts = {"text": pipeline.prefill_media([]), "image": pipeline.prefill_media([image])}
        wanted = dict.fromkeys(["none", *(args.draft or DRAFT_METHODS)])
        contenders = {method: Contender(method, pipeline, contexts) for method in wanted}
    sections = {
        name: Section(title, partial(rows, contenders, place, asked, args.repeats))
        for name, (title, place, asked) in _sections().items()
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
