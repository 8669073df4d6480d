"""LoRA adapters as models of a server: each answers as the checkpoint that it is merged into, by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from epd import LLM
from epd.errors import ModelNotFoundError, RequestError
from epd.models import model_folder
from epd.serve_app.cli.program import app
from tests.media import write_video
from tests.models.lora import Drawn, draw
from tests.serve_app.server import START_S

QUESTION = "Which shape appears first?"
OPTIONS = {"num_threads": 1, "num_kv_tokens": 4096}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return draw(model_folder(None), tmp_path_factory.mktemp("lora"), 5, strength=8.0)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4")


@pytest.fixture(scope="module")
def llm(drawn: Drawn) -> Iterator[LLM]:
    with LLM(topology="1e1p1d", lora_modules=[f"pets={drawn.adapter}"], **OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def merged(drawn: Drawn, clip: Path) -> str:
    """What the merged checkpoint answers."""
    with LLM(drawn.merged, **OPTIONS) as opened:
        return opened.ask(clip, QUESTION, max_tokens=24).text


def test_one_weight_copy_answers_as_the_model_and_as_the_adapter(llm: LLM, clip: Path, merged: str) -> None:
    """By turns, so that each would find what the other has left in the caches."""
    asked = [llm.ask(clip, QUESTION, max_tokens=24, **each) for each in [{}, {"model": "pets"}] * 2]
    texts = [each.text for each in asked]
    assert texts[1] == texts[3] == merged
    assert texts[0] == texts[2] != merged


def test_the_list_of_models_has_the_adapter_below_its_model(llm: LLM, drawn: Drawn) -> None:
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    found = httpx.get(f"{llm.url}/models", headers=headers, trust_env=False, timeout=START_S).json()
    base, pets = found["data"]
    assert (base["id"], base["root"], base["parent"]) == ("shapes-vl-2", "shapes-vl-2", None)
    assert (pets["id"], pets["root"], pets["parent"]) == ("pets", str(drawn.adapter), "shapes-vl-2")
    assert httpx.get(f"{llm.url}/models/pets", headers=headers).json() == pets


def test_a_command_asks_its_only_adapter(drawn: Drawn, clip: Path, merged: str) -> None:
    arguments = ["ask", str(clip), QUESTION, "--max-tokens", "24", "--lora-modules", f"pets={drawn.adapter}"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout.strip()) == (0, merged.strip())


def test_what_cannot_be_served_is_refused_before_weights_are_read(drawn: Drawn, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="has no adapter_config"):
        LLM(lora_modules=[f"pets={tmp_path}"])
    with pytest.raises(RequestError, match="'shapes-vl-2', which is the model's own"):
        LLM(lora_modules=[f"shapes-vl-2={drawn.adapter}"])
