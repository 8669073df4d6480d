"""Reduced prompts about the drawn video, and engines that answer them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epd.encoders import PromptPlan
from epd.encoders.reduction import reduce_prompt
from epd.reduction import ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.stages.encode.encoder_pool import EmbeddingSplicer
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.setup import build_engine
from epd.stages.visual_inputs import PlacedEmbeddings
from tests.colocated import ColocatedPipeline, EncodedMedia
from tests.engine_options import parted
from tests.stages.prompts import MAX_TOKENS, Drive, Prompt

SMALL_WINDOW_TOKENS = 45  # three units of 15
# The most likely answer is one word and then its end over and over, whatever the cache holds. Drawn at a high
# temperature, and without that end, every token depends on all of it.
SEED = 3
_END = 467
DRAWN = SamplingParams(max_tokens=MAX_TOKENS, temperature=2.0, logit_bias=((_END, -100.0),))


class Engines:
    """Of the pipeline's model; every answer is as long as may be."""

    def __init__(self, model: Any, pipeline: ColocatedPipeline) -> None:
        self._model, self._adapter = model, pipeline.adapter

    def engine(self, **options: Any) -> LanguageEngine:
        settings = GenerationSettings(eos_ids=frozenset())
        config, others = parted({"num_kv_tokens": 8192, "enable_prefix_caching": True} | options)
        return build_engine(self._model, self._adapter, settings, options=config, **others)


def reduced_plan(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, question: str, policy: ReductionPolicy
) -> PromptPlan:
    return reduce_prompt(pipeline.adapter.plan_prompt(encoded.plans, question), policy)


def prompt_of(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, question: str, policy: ReductionPolicy
) -> Prompt:
    plan = reduced_plan(pipeline, encoded, question, policy)
    return Prompt(plan, ("clip",), tuple(placed(pipeline, encoded, plan)), ())


def placed(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, plan: PromptPlan
) -> Iterator[PlacedEmbeddings]:
    splicer = EmbeddingSplicer(pipeline.adapter, plan)
    for group, embeddings in encoded.groups:
        part = splicer.push(group, embeddings)
        if part is not None:
            yield part


def expected(prompts: dict[str, Prompt]) -> dict[str, tuple[int, ...]]:
    return {name: prompt.expected for name, prompt in prompts.items()}


def drive(
    engine: LanguageEngine, seed: int, prompts: dict[str, Prompt], n: int = 1
) -> dict[str, tuple[int, ...]]:
    """The tokens of all answers to each. seed: of arrivals."""
    return Drive(engine, seed).run(prompts, sampling=replace(DRAWN, n=n), seed=SEED)


def answered_alone(
    engines: Engines,
    pipeline: ColocatedPipeline,
    encoded: EncodedMedia,
    questions: Sequence[str],
    policies: Mapping[str, ReductionPolicy],
) -> dict[str, Prompt]:
    """Every question under every policy, and what comes of it when nothing else is asked."""
    prompts = {
        f"{name}{number}": prompt_of(pipeline, encoded, question, policy)
        for name, policy in policies.items()
        for number, question in enumerate(questions)
    }
    return {
        name: replace(prompt, expected=drive(engines.engine(), 0, {name: prompt})[name])
        for name, prompt in prompts.items()
    }
