"""A folder without processor files gets those that its family was published with, and a warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers.models.smolvlm import processing_smolvlm

from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.published import PUBLISHED
from epd.errors import ModelError
from tests.encoders.tiny_tiles import BUILDERS
from tests.models.processors import PROCESSORS

CHECKPOINTS = {"qwen2_5_vl": "Qwen2.5-VL-7B", "qwen3_vl": "Qwen3-VL-8B"}
FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
CLIP = VideoFacts(90, 30.0, 1080, 1920)


def bare(name: str, folder: Path) -> Path:
    """A tiny checkpoint without processor files."""
    BUILDERS[name](folder)
    for file in FILES:
        (folder / file).unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_sizes_are_the_published_ones(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = bare(name, tmp_path / name)
    before = sorted(file.name for file in folder.iterdir())
    adapter = load_adapter(folder)
    assert f"the settings that {name} was published with are used" in caplog.text
    assert sorted(file.name for file in folder.iterdir()) == before

    named = shutil.copytree(folder, tmp_path / "named")
    for file, content in PROCESSORS[CHECKPOINTS[name]].files.items():
        (named / file).write_text(json.dumps(content))
    published = load_adapter(named)
    assert adapter.plan_image(3000, 4000) == published.plan_image(3000, 4000)
    assert adapter.plan_video(CLIP, FrameSampling()) == published.plan_video(CLIP, FrameSampling())


def test_every_setting_that_is_known_of_a_published_file_is_there() -> None:
    for name, checkpoint in CHECKPOINTS.items():
        for file, content in PROCESSORS[checkpoint].files.items():
            assert content.items() <= PUBLISHED[name][file].items()


def test_patches_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = bare("qwen2_5_vl", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_size"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has no preprocessor_config.json.*copy it"):
        load_adapter(folder)


def test_a_family_whose_files_are_not_known_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"copy it, and .* from the model that it was trained from"):
        load_adapter(bare("internvl", tmp_path / "model"))


def test_a_processor_file_without_images_lacks_them(tmp_path: Path) -> None:
    folder = bare("qwen2_5_vl", tmp_path / "model")
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    assert load_adapter(folder).plan_image(280, 280).num_tokens == 100


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_processor_that_cannot_be_made_has_its_own_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The tokenizer does not read these files; the class of SmolVLM's processor wants num2words."""
    folder = BUILDERS["smolvlm"](tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | {"chat_template": template}))
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    assert load_adapter(folder).checkpoint.chat_template == template
