"""Chosen tokens: the distribution of transformers, and each row as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epd.sampling_params import SamplingParams
from epd.stages.sampling import sampler
from epd.stages.sampling.candidates import look_up, with_biases, with_changes
from epd.stages.sampling.sampler import (
    SampledToken,
    SamplerAhead,
    SamplingRow,
    SamplingState,
    sample,
    token_weights,
    uniform,
)

VOCAB = 40
PROMPT = np.array([3, 1, 3, 7])

drawing_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 0, 1, 5, VOCAB, 1000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3, 1000]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    min_tokens=st.sampled_from([0, 2]),
    logprobs=st.sampled_from([None, 0, 3]),
)


def random_logits(seed: int, rows: int, spread: float = 3.0, *, ties: bool = False) -> Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.round() if ties else logits


def state(params: SamplingParams, seed: int = 0, output: tuple[int, ...] = ()) -> SamplingState:
    ending_ids = params.ending_ids(frozenset([0, VOCAB - 1]))
    return SamplingState(params, seed, PROMPT, output, ending_ids=ending_ids)


def rows_of(params: SamplingParams, seeds: range) -> list[SamplingRow]:
    return [SamplingRow(state(params, seed)) for seed in seeds]


def reference_warpers(params: SamplingParams) -> LogitsProcessorList:
    """What `generate` applies for these params, in its order."""
    warpers = [TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(warpers)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """float64 [R, V], those that the sampler draws by."""
    weights, ids = token_weights(logits, [params] * len(logits))
    full = weights if ids is None else torch.zeros(logits.shape, dtype=torch.int64).scatter(1, ids, weights)
    return full.double() / full.sum(1, keepdim=True)


@given(st.integers(0, 2**31), drawing_params)
@settings(deadline=None)
def test_probabilities_are_those_of_the_reference(seed: int, params: SamplingParams) -> None:
    logits = random_logits(seed, rows=3)
    expected = reference_warpers(params)(None, logits.double()).softmax(1)
    torch.testing.assert_close(probabilities(logits, params), expected, rtol=1e-5, atol=1e-9)


@given(st.integers(0, 2**31), drawing_params)
@settings(deadline=None)
def test_equal_scores_keep_as_much_probability_as_in_the_reference(seed: int, params: SamplingParams) -> None:
    """Which of equal tokens are cut off is nobody's business, how many are is."""
    logits = random_logits(seed, rows=3, ties=True)
    # Sums in the other order may fall on the other side of top_p when it is met exactly.
    expected = reference_warpers(params)(None, logits.double()).softmax(1)
    torch.testing.assert_close(
        probabilities(logits, params).sort(1).values, expected.sort(1).values, rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e5, 1e300])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
def test_extreme_temperatures_are_greedy_or_even(temperature: float, scale: float) -> None:
    logits = random_logits(0, rows=2) * scale
    got = probabilities(logits, SamplingParams(temperature=temperature))
    expected = (logits.double() / temperature).softmax(1)
    if scale / temperature < 1e30:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-9)
    else:
        assert torch.equal(got, torch.nn.functional.one_hot(logits.argmax(1), VOCAB).double())


@given(
    st.integers(0, 2**31),
    st.lists(st.tuples(any_params, st.integers(0, 9)), min_size=1, max_size=8),
    st.data(),
)
@settings(deadline=None)
def test_a_token_depends_on_its_row_alone(seed: int, asked: list, data: st.DataObject) -> None:
    logits = random_logits(seed, len(asked), ties=bool(seed % 2))
    rows = [SamplingRow(state(params, row_seed), (1, 2)[: row_seed % 3]) for params, row_seed in asked]
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = data.draw(st.permutations(range(len(rows))))
    together = sample(logits[order], [rows[i] for i in order])
    assert together == [alone[i] for i in order]


def test_the_order_of_equals_does_not_depend_on_other_rows() -> None:
    """A row that wants all tokens ranked has more of every row ranked with it."""
    logits = (torch.arange(VOCAB) % 2).float().expand(100, -1)
    rows = rows_of(SamplingParams(temperature=1.0, top_k=VOCAB // 2), range(100))
    greedier = rows_of(SamplingParams(temperature=1.0, top_k=VOCAB), range(1))
    alone = sample(logits, rows)
    assert sample(torch.cat([logits, logits[:1]]), [*rows, *greedier])[:-1] == alone


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(1, rows=50)
    rows = rows_of(SamplingParams(temperature=1.0, top_p=0.9), range(50))
    whole = sample(logits, rows)
    monkeypatch.setattr(sampler, "_CPU_CHUNK", 3 * VOCAB)
    assert sample(logits, rows) == whole


@given(st.lists(any_params, min_size=1, max_size=6), st.integers(0, 2**31), st.integers(0, 3))
@example([SamplingParams(temperature=1.0, top_p=0.9)] * 4, 3, 0)
@settings(deadline=None)
def test_passes_that_run_ahead_choose_the_tokens_of_those_in_step(
    params: list[SamplingParams], seed: int, num_known: int
) -> None:
    """Pass after pass, with one token that has not been read from the second on; two rows at once.

    From the fourth on, every second row is one that joins, of which all tokens are known.
    """
    plain, early = ([state(each, i, (1,) * num_known) for i, each in enumerate(params)] for _ in range(2))
    assume(all(each.is_foreseeable for each in early))
    ahead, before = SamplerAhead(early, [0] * len(early)), None
    with patch.object(sampler, "_CPU_CHUNK", 2 * VOCAB):
        for step in range(6):
            logits = random_logits(seed + step, len(params))
            chosen = sample(logits, [SamplingRow(each) for each in plain])
            pairs = list(zip(early, [] if before is None else before.tolist(), strict=False))
            if step == 4:
                for each, token_id in pairs[::2]:
                    each.append(token_id)
                pairs = pairs[1::2]
                ahead = SamplerAhead(early, [i % 2 for i in range(len(early))])
            unread = ahead.sample(logits, before)
            for each, token in zip(plain, chosen, strict=True):
                each.append(token.token_id)
            for each, token_id in pairs:
                each.append(token_id)
            assert unread.read() == (chosen, [True] * len(params))
            before = unread.ids


def test_plain_rows_take_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 5.0]])
    rows = rows_of(SamplingParams(), range(2))
    assert sample(logits, rows) == [SampledToken(1), SampledToken(0)]
    assert sample(logits.bfloat16(), rows) == [SampledToken(1), SampledToken(0)]
    assert sample(logits[:0], []) == []


def drawn_counts(logits: Tensor, params: SamplingParams, num_draws: int) -> Tensor:
    """How often each token is drawn with seeds 0, 1, 2, ..."""
    rows = rows_of(params, range(num_draws))
    tokens = [token.token_id for token in sample(logits.expand(num_draws, -1), rows)]
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=1.3, top_p=0.95, top_k=25, min_p=0.005)],
    ids=["all tokens", "restricted"],
)
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    """Pearson's chi-square over the seeds: within five deviations of what chance gives."""
    logits, num_draws = random_logits(5, rows=1, spread=1.5), 20_000
    expected = probabilities(logits, params)[0] * num_draws
    counts = drawn_counts(logits, params, num_draws)
    assert int(counts[expected == 0].sum()) == 0
    often = expected >= 5
    freedom = int(often.sum()) - 1
    chi_square = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    assert freedom >= 8
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("weights", "number", "place"),
    [
        ([0, 2, 0, 3], 0.0, 1),
        ([0, 2, 0, 3], 0.39, 1),
        ([0, 2, 0, 3], 0.4, 3),
        ([2**60, 2**60 - 1, 0], 1 - 2**-53, 1),
    ],
)
def test_a_number_never_falls_on_a_token_without_weight(
    weights: list[int], number: float, place: int
) -> None:
    places = look_up(torch.tensor([weights]), torch.tensor([[number]], dtype=torch.float64))
    assert places.tolist() == [[place]]


def test_numbers_of_seeds_and_of_steps_are_even_and_unrelated() -> None:
    by_seed = uniform(range(20_000), [0] * 20_000)
    by_step = uniform([7] * 20_000, range(20_000))
    for numbers in (by_seed, by_step):
        assert ((numbers >= 0) & (numbers < 1)).all()
        histogram = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((histogram - 200) ** 2 / 200).sum() == pytest.approx(99, abs=5 * math.sqrt(198))
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / math.sqrt(20_000)
    assert len(set(by_seed.tolist() + by_step.tolist())) == 40_000 - 1  # seed 7, step 0 is in both


def split_mix(seed: int) -> Iterator[int]:
    """SplitMix64 as published, one number after another."""
    mask = 2**64 - 1
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_numbers_are_those_of_split_mix_seeded_by_itself(seed: int) -> None:
    """What a seed promises: it may not change from one version to the next."""
    assert next(split_mix(0)) == 0xE220A8397B1DCDAF  # Vigna's reference implementation
    stream = split_mix(next(split_mix(seed % 2**64)))
    assert uniform([seed] * 5, range(5)).tolist() == [(next(stream) >> 11) / 2**53 for _ in range(5)]


@given(st.integers(0, 2**31), st.sampled_from([0.5, 1.1, 3.0]), st.floats(-5, 5), st.integers(0, 3))
@settings(deadline=None)
def test_greedy_with_repetition_penalty_is_that_of_the_reference(
    seed: int, penalty: float, shift: float, num_drafted: int
) -> None:
    """Scores around `shift`: with all of them negative, dividing would favour what it should not."""
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    sequence = state(SamplingParams(repetition_penalty=penalty))
    tokens = PROMPT.tolist()
    for logits in random_logits(seed, rows=6, spread=1.0) + shift:
        generated = tokens[len(PROMPT) :]
        drafted = tuple(generated[sequence.num_generated :])
        expected = int(reference(torch.tensor([tokens]), logits[None].clone()).argmax())
        assert sample(logits[None], [SamplingRow(sequence, drafted)]) == [SampledToken(expected)]
        tokens.append(expected)
        if len(drafted) >= num_drafted:
            for token_id in (*drafted, expected):
                sequence.append(token_id)


def chosen_logprobs(logits: Sequence[float], params: SamplingParams, output: tuple[int, ...]) -> list[float]:
    """Log-probabilities that the sampler draws by, relative to the first."""
    rows = [SamplingRow(SamplingState(params, 0, np.array([1]), output))]
    places, changes = map(torch.from_numpy, sampler._penalties(rows, len(logits)))
    none = torch.empty(0, dtype=torch.int64)
    biased = map(torch.from_numpy, sampler._biases(rows, len(logits)))
    scores = with_biases(torch.tensor([logits]), *biased, in_place=True)
    scores = with_changes(scores, places, changes, none, in_place=False)
    return (scores - scores[:, :1])[0].tolist()


def test_penalties_count_the_answer_and_not_the_prompt() -> None:
    logits = [0.0, 4.0, 4.0, 4.0]
    by_presence = SamplingParams(presence_penalty=0.5)
    by_frequency = SamplingParams(frequency_penalty=0.5)
    both = SamplingParams(presence_penalty=-1.0, frequency_penalty=2.0, repetition_penalty=2.0)
    assert chosen_logprobs(logits, by_presence, (2, 3, 3)) == [0.0, 4.0, 3.5, 3.5]
    assert chosen_logprobs(logits, by_frequency, (2, 3, 3)) == [0.0, 4.0, 3.5, 3.0]
    assert chosen_logprobs(logits, both, (2, 3, 3)) == [0.0, 2.0, 1.0, -1.0]


def test_many_different_tokens_are_all_remembered() -> None:
    output = tuple(range(0, 1000, 2))
    params = SamplingParams(frequency_penalty=1.0)
    changes = chosen_logprobs([0.0] * 1001, params, output * 2)
    assert changes == [0.0 if i % 2 == 0 and i < 1000 else 2.0 for i in range(1001)]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_penalties_leave_a_choice(penalty: float) -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(repetition_penalty=penalty, temperature=temperature)
        (token,) = sample(logits, [SamplingRow(SamplingState(params, 3, np.arange(4)))])
        # The largest of all, or, of those that all but vanish, any that was not negative.
        assert token.token_id in ((1, 3) if penalty < 1 else (0, 1, 3))


def test_biases_are_added_before_penalties() -> None:
    logits = [0.0, 4.0, 4.0, 4.0]
    bias = ((1, -100.0), (3, 2.0), (10**9, 5.0))
    params = SamplingParams(repetition_penalty=2.0, logit_bias=bias)
    assert chosen_logprobs(logits, SamplingParams(logit_bias=bias), ()) == [0.0, -96.0, 4.0, 6.0]
    assert chosen_logprobs(logits, params, (3,)) == [0.0, -192.0, 4.0, 3.0]  # the prompt holds token 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.5, top_k=5)])
def test_biased_tokens_are_those_of_biased_logits(params: SamplingParams) -> None:
    """Rows without a bias beside them, and the logits of the model, stay as they are."""
    logits = random_logits(7, rows=8)
    before, biased = logits.clone(), logits.clone()
    bias = ((3, 2.5), (9, -1.5), (11, 100.0))
    for token_id, each in bias:
        biased[::2, token_id] += each
    held = replace(params, logit_bias=bias)
    rows = [SamplingRow(state(params if seed % 2 else held, seed)) for seed in range(8)]
    assert sample(logits, rows) == sample(biased, rows_of(params, range(8)))
    assert torch.equal(logits, before)


def test_an_answer_does_not_end_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(2, 10**9))
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    ending_ids = params.ending_ids(frozenset([0]))
    sequence = SamplingState(params, 0, np.array([1]), ending_ids=ending_ids)
    assert sample(logits.expand(2, -1), [SamplingRow(sequence), SamplingRow(sequence, (1, 1))]) == [
        SampledToken(1),
        SampledToken(0),
    ]
    for _ in range(2):
        sequence.append(1)
    assert sample(logits, [SamplingRow(sequence)]) == [SampledToken(0)]
    params = replace(params, ignore_eos=True)
    ignoring = SamplingState(params, 0, np.array([1]), ending_ids=params.ending_ids(frozenset([0])))
    assert sample(logits, [SamplingRow(ignoring)]) == [SampledToken(0)]


def test_logprobs_are_those_of_the_model() -> None:
    """Neither temperature nor penalties nor bans show in them."""
    logits = random_logits(3, rows=3)
    params = SamplingParams(
        temperature=2.0, top_k=2, repetition_penalty=5.0, presence_penalty=1.0, min_tokens=9, logprobs=4
    )
    rows = [SamplingRow(state(replace(params, logprobs=wanted), 1)) for wanted in (4, 0, None)]
    tokens = sample(logits, rows)
    expected = logits.double().log_softmax(1)
    for token, logprobs in zip(tokens[:2], expected, strict=False):
        assert token.logprob == pytest.approx(float(logprobs[token.token_id]), abs=1e-5)
    best = expected[0].topk(4)
    assert [token_id for token_id, _ in tokens[0].top_logprobs] == best.indices.tolist()
    assert [value for _, value in tokens[0].top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert tokens[1].top_logprobs == ()
    assert tokens[2] == SampledToken(tokens[2].token_id)


@given(any_params, st.integers(0, 100), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
@settings(deadline=None)
def test_drafts_change_no_token(params: SamplingParams, seed: int, draft: list[int]) -> None:
    """A toy model, whose logits follow from the last token, answers token by token and with drafts."""
    model = random_logits(seed, rows=VOCAB)
    alone, drafting = state(params, seed), state(params, seed)
    expected: list[int] = []
    while len(expected) < len(draft) + 1:
        last = expected[-1] if expected else int(PROMPT[-1])
        expected.append(sample(model[last][None], [SamplingRow(alone)])[0].token_id)
        alone.append(expected[-1])
    for drafted in (draft, expected[:-1]):
        inputs = [int(PROMPT[-1]), *drafted]
        rows = [SamplingRow(drafting, tuple(drafted[:i])) for i in range(len(inputs))]
        tokens = [token.token_id for token in sample(model[inputs], rows)]
        held = next((i for i, token_id in enumerate(drafted) if tokens[i] != token_id), len(drafted))
        assert tokens[: held + 1] == expected[: held + 1]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_say_nothing_still_give_a_token(value: float) -> None:
    logits = torch.full((1, VOCAB), value)
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3, top_p=0.5)):
        (token,) = sample(logits, rows_of(params, range(1)))
        assert 0 <= token.token_id < VOCAB


def test_rows_and_logits_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows of logits need as many sampling rows, got 1"):
        sample(torch.zeros(2, 3), rows_of(SamplingParams(), range(1)))


def test_a_large_vocabulary_is_drawn_from_to_its_end() -> None:
    num_tokens = 150_000
    logits = torch.zeros(1, num_tokens)
    logits[0, -1] = 12.0  # a little more than half of the probability
    rows = rows_of(SamplingParams(temperature=1.0), range(200))
    tokens = [token.token_id for token in sample(logits.expand(200, -1), rows)]
    share = math.exp(12) / (math.exp(12) + num_tokens - 1)
    assert tokens.count(num_tokens - 1) == pytest.approx(
        200 * share, abs=5 * math.sqrt(200 * share * (1 - share))
    )
    others = [token_id for token_id in tokens if token_id != num_tokens - 1]
    assert min(others) < num_tokens // 5
    assert max(others) > num_tokens * 4 // 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_chosen_on_a_gpu_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Exponentials may differ in the last bit, which moves a boundary by less than one draw in a million."""
    logits = random_logits(11, rows=64).to(dtype)
    options = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, top_k=7, presence_penalty=0.5, logprobs=0),
    ]
    rows = [SamplingRow(state(options[i % 4], i)) for i in range(64)]
    on_cpu = [token.token_id for token in sample(logits, rows)]
    assert [token.token_id for token in sample(logits.cuda(), rows)] == on_cpu
    assert [sample(logits[i : i + 1].cuda(), [rows[i]])[0].token_id for i in range(64)] == on_cpu
