"""Qwen2.5-Omni as it is published: its thinker's tokens equal those of `generate`, natively."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from epd import LLM, video
from epd.encoders import FrameSampling, load_adapter
from epd.encoders.families.qwen2_5_vl import Qwen2_5VLAdapter
from epd.engine_config import EngineConfig
from epd.errors import ModelError
from epd.serve_app.verification import verify
from epd.stages.loading.weight_files import write_weights
from epd.stages.loading.weights import WholeModel, load_role
from epd.stages.placement import CPU_FLOAT32
from tests.colocated import ColocatedPipeline
from tests.models import tiny_omni
from tests.reference import MAX_TOKENS, generated_as_it_is, processor_inputs

QUESTION = "What is shown?"
NUM_FRAMES = 6
SAMPLING = FrameSampling(num_frames=NUM_FRAMES)
CASES = ((), ("image",), ("wide_image", "image"), ("video",), ("video", "image"))


@pytest.fixture(scope="module")
def thinker() -> Any:
    return tiny_omni.thinker()


@pytest.fixture(scope="module")
def folder(thinker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_omni.write(tmp_path_factory.mktemp("omni") / "model", thinker)


def expected(thinker: Any, folder: Path, paths: list[Path]) -> tuple[int, ...]:
    """What transformers answers, told the seconds of two frames, which its processor takes for one."""
    inputs = processor_inputs(AutoProcessor.from_pretrained(folder), paths, QUESTION, SAMPLING)
    clips = [video.probe(path) for path in paths if path.suffix == ".mp4"]
    seconds = [2 * clip.num_frames / clip.fps / NUM_FRAMES for clip in clips]
    if seconds:
        inputs["video_second_per_grid"] = torch.tensor(seconds)
    return generated_as_it_is(thinker, inputs)


@pytest.mark.parametrize("names", CASES, ids="-".join)
def test_tokens_equal_generate(
    thinker: Any, folder: Path, media: dict[str, Path], names: tuple[str, ...]
) -> None:
    paths = [media[name] for name in names]
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    answer = pipeline.ask(paths, QUESTION, num_frames=NUM_FRAMES, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(thinker, folder, paths)


def test_split_over_workers_from_a_cache(thinker: Any, folder: Path, media: dict[str, Path]) -> None:
    tokens = expected(thinker, folder, [media["video"]])
    with LLM(folder, topology="2e1p1d", max_chunk_tokens=64, num_kv_tokens=4096) as llm:
        answers = [
            llm.ask(media["video"], QUESTION, frames=NUM_FRAMES, max_tokens=MAX_TOKENS) for _ in range(2)
        ]
        text = load_adapter(folder).tokenizer.decode(tokens, skip_special_tokens=True)
        assert [each.text for each in answers] == [text] * 2


def test_epd_verify_says_equal(folder: Path, media: dict[str, Path]) -> None:
    reports = verify(folder, [media["image"], media["video"]], num_frames=NUM_FRAMES)
    assert [report.is_equal for report in reports] == [True] * 3


def test_it_is_read_as_qwen2_5_vl(folder: Path, thinker: Any) -> None:
    adapter = load_adapter(folder)
    assert isinstance(adapter, Qwen2_5VLAdapter)
    config = adapter.checkpoint.config
    assert config.vision_config.tokens_per_second == thinker.config.position_id_per_seconds == 25
    assert [config.image_token_id, config.video_token_id] == [
        thinker.config.image_token_id,
        thinker.config.video_token_id,
    ]
    # The limits of frames that its processor gives with each call.
    assert dict(adapter.checkpoint.processor.video_processor.size) == {
        name: size * 28 * 28 for name, size in (("shortest_edge", 128), ("longest_edge", 768))
    }


def test_workers_may_map_it(folder: Path, tmp_path: Path) -> None:
    write_weights(folder, torch.float32, tmp_path / "weights")
    mapped = WholeModel(folder, CPU_FLOAT32, tmp_path / "weights").part("encode").state_dict()
    read = load_role(folder, "encode", CPU_FLOAT32).model.state_dict()
    assert mapped.keys() == read.keys()
    assert all(torch.equal(mapped[name], read[name]) for name in read)
    assert not [name for name in read if "audio" in name or "talker" in name]


@pytest.mark.parametrize(
    ("change", "said"),
    [(None, r"1 parts of \S+\.attn\.qkv\.bias are missing"), (torch.zeros(8), r"part 1 of \S+ has shape")],
    ids=["missing", "of another size"],
)
def test_keys_of_the_tower_that_do_not_fit(
    folder: Path, tmp_path: Path, change: torch.Tensor | None, said: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["thinker.visual.blocks.1.attn.k.bias"]
    if change is not None:
        tensors["thinker.visual.blocks.1.attn.k.bias"] = change
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        load_role(tmp_path, "encode", CPU_FLOAT32)
