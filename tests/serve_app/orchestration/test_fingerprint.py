"""Requests that take workers down are known by what they ask: prompts of tokens too."""

from __future__ import annotations

from epd.chat import text_message
from epd.serve_app.orchestration.live_answer import fingerprint
from epd.serve_app.service import AnswerRequest


def test_other_tokens_are_another_request() -> None:
    one, same, other = (AnswerRequest(f"r{i}", "tiny", (), prompt=(1, 2 + i // 2)) for i in range(3))
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) != fingerprint(AnswerRequest("r", "tiny", (text_message("user", "x"),)))
