"""A plan says whether its prompt leaves the model thinking: what the template writes last decides."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from epd.chat import text_message
from epd.serve_app.orchestration.request_planner import RequestPlanner
from tests.serve_app.deployments import Question

# As the templates of Qwen3.5 end, in short.
_END = (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)


def test_a_prompt_that_ends_with_the_mark_leaves_the_model_thinking(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    plain = checkpoints["qwen2_5_vl"]
    folder = shutil.copytree(plain, tmp_path / "thinking")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").rstrip() + _END, encoding="utf-8")
    request = Question((), "what is this?").request()
    variables = text_message("template", '{"enable_thinking": false}')
    quiet = replace(request, messages=(variables, *request.messages))
    planner = RequestPlanner(folder, thought_mark="<think>")
    assert [planner.plan(each).thinks for each in (request, quiet)] == [True, False]
    assert not RequestPlanner(folder).plan(request).thinks
    assert not RequestPlanner(plain, thought_mark="<think>").plan(request).thinks
