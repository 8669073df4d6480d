"""Media have the size that a request asks for, in every cache too, as in transformers' processor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from epd import video
from epd.encoders import FrameSampling
from epd.models import embedded_model_path
from epd.pixel_limits import LOW_DETAIL_PIXELS
from tests.encoders.families import Family, Picture
from tests.encoders.tiny_tiles import BUILDERS
from tests.media import write_image
from tests.reference import MAX_TOKENS, generated, processor_inputs
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.real_app import RealApp, real_app
from tests.tiny_models import load_reference

TEXT = "What is shown?"
SAMPLING = FrameSampling(num_frames=4)
# Each asked in turn: what one leaves in the caches is of no use to the next, and is of use to its like.
SIZES: list[JSON] = [
    {},
    {"max_pixels": 4000},
    {"size": {"shortest_edge": 1600, "longest_edge": 4500}},
    {"min_pixels": 6300},
]


@dataclass(frozen=True, slots=True)
class Served:
    """A running application, and transformers' model and processor of the same checkpoint."""

    app: RealApp
    model: Any
    processor: Any

    def truth(self, paths: list[Path], asked: JSON) -> tuple[int, str]:
        """The tokens of the prompt and the answer."""
        inputs = processor_inputs(self.processor, paths, TEXT, SAMPLING, **asked)
        answer = self.processor.tokenizer.decode(generated(self.model, inputs), skip_special_tokens=True)
        return inputs["input_ids"].shape[1], answer


@pytest.fixture(
    scope="module",
    params=[("shapes-vl", "1e1p1d"), ("qwen2_5_vl", "1epd"), ("qwen3_vl", "1e1p1d")],
    ids=lambda each: each[0],
)
def served(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[Served]:
    name, topology = request.param
    path = checkpoints[name]
    processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    with real_app(path, topology) as app:
        yield Served(app, load_reference(path), processor)
        app.wait_until_empty()
        assert app.num_workers_lost == 0


@pytest.fixture(scope="module")
def app(checkpoints: dict[str, Path]) -> Iterator[RealApp]:
    with real_app(checkpoints["shapes-vl"], "1epd") as app:
        yield app
        app.wait_until_empty()


def part_of(path: Path) -> JSON:
    if path.suffix == ".mp4":
        return video_part(data_url(path, "video/mp4"))
    return image_part(data_url(path, "image/png"))


def body_of(*parts: JSON, **more: Any) -> JSON:
    content = [*parts, {"type": "text", "text": TEXT}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **more}


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
@pytest.mark.parametrize("names", [("image",), ("video",), ("wide_image", "video")], ids=str)
def test_one_medium_in_several_sizes(served: Served, media: dict[str, Path], names: tuple[str, ...]) -> None:
    paths = [media[name] for name in names]
    has_size_alone = names == ("video",) and served.model.config.model_type == "qwen3_vl"
    sizes = [asked for asked in SIZES if not (has_size_alone and {"min_pixels", "max_pixels"} & asked.keys())]
    numbers = set()
    truths = [served.truth(paths, asked) for asked in sizes]
    for asked, (num_tokens, answer) in zip(sizes * 2, truths * 2, strict=True):
        body = body_of(
            *map(part_of, paths),
            max_tokens=MAX_TOKENS,
            mm_processor_kwargs={**asked, "num_frames": SAMPLING.num_frames},
        )
        estimate = served.app.http.post("/v1/epd/estimate", json=body).json()
        found = served.app.http.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        assert found.json()["choices"][0]["message"]["content"] == answer, asked
        assert found.json()["usage"]["prompt_tokens"] == estimate["prompt_tokens"] == num_tokens
        assert found.json()["epd"]["visual_tokens"] == estimate["visual_tokens"]
        numbers.add(num_tokens)
    assert len(numbers) >= 2


def refusal(app: RealApp, body: JSON) -> str:
    responses = [app.http.post(path, json=body) for path in ("/v1/chat/completions", "/v1/epd/estimate")]
    assert [each.status_code for each in responses] == [400, 400], responses[0].text
    message: str = responses[0].json()["error"]["message"]
    assert responses[1].json()["error"]["message"] == message
    return message


@pytest.mark.parametrize("name", ["image", "video"])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_pixels": 13_001}, "max_pixels 13,001; allowed: at most 13,000 pixels"),
        ({"min_pixels": 13_001}, "min_pixels 13,001; allowed: at most 13,000 pixels"),
        ({"max_pixels": 2**63 - 1}, "allowed: at most 13,000"),
        ({"size": {"shortest_edge": 1, "longest_edge": 13_001}}, "size.longest_edge 13,001"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "raise the larger limit"),
        ({"min_pixels": 9, "max_pixels": 8}, "raise the larger limit"),
        ({"max_pixels": 2**63}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": "4000"}, "mm_processor_kwargs.max_pixels"),
        ({"size": {"longest_edge": 4000}}, "mm_processor_kwargs.size.shortest_edge"),
        ({"size": {"height": 40, "width": 40}}, "mm_processor_kwargs.size.shortest_edge"),
        ({"images_kwargs": {"max_pixels": 40}}, "mm_processor_kwargs.images_kwargs: unknown field"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(
    app: RealApp, media: dict[str, Path], name: str, asked: JSON, words: str
) -> None:
    assert words in refusal(app, body_of(part_of(media[name]), mm_processor_kwargs=asked))


def test_the_size_is_no_option_of_reading_a_video(app: RealApp, media: dict[str, Path]) -> None:
    body = body_of(part_of(media["video"]), media_io_kwargs={"video": {"max_pixels": 4000}})
    assert "media_io_kwargs.video.max_pixels: unknown field" in refusal(app, body)


@pytest.mark.parametrize("name", ["internvl", "smolvlm"])
def test_a_family_of_tiles_refuses_it_by_name(tmp_path: Path, media: dict[str, Path], name: str) -> None:
    with real_app(BUILDERS[name](tmp_path / name), "1epd") as app:
        for asked in ({"max_pixels": 4000}, {"size": {"shortest_edge": 1, "longest_edge": 2}}):
            for medium in ("image", "video"):
                message = refusal(app, body_of(part_of(media[medium]), mm_processor_kwargs=asked))
                assert "allowed: none, this model family has tiles of one size" in message
                assert message.startswith("received mm_processor_kwargs.")
        assert app.http.post("/v1/chat/completions", json=body_of(max_tokens=1)).status_code == 200


def detailed(path: Path, detail: str | int | None) -> JSON:
    part = image_part(data_url(path, "image/png"))
    part["image_url"]["detail"] = detail
    return part


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize("name", ["internvl", "smolvlm"])
def test_low_detail_is_one_tile(tmp_path: Path, media: dict[str, Path], name: str) -> None:
    """In turn with high detail: the tile of one is not found in place of the other's first."""
    path = BUILDERS[name](tmp_path / name)
    alone = Family.load(name, path)
    image = Picture(torch.from_numpy(video.load_image(media["wide_image"])))
    pixels = image.pixels.permute(2, 0, 1)
    images = [[pixels]] if name == "smolvlm" else [pixels]
    option = {"internvl": "crop_to_patches", "smolvlm": "do_image_splitting"}[name]
    with real_app(path, "1e1p1d") as app:
        for detail in ("high", "low", "auto", "low", None, "original"):
            whole = {option: False} if detail == "low" else {}
            inputs = alone.processor(
                text=[alone._text([image], TEXT)], images=images, return_tensors="pt", **whole
            )
            body = body_of(detailed(media["wide_image"], detail), max_tokens=MAX_TOKENS)
            found = app.http.post("/v1/chat/completions", json=body).json()
            answer = alone.processor.tokenizer.decode(
                generated(alone.model, inputs), skip_special_tokens=True
            )
            assert found["choices"][0]["message"]["content"] == answer, detail
            estimate = app.http.post("/v1/epd/estimate", json=body).json()
            num_tokens = inputs["input_ids"].shape[1]
            assert found["usage"]["prompt_tokens"] == estimate["prompt_tokens"] == num_tokens
        app.wait_until_empty()


def test_each_image_has_its_detail(tmp_path: Path) -> None:
    path = shutil.copytree(embedded_model_path(), tmp_path / "model")
    config = json.loads((path / "processor_config.json").read_text())
    config["image_processor"]["size"]["longest_edge"] = 400_000
    (path / "processor_config.json").write_text(json.dumps(config))
    processor = AutoProcessor.from_pretrained(path, local_files_only=True).image_processor
    image = write_image(tmp_path / "large.png", height=640, width=800)
    num_high, num_low = (
        processor.get_number_of_image_patches(640, 800, {"max_pixels": most}) // 4
        for most in (400_000, LOW_DETAIL_PIXELS)
    )
    with real_app(path, "1epd") as app:
        for details in (("low", "high"), ("low",), ("auto",), ("high", "low", None)):
            body = body_of(*(detailed(image, each) for each in details), max_tokens=1)
            expected = sum(num_low if each == "low" else num_high for each in details)
            for route in ("/v1/epd/estimate", "/v1/chat/completions"):
                found = app.http.post(route, json=body).json()
                assert found.get("epd", found)["visual_tokens"] == expected
    assert num_low < num_high


def test_other_details_are_refused(app: RealApp, media: dict[str, Path]) -> None:
    for wrong in ("medium", "", "LOW", 1):
        message = refusal(app, body_of(detailed(media["image"], wrong)))
        assert "image_url.detail" in message
    part = part_of(media["video"])
    part["video_url"]["detail"] = "low"
    assert "video_url.detail: Input should be 'auto', 'high' or 'original'" in refusal(app, body_of(part))


def test_a_family_without_low_detail_refuses_it(tmp_path: Path, media: dict[str, Path]) -> None:
    with real_app(BUILDERS["llava_onevision"](tmp_path / "model"), "1epd") as app:
        message = refusal(app, body_of(detailed(media["image"], "low")))
        assert message.startswith(
            "received detail low; allowed: auto and high, this model family always cuts"
        )
