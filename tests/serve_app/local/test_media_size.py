"""Lines of a batch have media of the size that they ask for, and share only what has the same size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from epd.encoders import FrameSampling
from epd.serve_app.local.own_batch import OwnBackend
from tests.reference import MAX_TOKENS, generated, processor_inputs
from tests.serve_app.local.test_batch import read, run
from tests.tiny_models import load_reference

TEXT = "What is shown?"
SAMPLINGS = {"image": FrameSampling(), "video": FrameSampling(num_frames=4)}


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
@pytest.mark.parametrize("kind", ["image", "video"])
def test_lines_get_media_of_their_size(
    tmp_path: Path, media: dict[str, Path], checkpoints: dict[str, Path], backend: OwnBackend, kind: str
) -> None:
    sizes: dict[str, dict[str, Any]] = {
        "own": {},
        "fewer": {"max_pixels": 4000},
        "size": {"size": {"shortest_edge": 1600, "longest_edge": 2500}},
    }

    def line(name: str, **asked: Any) -> dict[str, Any]:
        parts = [
            {"type": f"{kind}_url", f"{kind}_url": {"url": media[kind].as_uri()}},
            {"type": "text", "text": TEXT},
        ]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": MAX_TOKENS}
        body |= {"temperature": 0, "mm_processor_kwargs": {**asked, "num_frames": SAMPLINGS[kind].num_frames}}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    lines = [line(name, **asked) for name, asked in sizes.items()]
    run(tmp_path, backend, [*lines, line("too many", max_pixels=10**9)])

    path = checkpoints["qwen2_5_vl"]
    processor, model = AutoProcessor.from_pretrained(path, local_files_only=True), load_reference(path)
    found = read(tmp_path / "out.jsonl")
    for name, asked in sizes.items():
        answer = found[name]["response"]["body"]
        inputs = processor_inputs(processor, [media[kind]], TEXT, SAMPLINGS[kind], **asked)
        expected = processor.tokenizer.decode(generated(model, inputs), skip_special_tokens=True)
        assert answer["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
        assert answer["choices"][0]["message"]["content"] == expected
    refused = read(tmp_path / "out.errors.jsonl")
    assert refused.keys() == {"too many"}
    assert "max_pixels 1,000,000,000; allowed: at most" in str(refused["too many"])


def test_a_line_names_no_medium_that_another_sent(
    tmp_path: Path, media: dict[str, Path], backend: OwnBackend
) -> None:
    def line(name: str, **part: Any) -> dict[str, Any]:
        parts = [{"type": "image_url", "uuid": "a", **part}, {"type": "text", "text": TEXT}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    run(tmp_path, backend, [line("sent", image_url={"url": media["image"].as_uri()}), line("named")])
    assert read(tmp_path / "out.jsonl").keys() == {"sent"}
    (refused,) = read(tmp_path / "out.errors.jsonl").values()
    assert "send it again with its URL" in str(refused)
