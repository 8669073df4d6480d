"""Published checkpoints in full size and without memory: what their configurations and files say, we read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from epd.encoders.names import WeightSet, is_wanted, name_in_model
from epd.encoders.quantization import read_quantization
from epd.encoders.registry import ADAPTERS, load_adapter
from epd.errors import UnsupportedModelError
from epd.sampling_params import SamplingParams
from epd.serve_app.worker.worker_stages import embedding_layout
from epd.stages.attention.support import check_attention
from epd.stages.decoder.text_model import text_model
from epd.stages.engine.generation import generation_settings
from epd.stages.engine.model_runner import kv_layouts
from epd.stages.loading.weights import load_role, prune, skeleton
from epd.stages.placement import CPU_FLOAT32
from tests import ROOT
from tests.models.files import known_names, parts_in_files
from tests.models.page import PAGE, page
from tests.models.published import PUBLISHED, Config, Published
from tests.tiny_models import build_qwen3_vl, load_reference

BF16 = torch.bfloat16
ROLES: tuple[WeightSet, ...] = ("encode", "language")
# generation_config.json of each family, as published.
GENERATION: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "repetition_penalty": 1.05,
        "temperature": 0.000001,
    },
    "qwen3_vl": {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "repetition_penalty": 1.0,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    },
    "internvl": {"eos_token_id": 151645, "max_length": 32768},
    "llava_onevision": {"bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643},
    "smolvlm": {"bos_token_id": 1, "eos_token_id": 49279, "pad_token_id": 2},
}
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
ENDS = {"qwen2_5_vl": {151645, 151643}, "qwen3_vl": {151645, 151643}, "smolvlm": {49279}}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint. folder: holds its config.json. model: in full size, without memory."""

    name: str
    published: Published
    folder: Path
    config: Any
    model: Any

    @property
    def text(self) -> Config:
        """The fields of its language model."""
        text: Config = self.published.config.get("text_config", self.published.config)
        return text


@pytest.fixture(params=PUBLISHED, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    published, folder = PUBLISHED[request.param], tmp_path_factory.mktemp("published")
    config = written(published.config, folder)
    return Checkpoint(request.param, published, folder, config, skeleton(config, BF16))


def written(config: Config, folder: Path) -> Any:
    """What transformers reads from a config.json."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def test_names_in_the_files_are_those_of_the_model(checkpoint: Checkpoint) -> None:
    tensors, published = checkpoint.model.state_dict(), checkpoint.published
    assert all(tensor.is_meta for tensor in checkpoint.model.parameters())
    mine = tensors.keys() - (set() if published.has_head else {"lm_head.weight"})
    parts = {
        (part, name): tensor.numel()
        for name in mine
        for part, tensor in parts_in_files(checkpoint.name, name, tensors[name])
    }
    assert set(known_names(checkpoint.name)) <= {part for part, _ in parts}
    assert {(part, name_in_model(part, tensors.keys())) for part, _ in parts} == set(parts)
    assert published.num_parameters in (None, sum(parts.values()))


def test_roles_share_no_tensor_and_miss_none(checkpoint: Checkpoint) -> None:
    parts = {role: skeleton(checkpoint.config, BF16) for role in ROLES}
    for role, part in parts.items():
        prune(part, role)
    names = {role: set(part.state_dict()) for role, part in parts.items()}
    assert kv_layouts(parts["language"])[0][0] == kv_layouts(checkpoint.model)[0][0]
    whole = set(checkpoint.model.state_dict())
    assert names["encode"] == {name for name in whole if is_wanted(name, "encode")}
    assert names["language"] == whole - names["encode"]
    assert "lm_head.weight" in names["language"]


def test_the_language_model_is_one_that_our_decoder_computes(checkpoint: Checkpoint) -> None:
    """So its layers are fused, captured and shared; InternVL3 and InternVL3.5 with experts, too."""
    assert text_model(checkpoint.model.get_decoder()) is not None


def test_keys_and_values_take_the_published_bytes(checkpoint: Checkpoint) -> None:
    layout = kv_layouts(checkpoint.model)[0][0]
    assert layout.bytes_per_token == checkpoint.published.kv_bytes_per_token
    num_layers = len(checkpoint.model.get_decoder().layers)
    assert layout.num_layers == checkpoint.text["num_hidden_layers"] == num_layers


def test_embeddings_are_as_wide_as_the_language_model(checkpoint: Checkpoint) -> None:
    deepstack = checkpoint.published.config["vision_config"].get("deepstack_visual_indexes", ())
    layout = embedding_layout(checkpoint.config, BF16)
    width = checkpoint.model.get_input_embeddings().weight.shape[1]
    assert (layout.num_channels, layout.num_deepstack) == (width, len(deepstack))


def test_a_head_that_is_not_stored_is_tied(checkpoint: Checkpoint) -> None:
    is_tied = checkpoint.config.tie_word_embeddings
    assert checkpoint.published.has_head or is_tied
    # InternVL's configurations do not say, and transformers takes them for tied: a stored head comes first.
    assert not checkpoint.published.has_head or not is_tied or checkpoint.config.model_type == "internvl"


def test_attention_and_weights_are_supported(checkpoint: Checkpoint) -> None:
    assert checkpoint.config.model_type in ADAPTERS
    check_attention(checkpoint.config)
    assert read_quantization(checkpoint.folder) is None


def test_generation_is_as_the_checkpoint_says(checkpoint: Checkpoint) -> None:
    family = checkpoint.config.model_type.removesuffix("_moe")
    text = json.dumps(GENERATION[family])
    (checkpoint.folder / "generation_config.json").write_text(text, encoding="utf-8")
    adapter: Any = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=7))
    settings = generation_settings(checkpoint.folder, adapter)
    assert settings.eos_ids == ENDS.get(family, {151645})
    own = {name: value for name, value in GENERATION[family].items() if name in SAMPLED}
    assert settings.sampling == SamplingParams(**own)
    assert settings.context_tokens == checkpoint.published.context_tokens


@pytest.mark.parametrize(
    "ends", [{"eos_token_id": [5, 6]}, {"text_config": {"eos_token_id": [7, 8]}}, {}], ids=list
)
def test_ends_are_those_of_config_json_where_nothing_else_says_them(
    tmp_path: Path, ends: dict[str, Any]
) -> None:
    folder = build_qwen3_vl(tmp_path)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in config["text_config"].items() if name != "eos_token_id"}
    changed = config | ends | {"text_config": text | ends.get("text_config", {})}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    theirs = load_reference(folder).generation_config.eos_token_id
    adapter: Any = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=9))
    assert generation_settings(folder, adapter).eos_ids == frozenset(theirs or [9])


def test_rotation_is_as_the_keys_of_its_release_say(checkpoint: Checkpoint) -> None:
    text, head_dim = checkpoint.text, kv_layouts(checkpoint.model)[0][0].head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = checkpoint.model.get_decoder().rotary_emb.inv_freq
    torch.testing.assert_close(inv_freq, 1.0 / text["rope_theta"] ** exponents)
    found = checkpoint.config.get_text_config().rope_parameters
    assert found.get("mrope_section") == (text.get("rope_scaling") or {}).get("mrope_section")


def test_old_and_new_keys_of_the_rotation_say_the_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`rope_scaling` and `rope_theta` of the files; `rope_parameters` is what transformers 5 writes."""
    text, config = dict(checkpoint.text), checkpoint.published.config
    scaling = {"rope_type": "default", **(text.pop("rope_scaling", None) or {})}
    text["rope_parameters"] = scaling | {"rope_theta": text.pop("rope_theta")}
    new = config | {"text_config": text} if "text_config" in config else text
    found, again = (
        {key: value for key, value in each.get_text_config().rope_parameters.items() if key != "type"}
        for each in (checkpoint.config, written(new, tmp_path))
    )
    assert found == again


@pytest.mark.parametrize("place", ["whole", "text_config"])
@pytest.mark.parametrize("opened", [load_adapter, lambda path: load_role(path, "language", CPU_FLOAT32)])
def test_weights_quantised_by_another_method_are_refused_in_one_line(
    place: str, opened: Callable[[Path], Any], tmp_path: Path
) -> None:
    settings = {"bits": 4, "group_size": 128, "quant_method": "gptq", "desc_act": True}
    published = PUBLISHED["Qwen3-VL-8B"].config
    text = published["text_config"] | ({} if place == "whole" else {"quantization_config": settings})
    whole = {"quantization_config": settings} if place == "whole" else {}
    written(published | {"text_config": text} | whole, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"by 'gptq' with desc_act True .*allowed: FP8") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_page_of_models_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(PAGE.read_text(encoding="utf-8")), "run tests.models.page"


def test_the_short_table_has_each_family_and_the_largest_model_that_fits_a_card() -> None:
    """Of docs/models.md, by the weights and the room in the whole table."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    counted = {row[0]: row for row in rows if len(row) >= 8 and row[0].partition("-")[2]}
    wanted: dict[str, list[str]] = {}
    for name in counted:
        ((family, size),) = re.findall(r"^(.+?)-(E?\d[\d.]*(?:[BM].*)?)$", name)
        wanted.setdefault(family, []).append(size)
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.partition("## Which checkpoints load")[2].partition("[checkpoints.md]")[0]
    short = re.findall(r"^\| (.+) \| (E?\d.+) \| (.+) \|$", table, flags=re.MULTILINE)
    shown = {family: (sizes.split(", "), largest) for family, sizes, largest in short}
    assert {family: sizes for family, (sizes, _) in shown.items()} == wanted
    for family, (sizes, largest) in shown.items():
        fit = [size for size in sizes if counted[f"{family}-{size}"][-1] != "no"]
        of_size = {size: float(counted[f"{family}-{size}"][3]) for size in fit}
        assert largest == max(fit, key=lambda size: of_size[size], default="none"), family
