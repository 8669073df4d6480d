"""ERNIE 4.5 VL: experts by the kind of a token, frames with their times on them; tokens equal `generate`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.families.ernie4_5_vl import Ernie4_5VLAdapter
from epd.encoders.groups import plan_groups, prompt_identity
from epd.encoders.names import parts_by_kind
from epd.encoders.plans import MediaPlan
from epd.engine_config import EngineConfig
from epd.errors import ModelError, RequestError, UnsupportedMediaError, UnsupportedModelError
from epd.frame_sampling import ListedTimes
from epd.pixel_limits import PixelLimits
from epd.pixel_settings import PixelSettings
from epd.reduction import ReductionPolicy, TowerMerge
from epd.serve_app.verification import LayerProbe, segment_of, verify
from epd.stages.decoder.rank_cut import check_divisible
from epd.stages.encode.embedding_store import unit_name
from epd.stages.engine.model_runner import kv_bytes_per_token
from epd.stages.loading.weight_files import write_weights
from epd.stages.loading.weights import WholeModel, load_role, skeleton
from epd.stages.placement import CPU_FLOAT32, Placement
from tests.colocated import ColocatedPipeline
from tests.models import tiny_ernie
from tests.models.engine_answers import (
    QUESTION,
    Mixes,
    test_answers_move_between_decode_workers,
    test_answers_of_workers_and_from_their_caches,
    test_chunked_and_packed,
    test_preemption_changes_no_token,
    test_several_answers_share_their_prompt,
)
from tests.models.test_published import written
from tests.reference import MAX_TOKENS, generated_as_it_is, processor_inputs
from tests.stages.conftest import Subject, as_sent, make
from tests.tiny_models import load_reference

__all__ = [
    "test_answers_move_between_decode_workers",
    "test_answers_of_workers_and_from_their_caches",
    "test_chunked_and_packed",
    "test_preemption_changes_no_token",
    "test_several_answers_share_their_prompt",
]

SAMPLING = FrameSampling(num_frames=6)
CASES = (
    (),
    ("image",),
    ("wide_image", "image"),
    ("video",),
    ("video", "tall_video"),
    ("video", "image"),
)
EXPERTS = "model.layers.2.mlp.experts"

# Of transformers' processor, which makes an array of a tensor in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ernie.build(tmp_path_factory.mktemp("ernie") / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def subject(folder: Path, media: dict[str, Path]) -> Subject:
    return make("ernie4_5_vl_moe", folder, media)


def expected(theirs: Any, folder: Path, paths: list[Path]) -> tuple[int, ...]:
    processor = AutoProcessor.from_pretrained(folder)
    return generated_as_it_is(theirs, processor_inputs(processor, paths, QUESTION, SAMPLING))


@pytest.mark.parametrize("names", CASES, ids="-".join)
def test_tokens_equal_generate(
    theirs: Any, folder: Path, media: dict[str, Path], names: tuple[str, ...]
) -> None:
    paths = [media[name] for name in names]
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    assert isinstance(pipeline.adapter, Ernie4_5VLAdapter)
    answer = pipeline.ask(paths, QUESTION, num_frames=6, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(theirs, folder, paths)


@pytest.fixture(scope="module")
def mixes(theirs: Any, folder: Path, media: dict[str, Path]) -> Mixes:
    asked = [[media[name] for name in names] for names in CASES]
    return [(paths, expected(theirs, folder, paths)) for paths in asked]


def test_epd_verify_says_equal(folder: Path, media: dict[str, Path]) -> None:
    reports = verify(folder, [media["image"], media["video"]])
    assert [report.is_equal for report in reports] == [True] * 3
    assert not any(report.has_own_positions for report in reports)


# Experts


def test_a_mark_of_media_in_an_answer_is_text(subject: Subject, theirs: Any) -> None:
    """As in `generate`, which tells kinds of the prompt's tokens alone; with kinds of all, logits differ."""
    adapter = subject.adapter
    prompt, config = adapter.plan_prompt([], QUESTION), theirs.config
    answer = torch.tensor([config.image_start_token_id, 65, config.video_token_id, 66])
    probe = LayerProbe.of(subject.model, adapter, len(prompt) + len(answer))
    ours = probe.logits(segment_of(prompt, None, answer.numpy()), len(answer))
    ids = torch.cat([torch.from_numpy(prompt.token_ids), answer])[None]
    with torch.inference_mode():
        told = [theirs(input_ids=ids, moe_mm_token_type_ids=kinds).logits[0, -4:] for kinds in kinds_of(ids)]
    torch.testing.assert_close(ours, told[0], rtol=1e-4, atol=1e-4)
    assert (ours - told[1]).abs().max() > 0.1


def kinds_of(ids: torch.Tensor) -> list[torch.Tensor]:
    """Those of texts alone, and those with media behind the prompt."""
    told = torch.zeros_like(ids)
    told[0, -4] = told[0, -2] = 1
    return [torch.zeros_like(ids), told]


@pytest.mark.parametrize("method", ["balanced", "quickprefill", "fastkv"])
def test_media_have_their_experts_where_tokens_are_dropped(
    folder: Path, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """With the two marks around them: before the language model, inside of it, and for its later layers."""
    told, tell = list[int](), Ernie4_5VLAdapter.prompt_kwargs

    def counted(self: Any, prompt_ids: torch.Tensor) -> dict[str, Any]:
        given = tell(self, prompt_ids)
        told.append(int(given["moe_mm_token_type_ids"].sum()))
        return given

    monkeypatch.setattr(Ernie4_5VLAdapter, "prompt_kwargs", counted)
    half = ReductionPolicy(method, 0.5)
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    answer = pipeline.ask([media["video"]], QUESTION, num_frames=6, max_tokens=4, reduction=half)
    kept, whole = answer.usage.visual_tokens, answer.usage.visual_tokens_before
    assert 0 < kept < whole
    wanted = {"balanced": kept + 2, "quickprefill": whole + 2, "fastkv": whole + kept + 2}
    assert sum(told) == wanted[method]


def test_weights_are_those_of_transformers(folder: Path, theirs: Any, tmp_path: Path) -> None:
    known = theirs.state_dict()
    read = load_role(folder, "whole", CPU_FLOAT32).model.state_dict()
    assert read.keys() == known.keys()
    assert [name for name in known if not torch.equal(known[name], read[name])] == []
    write_weights(folder, torch.float32, tmp_path / "weights")
    mapped = WholeModel(folder, CPU_FLOAT32, tmp_path / "weights").part("language").state_dict()
    assert [name for name in mapped if not torch.equal(known[name], mapped[name])] == []


def test_the_published_one_has_28_billion_parameters(tmp_path: Path) -> None:
    """As its name says, most of them experts; a token takes the counted bytes."""
    (published,) = tiny_ernie.PUBLISHED.values()
    model: Any = skeleton(written(published.config, tmp_path), torch.bfloat16)
    count = {name: each.numel() for name, each in model.named_parameters() if name != "lm_head.weight"}
    experts = {
        kind: sum(v for k, v in count.items() if f"{kind}.experts" in k)
        for kind in ("text_moe", "vision_moe")
    }
    assert experts == {"text_moe": 27 * 64 * 3 * 2560 * 1536, "vision_moe": 27 * 64 * 3 * 2560 * 512}
    assert 28e9 < sum(count.values()) < 30e9
    assert kv_bytes_per_token(model) == published.kv_bytes_per_token


def test_what_chooses_experts_keeps_the_type_of_the_files(folder: Path, tmp_path: Path) -> None:
    write_weights(folder, torch.bfloat16, tmp_path / "weights")
    placement = Placement(torch.device("cpu"), torch.bfloat16)
    for weights in (None, tmp_path / "weights"):
        read = load_role(folder, "language", placement, weights).model.state_dict()
        kept = {name for name, tensor in read.items() if tensor.dtype == torch.float32}
        assert {name.partition("_moe.gate.")[2] for name in kept if "layers" in name} == {
            "weight",
            "moe_statics.e_score_correction_bias",
        }
        assert len([name for name in kept if "layers" in name]) == 3 * 2 * 2


def test_a_missing_expert_is_an_error(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{EXPERTS}.{tiny_ernie.NUM_EXPERTS + 1}.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 experts of \S+vision_moe\.experts\.gate_up_proj are missing"):
        load_role(copied, "language", CPU_FLOAT32)


def test_names_of_parts() -> None:
    start = "model.layers.1.mlp"
    found = {name: parts_by_kind(f"{start}.{name}", 64) for name in ("experts.63.up_proj.weight", "up_proj")}
    assert list(found.values()) == [(f"{start}.text_moe.experts.63.up_proj.weight",), (f"{start}.up_proj",)]
    last = parts_by_kind(f"{start}.experts.127.down_proj.weight", 64)
    assert last == (f"{start}.vision_moe.experts.63.down_proj.weight",)
    shared = f"{start}.shared_experts.up_proj.weight"
    assert parts_by_kind(shared, 64) == (shared,)


# Frames


@pytest.mark.parametrize("draws", [True, False])
def test_pixels_equal_the_processors(
    folder: Path, media: dict[str, Path], tmp_path: Path, draws: bool
) -> None:
    """Five frames, of which the last one is shown twice; with times at full size, before they are resized."""
    if not draws:
        folder = tiny_ernie.build(tmp_path / "plain", draw_on_frames=False)
    adapter, clip = load_adapter(folder), as_sent(media["video"])
    plan = adapter.plan_video(clip.facts, FrameSampling(num_frames=5))  # type: ignore[union-attr]
    source = clip.frames[list(plan.frame_indices)]  # type: ignore[union-attr]
    assert plan.resized != source.shape[1:3], "frames were meant to be resized"
    assert plan.size == (tuple(source.shape[1:3]) if draws else plan.resized)
    processor = AutoProcessor.from_pretrained(folder)
    wanted = processor_inputs(processor, [media["video"]], QUESTION, FrameSampling(num_frames=5))
    frames = source if draws else resized(source, plan)
    before = frames.clone()
    runs = [adapter.preprocess(frames[at : at + 2], plan.part(at // 2, at // 2 + 1)) for at in (0, 2, 4)]
    assert torch.equal(torch.cat(runs), wanted["pixel_values_videos"])
    assert torch.equal(frames, before), "a stage may show the same frames again"
    prompt = adapter.plan_prompt([plan], QUESTION)
    assert prompt.token_ids.tolist() == wanted["input_ids"][0].tolist()
    assert wanted["video_grid_thw"].tolist() == [[6, plan.grid.h, plan.grid.w]]


def resized(frames: torch.Tensor, plan: MediaPlan) -> torch.Tensor:
    channels = frames.permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(channels, plan.size, mode="bicubic", antialias=True)
    return made.permute(0, 2, 3, 1)


def test_frames_with_other_times_on_them_are_other_contents(folder: Path) -> None:
    """Of a list, whose frames are the same and whose times a client names."""
    adapter = load_adapter(folder)
    facts = VideoFacts(4, 1.0, 90, 120, is_frame_list=True)
    plans = [
        adapter.plan_video(facts, FrameSampling(listed=ListedTimes(fps=fps, total_num_frames=9)))
        for fps in (1.0, 2.0)
    ]
    plans[1] = replace(plans[1], unit_span_s=plans[0].unit_span_s)
    assert plans[0].times_s == plans[1].times_s
    assert [plan.drawn_times_s for plan in plans] == [(0.0, 1.0, 2.0, 3.0), (0.0, 0.5, 1.0, 1.5)]
    groups = [plan_groups([plan], ["clip"], model="", group_tokens=1) for plan in plans]
    assert groups[0][1].spec.key != groups[1][1].spec.key
    frames = torch.zeros(2, 90, 120, 3, dtype=torch.uint8)
    names = [unit_name(groups[0][1].spec.key, each[1].plan, frames) for each in groups]
    assert names[0] != names[1]
    prompts = [adapter.plan_prompt([plan], QUESTION) for plan in plans]
    assert prompts[0].token_ids.tolist() == prompts[1].token_ids.tolist()
    first, second = (prompt_identity(prompt, ["clip"]).rows for prompt in prompts)
    start = prompts[0].media[0].units[0].offset
    assert first[:start].tolist() == second[:start].tolist()
    assert first[start].tolist() != second[start].tolist()


def test_text_behind_a_long_video_is_where_the_authors_place_it(folder: Path) -> None:
    """They count on from the largest position; transformers from behind rows and columns (decision 9)."""
    starts = []
    for layout in ("authors", "transformers"):
        adapter = load_adapter(folder, positions=layout)  # type: ignore[arg-type]
        plan = adapter.plan_video(VideoFacts(40, 2.0, 90, 120), FrameSampling(num_frames=40))
        prompt = adapter.plan_prompt([plan], QUESTION)
        (item,) = prompt.media
        first, behind = item.units[0].offset, item.units[-1].stop
        starts.append(int(prompt.positions[0, behind] - prompt.positions[0, first]))
        assert prompt.positions[:, first].tolist() == [first] * 3
    assert starts == [20, 4]


# What is refused


def test_what_it_cannot_do_is_refused_in_one_line(folder: Path) -> None:
    adapter = load_adapter(folder)
    with pytest.raises(UnsupportedModelError, match="received tower_share for an ernie4_5_vl_moe model"):
        adapter.tower_merger(torch.nn.Identity(), TowerMerge(0.5))
    with pytest.raises(RequestError, match="allowed: none, the authors of this model have no such limit"):
        adapter.check_pixels([("video", PixelLimits(cap_pixels_per_frame=True))], None)
    with pytest.raises(RequestError, match=r"num_frames.* must be 2 <= x <= 180"):
        adapter.plan_video(VideoFacts(40, 2.0, 90, 120), FrameSampling(num_frames=1))
    with pytest.raises(UnsupportedMediaError, match="hears nothing"):
        _ = adapter.audio
    with pytest.raises(UnsupportedModelError, match="allowed: --model-impl native"):
        load_adapter(folder, pixels=PixelSettings(model_impl="transformers"))
    with pytest.raises(UnsupportedModelError, match="a tensor parallel size of 2 for the language model"):
        check_divisible(load_reference(folder), 2)
