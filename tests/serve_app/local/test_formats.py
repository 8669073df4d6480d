"""Lines of a batch may name the format of their answer, as chat requests do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epd.serve_app.local.own_batch import OwnBackend
from tests.serve_app.local.test_batch import read, run


def test_lines_get_answers_in_their_formats(
    tmp_path: Path, media: dict[str, Path], backend: OwnBackend
) -> None:
    def line(name: str, **more: Any) -> dict[str, Any]:
        parts = [
            {"type": "image_url", "image_url": {"url": media["image"].as_uri()}},
            {"type": "text", "text": "What?"},
        ]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 40, **more}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    lines = [
        line("chosen", structured_outputs={"choice": ["red", "blue"]}, temperature=1.5),
        line("number", structured_outputs={"regex": "[0-9]{4}"}, seed=1, temperature=2),
        line("hostile", structured_outputs={"regex": "(((a{1,1000}){1,1000}){1,1000}"}),
        line("free"),
    ]
    run(tmp_path, backend, lines)
    answers = {
        name: record["response"]["body"]["choices"][0]["message"]["content"]
        for name, record in read(tmp_path / "out.jsonl").items()
    }
    assert answers["chosen"] in {"red", "blue"}
    assert len(answers["number"]) == 4
    assert answers["number"].isdecimal()
    assert answers.keys() == {"chosen", "number", "free"}
    assert read(tmp_path / "out.errors.jsonl").keys() == {"hostile"}
