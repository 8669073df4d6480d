"""Prompts with media for the engine, ready to be fed group by group, and the tokens they must give."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from epd.encoders import Adapter, FrameSampling
from epd.encoders.adapter import Embeddings
from epd.encoders.groups import FrameEncoder, prompt_identity
from epd.encoders.plans import PromptPlan
from epd.sampling_params import SamplingParams
from epd.stages.encode.encoder_pool import EmbeddingSplicer
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, TokenOutput
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.types import Int64Array, StageTimings, content_hash
from tests.colocated import decode_groups, encode_group, plan_media

MAX_TOKENS = 12
QUESTIONS = ("What is shown?", "how many", "Which colour is the shape? Ä 漢 🙂")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question about media. groups: its visual tokens, in order. expected: the tokens of the answer."""

    plan: PromptPlan
    mm_hashes: tuple[str, ...]
    groups: tuple[PlacedEmbeddings, ...]
    expected: tuple[int, ...]

    def request(self, request_id: str, **options: Any) -> GenerateRequest:
        """options: of `GenerateRequest`."""
        identity = prompt_identity(self.plan, self.mm_hashes)
        options = {"sampling": SamplingParams(max_tokens=MAX_TOKENS)} | options
        return GenerateRequest(request_id, self.plan, identity, **options)


@torch.inference_mode()
def prompt_of(
    adapter: Adapter,
    model: Any,
    media: Sequence[Path],
    question: str,
    sampling: FrameSampling,
    group_tokens: int,
) -> Prompt:
    """Decodes and encodes media; `expected` is left empty."""
    planned = [plan_media(adapter, path, sampling) for path in media]
    plan = adapter.plan_prompt([item.plan for item in planned], question)
    tower = adapter.vision_tower(model)
    groups = []
    splicer, encoder = EmbeddingSplicer(adapter, plan), FrameEncoder(adapter, tower)
    for decoded in decode_groups(planned, group_tokens, StageTimings()):
        group, embeddings = encode_group(encoder, decoded, StageTimings())
        placed = splicer.push(group, _copied(embeddings))
        if placed is not None:
            groups.append(placed)
    hashes = tuple(content_hash(path) for path in media)
    return Prompt(plan, hashes, tuple(groups), ())


def _copied(embeddings: Embeddings) -> Embeddings:
    return replace(
        embeddings, rows=embeddings.rows.clone(), deepstack=tuple(x.clone() for x in embeddings.deepstack)
    )


class Drive:
    """Runs requests through an engine with arrivals and media at random steps, checking it at every step."""

    def __init__(self, engine: LanguageEngine, seed: int) -> None:
        self.engine = engine
        self.outputs: dict[tuple[str, int], list[TokenOutput]] = {}
        self._rng = random.Random(seed)

    def run(self, prompts: dict[str, Prompt], **options: Any) -> dict[str, tuple[int, ...]]:
        """Tokens of each request, all of its choices in a row. options: of `Prompt.request`."""
        arriving = list(prompts)
        self._rng.shuffle(arriving)
        feeding: dict[str, list[PlacedEmbeddings]] = {}
        for _ in range(10_000):
            while arriving and self._rng.random() < 0.5:
                name = arriving.pop()
                self.engine.add(prompts[name].request(name, **options))
                feeding[name] = list(prompts[name].groups)
            for name, groups in feeding.items():
                if groups and self._rng.random() < 0.7:
                    self.engine.add_embeddings(name, groups.pop(0))
            self.step()
            if not arriving and not self.engine.has_work():
                return {name: self.tokens(name) for name in prompts}
        raise AssertionError("the engine did not come to an end")

    def step(self) -> None:
        for output in self.engine.step().outputs:
            self.outputs.setdefault((output.request_id, output.choice), []).append(output)
        self.engine.check_integrity()

    def tokens(self, name: str) -> tuple[int, ...]:
        choices = sorted(key for key in self.outputs if key[0] == name)
        return tuple(output.token.token_id for key in choices for output in self.outputs[key])


# A prompt, and the tokens of an answer to it.
Answered = tuple[Prompt, tuple[int, ...]]


class HeldInPart:
    """Proposes what answers are known to go on with, mostly with a wrong token somewhere."""

    def __init__(self, answers: Iterable[Answered], seed: int) -> None:
        self._texts = [(*prompt.plan.token_ids.tolist(), *tokens) for prompt, tokens in answers]
        self._rng = random.Random(seed)

    def propose(self, token_ids: Int64Array, room: int, num_sequences: int) -> list[int]:  # noqa: ARG002
        known = tuple(token_ids.tolist())
        text = next(each for each in self._texts if each[: len(known)] == known)
        drafts = list(text[len(known) :][: min(room, self._rng.randrange(7))])
        wrong = self._rng.randrange(1 + 2 * len(drafts))
        if wrong < len(drafts):
            drafts[wrong] += 1
        return drafts

    def learn(self, *passed: object) -> None:
        """Knows all."""


def expected_texts(prompts: Mapping[str, Prompt]) -> list[Answered]:
    return [(prompt, prompt.expected) for prompt in prompts.values()]


def draft_in_part(engine: LanguageEngine, answers: Iterable[Answered]) -> None:
    """Lets an engine that drafts propose what holds in part."""
    source = HeldInPart(answers, seed=1)
    assert engine._drafting is not None
    engine._drafting.for_sequence = lambda: source  # type: ignore[assignment,method-assign,return-value]
