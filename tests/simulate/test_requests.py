"""What a planned request is to the simulator: its groups, their CPU time, and who it shares tokens with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from epd.profiles.analytic import analytic_profile
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile
from epd.simulate import Job, JobMaker
from epd.simulate.clock import ticks_of
from epd.simulate.requests import identity_of
from epd.workload.requests import PlannedRequest, RequestShape, Resolution

PROFILE = analytic_profile("a100-80gb", "minicpm-v-2.6")
SHAPE = RequestShape(text_tokens=20, output_tokens=5, images=(Resolution(896, 896),))


def job(profile: Profile = PROFILE, shape: RequestShape = SHAPE, index: int = 0) -> Job:
    request = PlannedRequest(index, due_s=0.5, shape=shape, media_seed=11, text_seed=22)
    return JobMaker(profile).job(request)


def test_reading_an_image_takes_what_the_profile_says_and_nothing_where_it_says_nothing() -> None:
    assert PROFILE.images is not None
    known = replace(PROFILE, images=replace(PROFILE.images, cost=StageCost(fixed_s=0.5)))
    assert [group.decode_ticks for group in job(known).groups] == [ticks_of(0.5)]
    assert [group.decode_ticks for group in job(replace(PROFILE, images=None)).groups] == [0]


def test_prompts_about_the_same_are_the_same_and_answers_are_each_requests_own() -> None:
    """Equal media and questions share the prompt's rows; what is answered differs by request."""
    one, other = job(index=0), job(index=1)
    rows, others = identity_of(one).rows, identity_of(other).rows
    num_prompt = one.num_prompt_tokens
    assert num_prompt == one.num_visual_tokens + one.text_tokens
    assert len(rows) == num_prompt + 5
    assert np.array_equal(rows[:num_prompt], others[:num_prompt])
    assert not set(rows[num_prompt:, 0].tolist()) & set(others[:, 0].tolist())
    assert len(set(rows[:, 0].tolist())) == len(rows), "no token of a request stands for another of it"
    answers = [identity_of(job(index=index)).rows[num_prompt:, 0].tolist() for index in range(100)]
    assert len({token for answer in answers for token in answer}) == 100 * 5


def test_other_media_and_other_questions_are_told_apart() -> None:
    one = job()
    rows = identity_of(one).rows
    visual, text = one.num_visual_tokens, slice(one.num_visual_tokens, one.num_prompt_tokens)
    seen = identity_of(replace(one, media_key=12)).rows
    assert not np.array_equal(rows[:visual], seen[:visual])
    assert np.array_equal(rows[text], seen[text])
    asked = identity_of(replace(one, text_key=1000)).rows
    assert np.array_equal(rows[:visual], asked[:visual])
    assert not np.array_equal(rows[text], asked[text])
