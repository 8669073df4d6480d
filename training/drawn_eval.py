"""Runs `epd eval --demo` on what only training draws: longer answers, and scenes as they are filmed.

    python -m training.drawn_eval --stories --footage wild --background clips --demo 240 --model shapes-vl-2

The other options are those of `epd eval`. --stories also asks for descriptions, JSON, times, places, motions
and counts at an instant, which shapes-vl-2 was taught and shapes-vl was not; a description is right if all
its facts are. Answers may then have 384 tokens by default.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

from epd.eval.items import EvalItem
from epd.eval.plan import TIME_MARGIN_S, drawn_items, item_of
from epd.eval.verdicts import DEMO
from epd.serve_app.cli.program import app
from epd.shapes import Question, Scene
from training.footage import LEVELS, Filming, write_filmed
from training.stories import TOLD_KINDS, facts_told, make_stories

_STORY_TOKENS = 384


def with_stories(scene: Scene, rng: random.Random, num_per_kind: int) -> list[EvalItem]:
    """Draws questions that take more than one word before those of `drawn_items`."""
    words = drawn_items(scene, rng, num_per_kind)
    stories = make_stories(scene, rng, TIME_MARGIN_S / 2, num_per_kind)
    return [*(_told(scene, each) for each in stories), *words]


def _told(scene: Scene, question: Question) -> EvalItem:
    if question.kind not in TOLD_KINDS:
        return item_of(question)
    count_facts = partial(facts_told, question.kind, scene, TIME_MARGIN_S)
    return replace(item_of(question), count_facts=count_facts)


@contextmanager
def drawn(filming: Filming, *, has_stories: bool) -> Iterator[None]:
    """Lets evaluations draw so. A file of verdicts names it, and is continued by the same alone."""
    record = {"stories": has_stories, **filming.record()}
    with (
        mock.patch("epd.eval.plan.drawn_items", with_stories if has_stories else drawn_items),
        mock.patch("epd.serve_app.cli.evaluation.write_demo_video", partial(write_filmed, filming=filming)),
        mock.patch("epd.serve_app.cli.eval.DEMO", f"{DEMO} {record}"),
    ):
        yield


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stories", action="store_true")
    parser.add_argument("--footage", choices=LEVELS, default="still")
    parser.add_argument("--background", type=Path, help="folder of videos behind the objects")
    ours, rest = parser.parse_known_args(arguments)
    tokens = ["--max-tokens", str(_STORY_TOKENS)] if ours.stories else []
    with drawn(Filming.of(ours.footage, ours.background), has_stories=ours.stories):
        return app(["eval", *tokens, *rest], standalone_mode=False) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
