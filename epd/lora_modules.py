"""Names the LoRA adapters that are served beside a model: `NAME=PATH` of `--lora-modules`, as vLLM has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from epd.errors import ModelNotFoundError, RequestError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_MODULES = 64
_MAX_NAME_CHARS = 100


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """Names an adapter. name: of the model in requests. path: folder with PEFT's files."""

    name: str
    path: Path

    @classmethod
    def parsed(cls, text: str) -> LoRAModule:
        """Reads NAME=PATH. Raises RequestError."""
        name, separator, path = text.partition("=")
        if not (separator and name.strip() and path.strip()) or len(name) > _MAX_NAME_CHARS:
            raise RequestError(
                f"received the LoRA module {text[:_MAX_NAME_CHARS]!r}; allowed: NAME=PATH with the folder of "
                f"an adapter, and a name of at most {_MAX_NAME_CHARS} characters; write it so"
            )
        return cls(name.strip(), Path(path.strip()).expanduser())

    def check(self) -> None:
        """Raises ModelNotFoundError for a folder without the files of an adapter."""
        missing = next((each for each in (CONFIG, WEIGHTS) if not (self.path / each).is_file()), None)
        if missing:
            raise ModelNotFoundError(
                f"the LoRA module '{self.name}' has no {missing} at '{self.path}'; give a folder that PEFT's "
                "save_pretrained has written"
            )

    def resolved(self) -> LoRAModule:
        """Returns the same with an absolute path, for workers that run elsewhere."""
        return LoRAModule(self.name, self.path.resolve())

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def lora_modules(texts: Iterable[str]) -> tuple[LoRAModule, ...]:
    """Reads adapters, in the order of their names. Raises RequestError for a wrong one or a repeated name."""
    modules = sorted(map(LoRAModule.parsed, texts), key=lambda each: each.name)
    if len(modules) > _MAX_MODULES:
        raise RequestError(f"received {len(modules)} LoRA modules; allowed: {_MAX_MODULES}; leave some out")
    counted = Counter(each.name for each in modules)
    for name, count in counted.items():
        if count > 1:
            raise RequestError(
                f"received {count} LoRA modules of the name '{name}'; allowed: one of each; rename the others"
            )
    return tuple(modules)


def check_served(modules: Iterable[LoRAModule], model_name: str) -> None:
    """Checks adapters before weights are read.

    Raises RequestError for adapters that cannot be served, ModelNotFoundError for folders without one.
    """
    for each in modules:
        each.check()
        if each.name == model_name:
            raise RequestError(
                f"received a LoRA module of the name '{each.name}', which is the model's own; allowed: "
                "another name; rename it"
            )
