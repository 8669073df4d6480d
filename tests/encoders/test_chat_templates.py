"""Chat templates in every form that transformers reads, and those that want texts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer

from epd.chat import ChatMessage, ContentPart, one_turn, template_options, text_message
from epd.encoders import Adapter, load_adapter
from epd.errors import ModelError, RequestError
from tests.encoders.families import Family
from tests.tiny_audio import build_qwen2_audio
from tests.tiny_models import CHAT_TEMPLATE

# transformers leaves the files of additional templates to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TOOLS = ChatMessage("tools", (ContentPart("text", json.dumps(TOOL)),))
ASK = text_message("user", "When?")
# As many fine-tunes have it: contents are added to texts.
OF_TEXTS = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def marked(mark: str, *, lists_tools: bool = False) -> str:
    listed = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" if lists_tools else ""
    return f"{mark}{listed}{CHAT_TEMPLATE}"


@pytest.fixture
def folder(families: dict[str, Family], tmp_path: Path) -> Path:
    """A folder of Qwen2.5-VL without weights and without a template."""
    return without_template(families["qwen2_5_vl"].path, tmp_path)


def without_template(path: Path, target: Path) -> Path:
    shutil.copytree(
        path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.jinja")
    )
    return target


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def config_with(folder: Path, file: str, templates: Any) -> dict[str, str]:
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    return {file: json.dumps({**config, "chat_template": templates})}


def prompt(adapter: Adapter, *messages: ChatMessage) -> str:
    return str(adapter.tokenizer.decode(adapter.plan_chat([], messages).token_ids))


JINJA = {"chat_template.jinja": marked("jinja ")}
OTHERS = {"additional_chat_templates/tool_use.jinja": marked("tools ", lists_tools=True)}
NAMED = [
    {"name": "default", "template": marked("named ")},
    {"name": "tool_use", "template": marked("tools ", lists_tools=True)},
]
FORMS: dict[str, Callable[[Path], dict[str, str]]] = {
    "one file": lambda _: JINJA,
    "several files": lambda _: JINJA | OTHERS,
    "a file of JSON": lambda _: {"chat_template.json": json.dumps({"chat_template": marked("json ")})},
    "JSON beside a file": lambda folder: JINJA | FORMS["a file of JSON"](folder),
    "the tokenizer's": lambda folder: config_with(folder, "tokenizer_config.json", marked("tokenizer ")),
    "the tokenizer's beside a file": lambda folder: JINJA | FORMS["the tokenizer's"](folder),
    "the processor's beside a file": lambda folder: (
        JINJA | config_with(folder, "processor_config.json", marked("processor "))
    ),
    "several of the tokenizer": lambda folder: config_with(folder, "tokenizer_config.json", NAMED),
    "several of the tokenizer beside a file": lambda folder: (
        JINJA | FORMS["several of the tokenizer"](folder)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_default_template_is_the_one_of_transformers(folder: Path, form: str) -> None:
    write(folder, FORMS[form](folder))
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    renderer = processor if processor.chat_template else processor.tokenizer
    messages = [{"role": "user", "content": [{"type": "text", "text": "When?"}]}]
    expected = renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt(load_adapter(folder), ASK) == expected


@pytest.mark.parametrize("form", ["several files", "several of the tokenizer"])
def test_tools_are_listed_by_the_template_for_them(folder: Path, form: str) -> None:
    """The truth is the tokenizer's: transformers' processor would drop the tools without a word."""
    write(folder, FORMS[form](folder))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": [{"type": "text", "text": "When?"}]}]
    expected = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert expected.startswith("tools [now]")
    assert prompt(load_adapter(folder), TOOLS, ASK) == expected


def test_a_processors_default_that_lists_tools_is_kept(folder: Path) -> None:
    write(folder, OTHERS | {"chat_template.jinja": marked("own ", lists_tools=True)})
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": [{"type": "text", "text": "When?"}]}]
    expected = processor.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert expected.startswith("own [now]")
    assert prompt(load_adapter(folder), TOOLS, ASK) == expected


def test_several_without_a_default_are_named(folder: Path) -> None:
    write(folder, OTHERS)
    with pytest.raises(ModelError, match="has the chat templates tool_use and none is the default"):
        load_adapter(folder)


def test_a_folder_without_a_template_is_refused_when_it_is_opened(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"has no chat template; add a chat_template\.jinja"):
        load_adapter(folder)


IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
TEXTS: dict[str, str] = {
    "added": OF_TEXTS,
    "printed": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "in JSON": "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}\n{% endfor %}",
    "trimmed": "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "by a macro": "{% macro say(x) %}{{ '<' + x + '>' }}{% endmacro %}"
    "{% for m in messages %}{{ say(m.content) }}{% endfor %}",
    "by a name": "{% set ns = namespace(c='') %}{% for m in messages %}{% set ns.c = m.content %}"
    "{{ ns.c.strip() }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEXTS)
def test_a_template_that_wants_texts_gets_them(folder: Path, template: str) -> None:
    """Media are what the family's own template writes for them, where they were sent."""
    write(folder, {"chat_template.jinja": TEXTS[template]})
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    adapter = load_adapter(folder)
    image = adapter.plan_image(56, 56)
    said = [{"role": "user", "content": f"{IMAGE}{IMAGE}What?"}]
    expected = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    plan = adapter.plan_chat([image, image], one_turn(["image", "image"], "What?"))
    assert adapter.tokenizer.decode(plan.token_ids) == expected.replace(
        "<|image_pad|>", "<|image_pad|>" * image.num_tokens
    )
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "When?"}]
    expected = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert prompt(adapter, text_message("system", "Be kind."), ASK) == expected


def test_roles_are_told_apart(folder: Path) -> None:
    """A system message added to texts, and parts of the user: as some published templates have it."""
    parts = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ 'S:' + m.content }}{% else %}U:" + parts + ";"
        "{% endif %}{% endfor %}"
    )
    write(folder, {"chat_template.jinja": template})
    assert prompt(load_adapter(folder), text_message("system", "Be kind."), ASK) == "S:Be kind.U:When?;"


def test_every_family_fills_texts_with_its_own_words(family: Family, tmp_path: Path) -> None:
    folder = without_template(family.path, tmp_path)
    write(folder, {"chat_template.jinja": OF_TEXTS})
    adapter = load_adapter(folder)
    media = [adapter.plan_image(56, 56)]
    theirs = family.adapter.plan_chat(media, one_turn(["image"], "What?"))
    ours = adapter.plan_chat(media, one_turn(["image"], "What?"))
    assert len(ours.media[0].units) == len(theirs.media[0].units)
    assert ours.usage(1).visual_tokens == theirs.usage(1).visual_tokens


def test_sound_is_counted_in_texts(tmp_path: Path) -> None:
    folder = build_qwen2_audio(tmp_path)
    (folder / "chat_template.jinja").write_text(OF_TEXTS)
    adapter = load_adapter(folder)
    clips = [adapter.plan_audio(16_000)] * 2
    plan = adapter.plan_chat(clips, one_turn(["audio", "audio"], "What?"))
    text = adapter.tokenizer.decode(plan.token_ids).replace("<|AUDIO|>", "")
    assert "user\nAudio 1: <|audio_bos|><|audio_eos|>\nAudio 2: <|audio_bos|><|audio_eos|>\nWhat?" in text


READING = "{% if add_vision_id %}{{ add_vision_id }}{% endif %}" + CHAT_TEMPLATE


def test_variables_reach_a_template_that_reads_them(folder: Path) -> None:
    write(folder, {"chat_template.jinja": READING})
    adapter = load_adapter(folder)
    plain = prompt(adapter, ASK)
    assert prompt(adapter, *template_options({"add_vision_id": True}), ASK) == "True" + plain
    assert prompt(adapter, *template_options({"enable_thinking": False}), ASK) == plain
    assert prompt(adapter, *template_options({}), ASK) == plain


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "chat_template", "add_generation_prompt"])
def test_what_rendering_takes_itself_is_no_variable(name: str) -> None:
    with pytest.raises(RequestError, match=f"received {name} in chat_template_kwargs; allowed: variables"):
        template_options({name: True})


@pytest.mark.parametrize("value", ["<|image_pad|>", {"deep": ["<|image_pad|>"]}])
def test_a_variable_cannot_stand_for_media(folder: Path, value: object) -> None:
    write(folder, {"chat_template.jinja": READING})
    with pytest.raises(RequestError, match=r"contains <\|image_pad\|>"):
        prompt(load_adapter(folder), *template_options({"add_vision_id": value}), ASK)


def test_a_variable_that_breaks_the_template_is_the_clients(folder: Path) -> None:
    write(folder, {"chat_template.jinja": "{% if n %}{{ n + 1 }}{% endif %}" + CHAT_TEMPLATE})
    with pytest.raises(RequestError, match="chat template refuses messages"):
        prompt(load_adapter(folder), *template_options({"n": "text"}), ASK)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{% for",
        "{{ x.y() }}",
    ],
)
def test_a_template_that_fails_for_a_text_is_refused_when_it_is_opened(folder: Path, template: str) -> None:
    write(folder, {"chat_template.jinja": template})
    with pytest.raises(ModelError, match=r"^[^\n]*no question can be asked[^\n]*get another chat_template"):
        load_adapter(folder)


def test_a_kind_that_fails_is_said_and_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Here images, system messages and tools; videos and texts are answered."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for p in m.content %}{% if p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
        "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    write(folder, {"chat_template.jinja": template})
    with caplog.at_level(logging.WARNING):
        adapter = load_adapter(folder)
    said = [record.getMessage().partition(": ")[0].partition("takes no ")[2] for record in caplog.records]
    assert said == ["images", "several images", "messages of the system", "tools"]
    assert prompt(adapter, ASK) == "When?"
    with pytest.raises(RequestError, match="placed 0 of 1 media"):
        adapter.plan_chat([adapter.plan_image(56, 56)], one_turn(["image"], "What?"))
    with pytest.raises(RequestError, match="no system"):
        prompt(adapter, text_message("system", "Be kind."), ASK)
