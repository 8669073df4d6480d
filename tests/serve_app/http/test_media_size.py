"""Media have the size that a request asks for, in every cache too, as in transformers' processor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from encoders import FrameSampling
from tests.encoders.tiny_tiles import BUILDERS
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
    for asked in [*sizes, *sizes]:
        body = body_of(
            *map(part_of, paths),
            max_tokens=MAX_TOKENS,
            mm_processor_kwargs={**asked, "num_frames": SAMPLING.num_frames},
        )
        num_tokens, answer = served.truth(paths, asked)
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
