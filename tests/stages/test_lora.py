"""LoRA adapters beside a model: tokens equal `generate` of the model that each is merged into by torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.encoders.groups import prompt_identity
from epd.engine_config import EngineConfig
from epd.errors import EPDError, ModelError, RequestError, UnsupportedModelError
from epd.kv.pass_limits import SchedulerConfig
from epd.lora_modules import LoRAModule, lora_modules
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest
from epd.stages.engine.packed_pass import Segment
from epd.stages.engine.setup import build_engine
from epd.stages.loading.lora_files import read_lora
from epd.stages.placement import CPU_FLOAT32
from epd.stages.ranks import group
from epd.stages.ranks.group import load_with_ranks
from tests.models.lora import ALL, draw, peft_config, renamed, write_adapter
from tests.stages.conftest import BUILDERS_HERE, Subject, make
from tests.stages.prompts import Drive, Prompt
from tests.stages.ranks.thread_ranks import StartedThreadRanks
from tests.stages.split_deployment import GREEDY, Deployment


@dataclass(frozen=True, slots=True)
class Adapted(Prompt):
    """A prompt that an adapter answers."""

    lora: str = ""

    def request(self, request_id: str, sampling: SamplingParams = GREEDY, **options: Any) -> GenerateRequest:
        identity = prompt_identity(self.plan, self.mm_hashes, lora=self.lora)
        sampling = replace(sampling, lora=self.lora)
        return GenerateRequest(request_id, self.plan, identity, sampling, **options)


def adapted(prompt: Prompt, lora: str) -> Adapted:
    return Adapted(prompt.plan, prompt.mm_hashes, prompt.groups, prompt.expected, lora)


@dataclass(frozen=True, slots=True)
class Served:
    """A model with adapters. prompts: for itself and for each of them, with the truth of each."""

    subject: Subject
    prompts: dict[str, Prompt]
    lora_modules: frozenset[str]

    def engine(self, **options: Any) -> LanguageEngine:
        return self.subject.engine(lora_modules=self.lora_modules, **options)

    def check(self, drive: Drive, names: Iterable[str]) -> None:
        prompts = {name: self.prompts[name] for name in names}
        assert drive.run(prompts) == {name: prompt.expected for name, prompt in prompts.items()}
        assert drive.engine.kv.usage == 0


DELTA = ("in_proj_qkv", "in_proj_z", "out_proj")


def serve(name: str, folder: Path, media: dict[str, Path], drawn: Mapping[str, Mapping[str, Any]]) -> Served:
    """drawn: of each adapter, the arguments of `draw`."""
    base = BUILDERS_HERE[name](folder / name)
    subject, modules = make(name, base, media), set[str]()
    prompts = {f"base {index}": prompt for index, prompt in enumerate(subject.prompts)}
    for seed, (lora, options) in enumerate(drawn.items()):
        each = draw(base, folder, seed, **options)
        theirs = make(name, each.merged, media).prompts
        prompts |= {f"{lora} {index}": adapted(prompt, lora) for index, prompt in enumerate(theirs)}
        modules.add(f"{lora}={each.adapter}")
    return Served(subject, prompts, frozenset(modules))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, media: dict[str, Path]) -> Served:
    some = {"targets": ("q_proj", "v_proj", "down_proj"), "rank": 3, "alpha": 6, "use_rslora": True}
    return serve("qwen3_vl", tmp_path_factory.mktemp("lora"), media, {"all": {}, "some": some})


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "gemma4", "gemma4_small", "glm4v"])
def test_layers_of_other_kinds_take_adapters(name: str, tmp_path: Path, media: dict[str, Path]) -> None:
    """Gated delta layers, windows, keys that are values too, keys of others, gate and up in one."""
    served = serve(name, tmp_path, media, {"all": {"targets": (*ALL, *DELTA, "gate_up_proj")}})
    served.check(Drive(served.engine(), seed=0), served.prompts)


@pytest.mark.parametrize(("chunk", "caching"), [(4096, True), (7, False)])
def test_adapters_and_the_model_share_passes(
    served: Served, chunk: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 32))
    engine = served.engine(config=config, enable_prefix_caching=caching)
    run, raised = engine._runner.run, list[Exception]()

    def noting(segments: Sequence[Segment]) -> torch.Tensor:
        """A pass that raises is run again in parts, which would hide it."""
        try:
            return run(segments)
        except Exception as error:
            raised.append(error)
            raise

    monkeypatch.setattr(engine._runner, "run", noting)
    served.check(Drive(engine, seed=chunk), served.prompts)
    assert not raised
    truths = {(name.partition(" ")[2], prompt.expected) for name, prompt in served.prompts.items()}
    assert len(truths) == len(served.prompts), "an adapter changes every answer"


def test_a_prefix_is_not_shared_with_another_adapter(served: Served) -> None:
    """The same video and question, one after the other: each computes the prompt once, and then finds it."""
    engine = served.engine(enable_prefix_caching=True)
    for repeat in range(2):
        for lora in ("base", "all", "some"):
            before = engine.counts.num_cached_tokens
            served.check(Drive(engine, seed=repeat), [f"{lora} 2"])
            assert (engine.counts.num_cached_tokens > before) == bool(repeat)


def test_several_answers_and_preemption_keep_the_adapter(served: Served) -> None:
    longest = max(len(prompt.plan) for prompt in served.prompts.values())
    config = SchedulerConfig(max_chunk_tokens=32, preemption="offload")
    engine = served.engine(config=config, block_size=4, num_kv_tokens=2 * longest + 24)
    served.check(Drive(engine, seed=3), served.prompts)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_an_adapter_goes_with_its_request_to_another_worker(served: Served) -> None:
    prompts = {name: prompt for name, prompt in served.prompts.items() if name.endswith(("1", "2"))}
    deployment = Deployment(served, num_decode=2, rng=random.Random(0))
    tokens = deployment.run(prompts, GREEDY)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_ranks_share_an_adapter(
    name: str, tmp_path: Path, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of a matrix each has some of B, of columns some of A. Q, K and V are drawn without K too."""
    monkeypatch.setattr(group, "ProcessRanks", StartedThreadRanks)
    some = {"targets": ("q_proj", "v_proj", "o_proj", "down_proj", "in_proj_z"), "rank": 3, "alpha": 6}
    drawn = {"all": {"targets": (*ALL, *DELTA)}, "some": some}
    served = serve(name, tmp_path, media, drawn)
    model, ranks = load_with_ranks(tmp_path / name, "language", CPU_FLOAT32, 2)
    assert isinstance(ranks, StartedThreadRanks)
    config = EngineConfig(num_kv_tokens=4096, lora_modules=served.lora_modules)
    subject = served.subject
    engine = build_engine(model, subject.adapter, subject.settings, options=config, ranks=ranks)
    served.check(Drive(engine, seed=0), served.prompts)
    assert "ServeAdapters" in ranks.steps
    ranks.close()


def test_an_unknown_adapter_costs_its_request_alone(served: Served) -> None:
    engine = served.engine()
    engine.add(adapted(served.prompts["base 0"], "other").request("r"))
    (fault,) = engine.step().faults
    assert "allowed: all, some" in str(fault.cause)
    served.check(Drive(engine, seed=0), ["all 0"])


# Files


def adapter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> LoRAModule:
    """An adapter of two matrices, with other settings or tensors."""
    start = "base_model.model.model.language_model.layers.0.self_attn"
    whole = {
        f"{start}.{module}.lora_{part}.weight": torch.ones(*shape)
        for module in ("q_proj", "v_proj")
        for part, shape in (("A", (2, 8)), ("B", (6, 2)))
    }
    settings = peft_config(["q_proj", "v_proj"], 2, 3.0) | config
    return LoRAModule("mine", write_adapter(folder / "adapter", settings, whole | (tensors or {})))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3 / 2),
        ({"use_rslora": True}, 3 / 2**0.5),
        ({"lora_alpha": 5}, 5 / 2),
        ({"alpha_pattern": {"q_proj": 8}}, 8 / 2),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 8}}, 3 / 2),
        ({"target_modules": r".*language_model.*\.(q|v)_proj"}, 3 / 2),
    ],
)
def test_the_scale_is_the_one_of_the_configuration(tmp_path: Path, config: Any, scale: float) -> None:
    read = read_lora(adapter(tmp_path, **config))
    found = read["model.language_model.layers.0.self_attn.q_proj"]
    torch.testing.assert_close(found.b, torch.full((6, 2), scale))
    torch.testing.assert_close(found.a, torch.ones(2, 8))


_Q = "base_model.model.model.language_model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "error", "said"),
    [
        ({"use_dora": True}, {}, UnsupportedModelError, "use_dora true; allowed: false"),
        ({"bias": "all"}, {}, UnsupportedModelError, 'bias "all"; allowed: "none"'),
        ({"modules_to_save": ["lm_head"]}, {}, UnsupportedModelError, "modules_to_save .*lm_head"),
        ({"peft_type": "IA3"}, {}, UnsupportedModelError, 'peft_type "IA3"; allowed: "LORA"'),
        ({"target_parameters": ["experts"]}, {}, UnsupportedModelError, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, UnsupportedModelError, "changes the base model"),
        ({}, {f"{_Q}.lora_magnitude_vector": torch.ones(6)}, UnsupportedModelError, "lora_magnitude_vector"),
        ({}, {"base_model.model.lm_head.weight": torch.ones(6, 2)}, UnsupportedModelError, "lm_head.weight"),
        ({"r": 4}, {}, ModelError, "says a rank of 4"),
        ({"target_modules": ["v_proj"]}, {}, ModelError, "target_modules .* does not name"),
        ({"target_modules": "["}, {}, ModelError, "does not load"),
        ({}, {f"{_Q}.lora_B.weight": torch.full((6, 2), torch.inf)}, ModelError, "not finite"),
        ({}, {f"{_Q}x.lora_B.weight": torch.ones(6, 2)}, ModelError, "does not load"),
    ],
)
def test_what_is_more_is_refused_by_its_name(
    tmp_path: Path, config: Any, tensors: dict[str, torch.Tensor], error: type[EPDError], said: str
) -> None:
    with pytest.raises(error, match=f"LoRA module 'mine'.*{said}"):
        read_lora(adapter(tmp_path, tensors, **config))


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"model\.language_model\.layers", "model.layers"),
        (r"model\.language_model\.layers", "language_model.model.layers"),
    ],
)
def test_modules_may_have_names_of_other_releases(
    served: Served, tmp_path: Path, pattern: str, replacement: str
) -> None:
    (module,) = (each for each in lora_modules(served.lora_modules) if each.name == "all")
    old = renamed(module.path, tmp_path / "old", pattern, replacement)
    engine = served.subject.engine(lora_modules=frozenset({f"all={old}"}))
    served.check(Drive(engine, seed=0), ["all 0"])


@pytest.mark.parametrize(
    "name", ["model.visual.blocks.0.attn.qkv", "lm_head", "model.language_model.layers.9.x"]
)
def test_other_modules_than_those_of_layers_are_refused(served: Served, tmp_path: Path, name: str) -> None:
    (module,) = (each for each in lora_modules(served.lora_modules) if each.name == "all")
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": torch.ones(*shape)
        for part, shape in (("A", (4, 8)), ("B", (8, 4)))
    }
    targets = [name.rpartition(".")[2]]
    folder = write_adapter(tmp_path / "bad", peft_config(targets, 4, 8), tensors)
    with pytest.raises(UnsupportedModelError, match=f"{name}; allowed: linear modules of the language"):
        served.subject.engine(lora_modules=frozenset({f"{module.name}={folder}"}))


def test_layers_of_transformers_take_no_adapters(served: Served) -> None:
    with pytest.raises(UnsupportedModelError, match="transformers' modules"):
        served.engine(by_modules=True)


@pytest.mark.parametrize("text", ["", "name", "=path", "name=", "n" * 101 + "=path"])
def test_a_module_is_a_name_and_a_path(text: str) -> None:
    with pytest.raises(RequestError, match="allowed: NAME=PATH"):
        EngineConfig.checked({"lora_modules": [text]})


def test_a_name_is_given_once() -> None:
    with pytest.raises(RequestError, match="2 LoRA modules of the name 'a'"):
        EngineConfig.checked({"lora_modules": ["a=1", "a=2"]})
