"""Measures what a checkpoint tells about held-out scenes, fact by fact, through the whole pipeline.

    python -m training.evaluate_stories --model runs/shapes-vl-2 --videos 50 --frames 32 128

Descriptions and JSON are compared with the scene; a JSON answer is valid if SCENE_SCHEMA admits it. All other
kinds of more than one word are right or wrong, times within two frames' gap.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema

from epd.engine_config import EngineConfig
from epd.eval.rows import wilson_interval
from epd.models import embedded_model_path, model_folder
from epd.shapes import Question, QuestionKind, Scene, make_scene
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline
from tests.conversations import dialogue
from training.clip_questions import ask_which_clip
from training.clips import HELD_OUT_SEED
from training.evaluate import LENGTHS, write_into_card
from training.stories import SCENE_SCHEMA, TOLD_KINDS, FactCounts, claimed, compare, make_stories

_SOURCE_FPS = 4
_MARGIN_S = 2.0
_MAX_TOKENS = 384
# Frames of each of two videos in one prompt, and questions about both.
_LONGEST_PAIR = 32
_NUM_CLIP_QUESTIONS = 4


@dataclass(frozen=True, slots=True)
class Told:
    """One answer about a video of `num_frames` frames, a second apart."""

    num_frames: int
    scene: Scene
    question: Question
    answer: str

    @property
    def facts(self) -> FactCounts:
        return compare(claimed(self.answer), self.scene, _MARGIN_S)

    @property
    def is_right(self) -> bool:
        """Returns True for the right answer; of JSON, for one that the schema admits."""
        if self.question.kind is not QuestionKind.JSON:
            return self.question.is_answered_by(self.answer)
        try:
            jsonschema.validate(json.loads(self.answer), SCENE_SCHEMA)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True


def tell(pipeline: ColocatedPipeline, num_frames: int, num_videos: int) -> Iterator[Told]:
    """Asks one question of every kind about each of `num_videos` fresh videos of `num_frames` seconds.

    Two neighbours that are not longer than `_LONGEST_PAIR` are asked about together.
    """
    with tempfile.TemporaryDirectory() as folder:
        files: list[tuple[Scene, Path]] = []
        for number in range(num_videos):
            seed = HELD_OUT_SEED + num_frames * 100_000 + number
            scene, path = make_scene(seed, float(num_frames)), Path(folder) / f"{number}.mp4"
            write_demo_video(path, scene, fps=_SOURCE_FPS, height=360, width=640)
            files.append((scene, path))
            asked = make_stories(scene, random.Random(seed), 1.0)
            yield from _told(pipeline, files[-1:], num_frames, asked)
            if number % 2 and num_frames <= _LONGEST_PAIR:
                (first, _), (second, _) = files[-2:]
                rng = random.Random(seed)
                asked = [ask_which_clip(first, second, rng) for _ in range(_NUM_CLIP_QUESTIONS)]
                yield from _told(pipeline, files[-2:], num_frames, asked)


def _told(
    pipeline: ColocatedPipeline, files: list[tuple[Scene, Path]], num_frames: int, asked: list[Question]
) -> Iterator[Told]:
    context = pipeline.prefill_media([path for _, path in files], num_frames=num_frames)
    conversations = [dialogue(context.kinds, each.text, each.earlier) for each in asked]
    answers = pipeline.answer_all(context, conversations, max_tokens=_MAX_TOKENS)
    for question, answer in zip(asked, answers, strict=True):
        yield Told(num_frames, files[-1][0], question, answer.text)


def table(told: list[Told], lengths: list[int]) -> str:
    """Returns Markdown: F1 of facts, then shares with 95 % intervals; a column for each length."""
    groups: dict[tuple[QuestionKind, int], list[Told]] = defaultdict(list)
    for each in told:
        groups[each.question.kind, each.num_frames].append(each)
    rows = [["", *(f"{length} frames" for length in lengths)], ["---"] * (1 + len(lengths))]
    for kind in TOLD_KINDS:
        facts = [sum((each.facts for each in groups[kind, length]), FactCounts()).f1 for length in lengths]
        rows.append([f"F1 of facts, {kind}", *(f"{f1:.3f}" for f1 in facts)])
    for kind in QuestionKind:
        if kind is not QuestionKind.DESCRIBE and any(groups[kind, length] for length in lengths):
            name = "valid JSON" if kind is QuestionKind.JSON else str(kind)
            rows.append([name, *(_share(groups[kind, length]) for length in lengths)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _share(told: list[Told]) -> str:
    right = sum(each.is_right for each in told)
    if not told:
        return "-"
    interval = wilson_interval(right, len(told))
    return f"{right / len(told):.1%} ({interval.low:.0%} to {interval.high:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(embedded_model_path()))
    parser.add_argument("--videos", type=int, default=50, help="videos per length")
    parser.add_argument("--frames", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--card", type=Path, help="model card to write the table into, as `stories`")
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print")
    options = parser.parse_args()
    pipeline = ColocatedPipeline.load(model_folder(options.model), EngineConfig(num_threads=1))
    told = [each for length in options.frames for each in tell(pipeline, length, options.videos)]
    rows = table(told, options.frames)
    print(rows)
    if options.card:
        write_into_card(options.card, rows, "stories")
    wrong = [each for each in told if each.facts.missed if each.question.kind in TOLD_KINDS]
    for each in wrong[: options.wrong]:
        print(
            each.num_frames, each.question.text, each.question.answer, each.answer, sep="\n", file=sys.stderr
        )


if __name__ == "__main__":
    main()
