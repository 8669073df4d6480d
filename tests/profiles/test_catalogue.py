"""Models and devices that profiles are computed for: those of docs/models.md, and those of users.

Modules: `epd/profiles/accelerators.py`, `epd/profiles/analytic.py`, `epd/profiles/configurations.py`,
`epd/profiles/processor_files.py`, `epd/profiles/shapes.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd.errors import RequestError
from epd.profiles.accelerators import DEVICES, load_devices
from epd.profiles.analytic import analytic_profile
from epd.profiles.catalogue import MODELS, model_named
from epd.profiles.configurations import shape_of
from epd.profiles.files import load_profile
from tests import ROOT
from tests.encoders.tiny_molmo import PUBLISHED as MOLMO
from tests.models.processors import PROCESSORS
from tests.models.published import GLM, PUBLISHED, QWEN2_VL, VIDEO_LLAMA
from tests.models.tiny_ernie import PUBLISHED as ERNIE

_GIGA = 10**9
ALL = {**QWEN2_VL, **PUBLISHED, **MOLMO, **ERNIE, **GLM, **VIDEO_LLAMA}


def test_every_published_configuration_is_the_model_of_the_catalogue() -> None:
    """Read from the whole config.json, as a user would give it, and from the catalogue's few fields."""
    for name, published in ALL.items():
        assert shape_of(name.lower(), published.config) == MODELS[name.lower()], name


def test_the_layout_of_internvls_authors_is_the_same_model() -> None:
    config = PUBLISHED["InternVL3-8B"].config
    tower = {**config["vision_config"], "image_size": 448, "patch_size": 14}
    theirs = {"model_type": "internvl_chat", "llm_config": config["text_config"], "vision_config": tower}
    assert shape_of("internvl3-8b", theirs) == MODELS["internvl3-8b"]


def table() -> dict[str, list[str]]:
    """The rows of checkpoints.md, which the models themselves were counted for."""
    text = (ROOT / "benchmarks" / "results" / "checkpoints.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count(" | ") == 7]
    return {row[0]: row for row in rows if row[0] in ALL}


def test_profiles_have_the_weights_of_the_page_of_models() -> None:
    rows = table()
    assert rows.keys() == ALL.keys()
    for name, row in rows.items():
        profile = analytic_profile("h100", name)
        memory = profile.memory
        assert profile.context_tokens == int(row[1].replace(",", "")), name
        assert memory.vision_weight_bytes / _GIGA == pytest.approx(float(row[2]), rel=0.03, abs=0.01), name
        off = 0.03 if name in ERNIE else 0.006  # its routers, which have float32
        assert memory.language_weight_bytes / _GIGA == pytest.approx(float(row[3]), abs=off), name
        assert memory.kv_bytes_per_token == int(row[4].replace(",", "")), name
        assert memory.embedding_bytes_per_token == int(row[5].replace(",", "")), name


def test_experts_are_held_whole_and_computed_in_part() -> None:
    """30 billion parameters in memory, 3 billion in the FLOPs of a token; devices share each expert."""
    profile, dense = analytic_profile("h100", "qwen3-vl-30b-a3b"), analytic_profile("h100", "qwen3-vl-32b")
    assert profile.memory.language_weight_bytes > 0.9 * dense.memory.language_weight_bytes
    assert profile.prefill.cost.per_unit_s < 0.12 * dense.prefill.cost.per_unit_s
    assert any("experts that its tokens choose" in line for line in profile.assumptions)
    two = profile.on(2)
    assert two.decode.cost.experts_s == profile.decode.cost.experts_s / 2
    assert two.decode.cost.active_share == profile.decode.cost.active_share


@pytest.mark.parametrize("name", ["allenai/Molmo2-4B", "baidu/ERNIE-4.5-VL-28B-A3B-PT"])
def test_layers_that_a_server_does_not_share_are_planned_on_one_device(name: str) -> None:
    with pytest.raises(RequestError, match=r"devices cannot share.*allowed is 1"):
        analytic_profile("h100", name).on(2)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B", "qwen2.5-vl-7b"])
def test_names_are_those_that_people_write(name: str) -> None:
    assert model_named(name).name == "qwen2.5-vl-7b"


def test_a_longer_name_is_not_a_shorter_model() -> None:
    assert model_named("internvl3-8b-hf").name == "internvl3-8b"
    assert model_named("Qwen3-VL-30B-A3B-Instruct").name == "qwen3-vl-30b-a3b"
    for name in ("qwen2.5-vl-7bx", "qwen3-vl", "gpt-2"):
        with pytest.raises(RequestError, match="known are"):
            model_named(name)


def test_a_folder_and_a_file_are_models(tmp_path: Path) -> None:
    folder = tmp_path / "Mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-VL-8B"].config))
    for given in (folder, folder / "config.json"):
        profile = load_profile(f"{given}@l40s")
        assert (profile.model, profile.device) == ("mine", "l40s")
        assert profile.memory.kv_bytes_per_token == 147_456
    (folder / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    with pytest.raises(RequestError, match="has no field 'num_attention_heads'"):
        load_profile(f"{folder}@l40s")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(RequestError, match="type 'bert'; allowed are qwen2_vl"):
        load_profile(f"{folder}@l40s")
    (folder / "config.json").write_text("[")
    with pytest.raises(RequestError, match="cannot be read"):
        load_profile(f"{folder}@l40s")


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-8B"])
def test_published_processor_files_say_what_the_catalogue_says(name: str, tmp_path: Path) -> None:
    for file, content in PROCESSORS[name].files.items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].config))
    assert model_named(str(tmp_path)).media == MODELS[name.lower()].media


def test_devices_are_extended_by_a_file(tmp_path: Path) -> None:
    """A user's device, and the user's price of one of the catalogue's."""
    path = tmp_path / "devices.yaml"
    mine = "tflops: 1307, memory_gb: 192, bandwidth_gb_s: 5300, link_gb_s: 448, power_w: 750"
    path.write_text(f"devices:\n  mi300x: {{{mine}, price_per_hour: 2.5, currency: EUR, cores: 16}}\n")
    profile = load_profile("qwen2.5-vl-72b@mi300x", load_devices(path))
    assert profile.memory.device_bytes == 192 * _GIGA
    assert (profile.currency, profile.price_per_hour, profile.cores_per_device) == ("EUR", 2.5, 16)
    assert load_devices(path).named("h100") is DEVICES["h100"]
    with pytest.raises(RequestError, match="known are a100-80gb"):
        load_profile("qwen2.5-vl-72b@mi300x")
    for text, words in (
        ("devices: {x: {tflops: 1}}", "devices.x.memory_gb: Field required"),
        (f"devices: {{x: {{{mine}, price_per_hour: -1}}}}", "greater than 0"),
        (f"devices: {{x: {{{mine}, price_per_hour: 1, colour: red}}}}", "Extra inputs"),
        ("devices: [", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(RequestError, match=words):
            load_devices(path)


def test_more_bandwidth_decodes_faster_and_more_flops_prefill_faster() -> None:
    """In the order of the data sheets."""
    decode = ["l4", "a10g", "l40s", "a100-80gb", "h100", "h200", "b200", "gb200"]
    steps = [analytic_profile(name, "qwen2.5-vl-7b").decode.cost.seconds(1) for name in decode]
    assert steps == sorted(steps, reverse=True)
    prefill = ["a10g", "l4", "a100-80gb", "l40s", "h100", "b200"]
    chunks = [analytic_profile(name, "qwen2.5-vl-7b").prefill.cost.seconds(8192) for name in prefill]
    assert chunks == sorted(chunks, reverse=True)
    assert set(decode) == set(DEVICES)
