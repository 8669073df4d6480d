"""The head that Qwen3.5 has for drafts: computed right, and whatever it drafts, answers stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from epd.encoders import load_adapter
from epd.errors import UnsupportedModelError
from epd.kv.drafting import DraftConfig
from epd.kv.pass_limits import PreemptionMode, SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.model_runner import ModelRunner, kv_layouts
from epd.stages.engine.packed_pass import Segment
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.ranks.group import load_with_ranks
from tests.encoders.families import Family
from tests.stages.conftest import MIX, QUESTIONS, RECURRENT, Subject, check, inputs_of
from tests.stages.engine.test_drafted_answers import DRAWN
from tests.stages.prompts import MAX_TOKENS, Drive
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving
from tests.tiny_models import EXPERTS, add_head, build_qwen3_5

NUM_DRAFTED = 2


def with_head(subject: Subject, folder: Path) -> Subject:
    """The same prompts for the model of a folder that has a head, which is loaded with it."""
    model = load_role(folder, "whole", CPU_FLOAT32, with_draft_head=True).model
    return Subject(subject.name, load_adapter(folder), model, subject.settings, subject.prompts)


@torch.inference_mode()
def predict_right(subject: Subject, count: int) -> Subject:
    """Lets a new head know the answers to the first `count` prompts: what stands before gives what follows.

    Without attention and MLP, whose last matrices are zero, its own matrix has to: it solves one linear
    system of fewer equations than unknowns.
    """
    head, final = subject.model.mtp, subject.model.get_decoder().norm.weight
    head.norm.weight.copy_(final)
    for name, values in head.layers[0].named_parameters():
        if "o_proj" in name or "down_proj" in name:
            values.zero_()
    before, after = map(torch.cat, zip(*_seen(subject, count), strict=True))
    solved = torch.linalg.lstsq(before.double(), (after / (1 + final)).double(), driver="gelsd").solution
    head.fc.weight.copy_(solved.t())
    return subject


def _seen(subject: Subject, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs of the head's matrix, [1, 2 C], and what the model's last layer gives a token later."""
    engine = subject.engine()
    head, embed = engine._runner.draft_head, subject.model.get_input_embeddings()
    assert head is not None
    drive, rows = Drive(engine, seed=0), dict[tuple[str, int], Tensor]()
    step = drive.step

    def step_and_look() -> None:
        step()
        for name, each in engine._sequences.items():
            if each.hidden is not None:
                rows[name, each.num_generated] = each.hidden

    drive.step = step_and_look  # type: ignore[method-assign]
    tokens = drive.run(subject.mix(count), sampling=SamplingParams(max_tokens=MAX_TOKENS + 2))
    for (name, number), row in rows.items():
        if (name, number + 1) in rows:
            following = embed(torch.tensor(tokens[name][number - 1 : number]))
            inputs = torch.cat([head.norms[0](following), head.norms[1](row[None])], dim=1)
            yield inputs, rows[name, number + 1][None]


@pytest.fixture(scope="module", params=RECURRENT)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint with a head, by the name of its family."""
    sizes = EXPERTS if request.param.endswith("_moe") else {}
    return request.param, add_head(build_qwen3_5(tmp_path_factory.mktemp("head") / request.param, **sizes))


@pytest.fixture(scope="module")
def headed(named: tuple[str, Path], subjects: Callable[[str], Subject]) -> Subject:
    """With a random head, which never drafts what comes."""
    return with_head(subjects(named[0]), named[1])


@pytest.fixture(scope="module")
def knowing(named: tuple[str, Path], subjects: Callable[[str], Subject]) -> Subject:
    """With a head that knows the answers to all five prompts."""
    return predict_right(with_head(subjects(named[0]), named[1]), 5)


@dataclass
class Drafted:
    """What the head gives. rows: of each of its passes, [S, C]. places: of each row, in its sequence."""

    rows: list[Tensor] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draft = ModelRunner.draft

        def watching(runner: ModelRunner, segments: Sequence[Segment], *rest: Any) -> tuple[Tensor, Tensor]:
            ids, rows = draft(runner, segments, *rest)
            self.rows.append(rows)
            self.places.append([segment.num_cached[0] for segment in segments])
            return ids, rows

        monkeypatch.setattr(ModelRunner, "draft", watching)


class PlainHead:
    """Computes the head by the tensors in the files, and the model by transformers."""

    def __init__(self, name: str, path: Path) -> None:
        self.family = Family.load(name, path)
        self.config = self.family.model.config.get_text_config()
        tensors = load_file(path / "model.safetensors")
        self.tensors = {key[4:]: each for key, each in tensors.items() if key.startswith("mtp.")}

    @torch.inference_mode()
    def rows(self, inputs: Any, next_ids: Sequence[int], num_drafted: int) -> list[Tensor]:
        """What it gives for the last token of the inputs and those that it drafts behind it, [C] each.

        next_ids: what follows behind each of the last tokens of the inputs.
        """
        model, seen = self.family.model, dict[str, Any]()
        hook = model.get_decoder().register_forward_hook(
            lambda _module, _args, kwargs, out: seen.update(kwargs, hidden=out.last_hidden_state[0]),
            with_kwargs=True,
        )
        model(**inputs)
        hook.remove()
        embed, head = model.get_input_embeddings(), model.lm_head
        positions = torch.arange(len(seen["hidden"])).expand(3, -1)
        if seen["position_ids"] is not None:  # there are media
            positions = seen["position_ids"][-3:, 0]
        known = embed(torch.tensor(next_ids))
        following = torch.cat([seen["inputs_embeds"][0, 1:], known[-1:]])
        following[-len(next_ids) :] = known
        hidden, found = seen["hidden"], list[Tensor]()
        for _ in range(num_drafted):
            given = self._given(following, hidden, positions)
            found.append(given[-1])
            drafted = embed(head(given[-1:]).argmax(-1))
            following, hidden = torch.cat([following, drafted]), torch.cat([hidden, given[-1:]])
            positions = torch.cat([positions, positions[:, -1:] + 1], dim=1)
        return found

    def _given(self, following: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        both = [self._norm(following, "pre_fc_norm_embedding"), self._norm(hidden, "pre_fc_norm_hidden")]
        mixed = torch.cat(both, dim=-1) @ self.tensors["fc.weight"].t()
        mixed = mixed + self._attended(self._norm(mixed, "layers.0.input_layernorm"), positions)
        normed = self._norm(mixed, "layers.0.post_attention_layernorm")
        return self._norm(mixed + self._mlp(normed), "norm")

    def _of(self, name: str) -> Tensor:
        return self.tensors[f"layers.0.{name}.weight"].t()

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        mean = rows.square().mean(-1, keepdim=True) + self.config.rms_norm_eps
        return rows / mean.sqrt() * (1 + self.tensors[f"{name}.weight"])

    def _attended(self, rows: Tensor, positions: Tensor) -> Tensor:
        num_rows, dim = len(rows), self.config.head_dim
        queries, gates = (rows @ self._of("self_attn.q_proj")).view(num_rows, -1, 2, dim).unbind(2)
        keys, values = (
            (rows @ self._of(f"self_attn.{each}_proj")).view(num_rows, -1, dim) for each in ("k", "v")
        )
        queries, keys = (
            self._norm(queries, "layers.0.self_attn.q_norm"),
            self._norm(keys, "layers.0.self_attn.k_norm"),
        )
        rotary = self.family.model.get_decoder().rotary_emb
        cos, sin = (each[0, :, None] for each in rotary(rows[None], positions[:, None]))
        queries, keys = (_rotated(each, cos, sin).transpose(0, 1) for each in (queries, keys))
        out = scaled_dot_product_attention(
            queries[None], keys[None], values.transpose(0, 1)[None], is_causal=True, enable_gqa=True
        )
        attended = out[0].transpose(0, 1).flatten(1) * gates.flatten(1).sigmoid()
        return attended @ self._of("self_attn.o_proj")

    def _mlp(self, rows: Tensor) -> Tensor:
        if "layers.0.mlp.gate.weight" not in self.tensors:
            return self._gated(rows, "mlp")
        shared = (rows @ self._of("mlp.shared_expert_gate")).sigmoid() * self._gated(
            rows, "mlp.shared_expert"
        )
        shares, chosen = (rows @ self._of("mlp.gate")).softmax(-1).topk(self.config.num_experts_per_tok)
        shares = shares / shares.sum(-1, keepdim=True)
        every = [self._gated(rows, f"mlp.experts.{each}") for each in range(self.config.num_experts)]
        picked = torch.stack(every, dim=1).gather(1, chosen[..., None].expand(-1, -1, rows.shape[-1]))
        return shared + (picked * shares[..., None]).sum(1)

    def _gated(self, rows: Tensor, name: str) -> Tensor:
        gate, up = (rows @ self._of(f"{name}.{each}_proj") for each in ("gate", "up"))
        return (silu(gate) * up) @ self._of(f"{name}.down_proj")


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first channels of [T, H, D], as many as cosines and sines have, [T, 1, R]."""
    turned, rest = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], dim=-1)
    one, other = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-other, one], dim=-1) * sin, rest], dim=-1)


@pytest.mark.parametrize("index", range(5), ids=[" and ".join(names) or "text" for names in MIX])
def test_rows_of_the_head_equal_plain_torch(
    named: tuple[str, Path],
    headed: Subject,
    media: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    index: int,
) -> None:
    """Media stand shifted in the head, as their embeddings. A text is cut, others are one chunk."""
    prompt, plain, drafted = headed.prompts[index], PlainHead(*named), Drafted()
    chunk = 2048 if MIX[index] else 5
    engine = headed.engine(
        drafting=DraftConfig("mtp", NUM_DRAFTED), config=SchedulerConfig(max_chunk_tokens=chunk), block_size=4
    )
    drafted.watch(monkeypatch)
    engine.add(prompt.request("r"))
    for group in prompt.groups:
        engine.add_embeddings("r", group)
    while not drafted.rows:
        engine.step()
    paths = [media[each] for each in MIX[index]]
    inputs = inputs_of(plain.family, paths, QUESTIONS[index % len(QUESTIONS)])
    expected = plain.rows(inputs, prompt.expected[:1], NUM_DRAFTED)
    assert drafted.places == [[len(prompt.plan) - 1 + number] for number in range(NUM_DRAFTED)]
    torch.testing.assert_close(torch.cat(drafted.rows), torch.stack(expected), atol=2e-4, rtol=0)


def test_rows_of_the_head_go_with_a_hand_over(
    named: tuple[str, Path], headed: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last one of the prompt, made with no token: nobody knows the next one when it is sent."""
    subject, drafted, prompt = _Drafting(headed), Drafted(), headed.prompts[0]
    deployment = Deployment(subject, 1, random.Random(0), chunk=5, block_size=4)
    drafted.watch(monkeypatch)
    assert deployment.submit("r", prompt, GREEDY)
    while not drafted.rows:
        deployment.step()
    plain = PlainHead(*named)
    ids = torch.tensor([[*prompt.plan.token_ids.tolist(), prompt.expected[0]]])
    expected = plain.rows({"input_ids": ids}, (0, prompt.expected[1]), NUM_DRAFTED)
    assert drafted.places[0] == [len(prompt.plan)]
    torch.testing.assert_close(torch.cat(drafted.rows), torch.stack(expected), atol=2e-4, rtol=0)


@dataclass
class _Drafting:
    """Builds engines that draft by the head."""

    subject: Subject

    def engine(self, **options: Any) -> LanguageEngine:
        return self.subject.engine(drafting=DraftConfig("mtp", NUM_DRAFTED), **options)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_drafts_of_the_head_change_no_token(headed: Subject, mode: PreemptionMode) -> None:
    """With prefix hits, answers that give way, and passes with less room than the drafts."""
    prompts = headed.mix(5)
    engine = headed.engine(
        drafting=DraftConfig("mtp", 3),
        config=SchedulerConfig(max_num_batched_tokens=12, max_chunk_tokens=12, preemption=mode),
        num_kv_tokens=max(len(prompt.plan) for prompt in prompts.values()) + 48,
        block_size=4,
        enable_prefix_caching=True,
    )
    for seed in range(2):
        check(headed, Drive(engine, seed), 5)
    assert engine.counts.num_drafted_tokens > 0
    assert engine.counts.num_cached_tokens > 0
    assert engine.scheduler.num_preempted > 0


def test_right_drafts_all_hold(knowing: Subject) -> None:
    """An answer of 12 tokens takes the pass of its prompt, and three that check 3, 3 and 2 drafts."""
    engine = knowing.engine(drafting=DraftConfig("mtp", 3))
    check(knowing, Drive(engine, seed=0), 5)
    counts = engine.counts
    assert (counts.num_drafts, counts.num_drafted_tokens, counts.num_accepted_tokens) == (15, 40, 40)


def test_drawn_answers_stay_the_same_of_which_a_prompt_has_two(knowing: Subject) -> None:
    prompts, sampling = knowing.mix(5), replace(DRAWN, max_tokens=12, n=2)
    expected = Drive(knowing.engine(), seed=0).run(prompts, sampling=sampling, seed=11)
    engine = knowing.engine(drafting=DraftConfig("mtp", 2))
    assert Drive(engine, seed=1).run(prompts, sampling=sampling, seed=11) == expected
    assert engine.counts.num_drafted_tokens > engine.counts.num_accepted_tokens > 0


def test_moved_answers_draft_on(knowing: Subject) -> None:
    prompts = knowing.mix(5)
    deployment = Deployment(_Drafting(knowing), 3, random.Random(1))
    assert run_moving(deployment, prompts, GREEDY) > 0
    assert {name: deployment.tokens(name) for name in prompts} == {
        name: prompt.expected for name, prompt in prompts.items()
    }
    counts = [stage.engine.counts for stage in deployment.decode.values()]
    drafted, accepted = (
        sum(getattr(each, name) for each in counts) for name in ("num_drafted_tokens", "num_accepted_tokens")
    )
    assert accepted == drafted > 0


def test_the_head_is_loaded_where_it_drafts(named: tuple[str, Path]) -> None:
    """It is one more layer of keys and values, and of no other role."""
    whole, without = (
        load_role(named[1], "language", CPU_FLOAT32, with_draft_head=each) for each in (True, False)
    )
    extra = set(whole.tensor_names) - set(without.tensor_names)
    assert extra == {name for name in load_file(named[1] / "model.safetensors") if name.startswith("mtp.")}
    (with_layer, _), (layers, _) = kv_layouts(whole.model)[0], kv_layouts(without.model)[0]
    assert with_layer.num_layers == layers.num_layers + 1
    assert not hasattr(load_role(named[1], "encode", CPU_FLOAT32, with_draft_head=True).model, "mtp")


def test_what_has_no_head_is_refused_in_one_line(
    named: tuple[str, Path], checkpoints: dict[str, Path]
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"draft mtp for .* without tensors mtp.*; allowed"):
        load_role(checkpoints["qwen3_vl"], "language", CPU_FLOAT32, with_draft_head=True)
    with pytest.raises(UnsupportedModelError, match="draft mtp with a tensor parallel size of 2; allowed: 1"):
        load_with_ranks(named[1], "language", CPU_FLOAT32, 2, with_draft_head=True)
