"""Decoding with drafts and without: tokens per pass, and tokens per second, by who drafts.

    python -m benchmarks.drafting [--repeats N] [--no-save]

records   JSON of 60 like records, held to a schema, so the text repeats itself: greedy, and drawn at 0.7
answers   what shapes-vl answers about a drawn image, to its natural end

One and eight requests at once, in one process, with shapes-vl. Seconds are those of decoding, from the first
tokens to the last. Methods take turns, and ratios are medians of those within a repeat; every repeat checks
that tokens are those without drafts. Each method has an engine that lives through all repeats, as a server's.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from PIL import Image

from benchmarks.reporting import Row, Section, median_ratio, run_sections, setting
from benchmarks.structured import LONG_DOCUMENTS
from encoders.prompt.chat import one_turn
from epd.cli.options import draft_config
from epd.kv.drafting import DEFAULT_MAX_DRAFT, DRAFT_METHODS
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.shapes import SceneRenderer, make_questions, make_scene
from stages.colocated import ColocatedPipeline, MediaContext
from stages.grammar.formats import format_of, grammar_text

_COUNTS = (1, 8)
_RECORD_TOKENS = 160
_NUM_ANSWERS = 24  # one after the other, or in as many rounds as requests at once allow


@dataclass(slots=True)
class Measured:
    """Holds what one method did in one task, a number for each repeat."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int = 0  # of one request: each pass counts for every request in it


class Contender:
    """Runs one method."""

    def __init__(self, method: str, image: Path) -> None:
        drafting = draft_config(method, DEFAULT_MAX_DRAFT)
        self.pipeline = ColocatedPipeline.load(embedded_model_path(), drafting=drafting, num_kv_tokens=2**15)
        self.contexts = {
            name: self.pipeline.prefill_media(media) for name, media in {"text": [], "image": [image]}.items()
        }

    @torch.inference_mode()
    def decode(
        self, context: MediaContext, asked: Sequence[tuple[str, SamplingParams]], measured: Measured
    ) -> list[list[int]]:
        """Answers all at once, and returns the tokens of each."""
        engine, seconds = self.pipeline.engine, 0.0
        kinds = [plan.kind for plan in context.plans]
        tokens: dict[str, list[int]] = {}
        for number, (question, sampling) in enumerate(asked):
            name = f"r{number}"
            messages = one_turn(kinds, question)
            engine.add(context.prefix.question(name, messages, sampling, seed=number))
            tokens[name] = []
        while engine.has_work():
            is_decoding = all(tokens.values())
            start_s = time.perf_counter()
            outputs = engine.step().outputs
            if is_decoding:
                seconds += time.perf_counter() - start_s
                measured.num_tokens += len(outputs)
                measured.num_passes += len({output.request_id for output in outputs})
            for output in outputs:
                tokens[output.request_id].append(output.token.token_id)
        measured.seconds[-1] += seconds
        return list(tokens.values())


def _records(temperature: float) -> list[tuple[str, SamplingParams]]:
    schema = json.dumps(LONG_DOCUMENTS["records"])
    grammar = grammar_text(format_of("json_schema", json.loads(schema), None))
    sampling = SamplingParams(max_tokens=_RECORD_TOKENS, temperature=temperature, grammar=grammar)
    return [(f"Give an example, number {number}.", replace(sampling)) for number in range(max(_COUNTS))]


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
            order = (
                list(contenders)[repeat % len(contenders) :] + list(contenders)[: repeat % len(contenders)]
            )
            tokens = {}
            for method in order:
                measured[method].seconds.append(0.0)
                contender = contenders[method]
                tokens[method] = [
                    contender.decode(contender.contexts[place], each, measured[method]) for each in rounds
                ]
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
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "scene.png"
        Image.fromarray(SceneRenderer(make_scene(3, 10.0), 224, 224).frame(5.0)).save(image)
        contenders = {method: Contender(method, image) for method in DRAFT_METHODS}
    sections = {
        "greedy": Section("Records, greedy", lambda: rows(contenders, "text", _records(0.0), args.repeats)),
        "drawn": Section(
            "Records, drawn at 0.7", lambda: rows(contenders, "text", _records(0.7), args.repeats)
        ),
        "answers": Section(
            "Answers of shapes-vl", lambda: rows(contenders, "image", _questions(3), args.repeats)
        ),
    }
    run_sections(
        "drafting",
        "Decoding with drafts",
        sections,
        list(sections),
        lambda: setting(["torch", "llguidance"], max_draft=DEFAULT_MAX_DRAFT),
        save=not args.no_save,
    )


if __name__ == "__main__":
    main()
