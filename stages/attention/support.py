"""Checks that the paged attention computes a language model as it was trained, before weights are read.

`epd_paged` attends everything before a token, with a softmax over these keys alone, and the head's logits are
taken as they are. A model that wants something else would load, run, and answer wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from epd.errors import UnsupportedModelError

# What transformers' decoders hand to an attention function, and nothing here depends on it: a plan says who
# attends whom, and evaluation has no dropout.
_HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "cache_position", "output_attentions"})
# Text models whose softmax has a learned sink; their configurations do not say so.
_WITH_SINKS = frozenset({"gpt_oss"})
# Text models whose layers without attention have a recurrent state that our decoder computes.
RECURRENT = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_GEMMA = frozenset({"gemma3_text", "gemma4_text"})
# Text models with sliding windows in some layers.
WINDOWED = _GEMMA | {"cohere2"}
# Those of them whose kinds of layers have heads of their own, and later layers the keys of earlier ones.
MIXED_HEADS = frozenset({"gemma4_text"})
# Text models whose tokens of media attend each other across the prompt, and add to their places' embeddings.
_BOTH_WAYS = frozenset({"molmo2_text"})
# Those whose scale of logits transformers leaves out in its vision-language models.
_UNSCALED = frozenset({"cohere", "cohere2"})
# Fields of a text configuration that change attention or logits, with the value that leaves them as they are.
_CHANGING: Mapping[str, object] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_chunk_size": None,
    "logit_scale": None,
    "logits_scaling": 1.0,
    "use_bidirectional_attention": False,
}


def check_attention(model_config: Any) -> None:
    """Raises UnsupportedModelError for a transformers configuration whose attention nothing here computes."""
    config = model_config.get_text_config()
    found = next(_unsupported(config), None)
    if found is not None:
        raise UnsupportedModelError(
            f"the language model '{config.model_type}' has {found}, which the paged attention does not "
            "compute: its answers would be wrong; use a checkpoint with full attention in every layer"
        )


def _unsupported(config: Any) -> Iterator[str]:
    """Lists what the model has that would be left out, as `name=value`."""
    if config.model_type in _WITH_SINKS:
        yield "attention sinks (s_aux)"
    is_mixed = config.model_type in MIXED_HEADS
    for name, neutral in _CHANGING.items():
        value = getattr(config, name, None)
        is_computed = is_mixed and (name == "final_logit_softcapping" or value == "vision")
        is_computed |= name == "logit_scale" and config.model_type in _UNSCALED
        if value is not None and value != neutral and not is_computed:
            yield f"{name}={value}"
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else []))
    is_refused = config.model_type not in WINDOWED
    if is_refused and "sliding_attention" in kinds and _is_narrow(window, config):
        yield f"sliding_window={window} in a context of {getattr(config, 'max_position_embeddings', None)}"
    computed = {"linear_attention"} if config.model_type in RECURRENT else set()
    for kind in sorted(kinds - {"sliding_attention", "full_attention"} - computed):
        yield f"layer_types with '{kind}'"


def state_layers(config: Any) -> list[bool]:
    """Returns of each layer whether it has a recurrent state in the place of attention."""
    if config.model_type not in RECURRENT:
        return [False] * config.num_hidden_layers
    return [kind == "linear_attention" for kind in config.layer_types]


def layer_windows(config: Any) -> list[int | None]:
    """Returns of each layer how many tokens one of them attends, itself included; None for all before it."""
    if config.model_type not in WINDOWED:
        return [None] * config.num_hidden_layers
    is_kind = config.model_type in MIXED_HEADS or _is_narrow(config.sliding_window, config)
    window = config.sliding_window if is_kind else None
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]


def attends_both_ways(config: Any, window: int | None) -> bool:
    """Reports whether visual tokens attend later ones, of their run or others, in layers of this window."""
    if config.model_type in MIXED_HEADS:
        return window is not None and config.use_bidirectional_attention == "vision"
    return config.model_type in _GEMMA | _BOTH_WAYS


def adds_embeddings(config: Any) -> bool:
    """Reports whether visual tokens are added to the embeddings of their places, and do not replace them."""
    return config.model_type in _BOTH_WAYS


def lenders(config: Any) -> list[int]:
    """Returns of each layer whose keys and values it attends: its own, or those of an earlier layer."""
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    if own == config.num_hidden_layers or config.model_type not in MIXED_HEADS:
        return list(range(config.num_hidden_layers))
    last = {kind: layer for layer, kind in enumerate(config.layer_types[:own])}
    return [layer if layer < own else last[kind] for layer, kind in enumerate(config.layer_types)]


def _is_narrow(window: int | None, config: Any) -> bool:
    """Reports whether some context of the model is longer than the window."""
    context: int | None = getattr(config, "max_position_embeddings", None)
    return window is None or context is None or window < context


def check_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for an argument of an attention function that would change its result.

    module: the attention layer. A window as wide as the model's context changes nothing; of text models
    whose windows are known, plans have them.
    """
    config = getattr(module, "config", None)
    for name, value in arguments.items():
        if value is None or name in _HARMLESS:
            continue
        is_known = getattr(config, "model_type", None) in WINDOWED
        if name == "sliding_window" and (is_known or not _is_narrow(value, config)):
            continue
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for attention with {name}, which the paged attention does not "
            "compute; use a checkpoint with full attention in every layer"
        )
