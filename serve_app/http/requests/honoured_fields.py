"""Says in a line each what the fields of a chat request do; `docs/api.md` shows it beside all others."""

from __future__ import annotations

from collections.abc import Mapping

# Of each field of ChatRequest, in its order, in Markdown.
HONOURED: Mapping[str, str] = {
    "model": "one of `/v1/models`, by default the first",
    "stream": "server-sent events; a comment while nothing comes; the last text has the reason of its end",
    "temperature": "0 is greedy; by default as the checkpoint's generation configuration",
    "top_p": "as OpenAI's",
    "presence_penalty": "as OpenAI's",
    "frequency_penalty": "as OpenAI's",
    "seed": "of the draws; the same gives the same answer",
    "stop": "strings that end the answer",
    "structured_outputs": "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar`",
    "top_k": "as vLLM's",
    "min_p": "as vLLM's",
    "repetition_penalty": "as vLLM's",
    "min_tokens": "as vLLM's",
    "ignore_eos": "as vLLM's",
    "stop_token_ids": "as vLLM's",
    "include_stop_str_in_output": "as vLLM's",
    "logit_bias": "at most 1,024 tokens, from -100 to 100, added before penalties",
    "bad_words": (
        "as vLLM's: at most 512 words of 8,192 characters that the answer has not, with or without a space "
        "before; other cases, and words that begin within a longer token, are other words; where a format "
        "allows nothing else the word comes"
    ),
    "priority": "the lower, the sooner, as vLLM's; below 0 with the admin key",
    "cache_salt": "caches are shared only with requests of the same salt, at most 1,024 characters",
    "messages": "the conversation: roles system (or developer), user, assistant, tool and function",
    "stream_options": "`include_usage`: tokens in the last event; `continuous_usage_stats`: in every event",
    "max_completion_tokens": (
        "longest answer, tokens; without it the checkpoint's `max_new_tokens`, else up to the context's end"
    ),
    "max_tokens": "the old name of it",
    "n": "independent answers, at most 128",
    "logprobs": "of each token",
    "top_logprobs": "at most 20; 0 without `logprobs` asks for nothing",
    "response_format": "`text`, `json_object`, `json_schema`",
    "tools": "functions that the answer may call",
    "tool_choice": "`none`, `auto`, `required`, or one function by its name",
    "parallel_tool_calls": "whether `required` allows several calls; by default it does",
    "modalities": "`text` alone",
    "mm_processor_kwargs": (
        "`fps` or `num_frames` of videos, or `do_sample_frames` false: every frame; `min_pixels`, "
        "`max_pixels` or `size` of images and frames, `cap_pixels_per_frame`"
    ),
    "media_io_kwargs": (
        "`video`: `fps` or `num_frames`, the same as in `mm_processor_kwargs`; with a list "
        "of frames `frames_indices`, `total_num_frames` and `duration`"
    ),
    "chat_template_kwargs": (
        "variables of the model's chat template; one that it does not read changes nothing, one that "
        "rendering itself takes is refused"
    ),
    "epd": (
        "`fps`, `num_frames`, `start_s`, `end_s` of videos, `retention`, `reduction`, "
        "`compute_share`, `retention_min`, `max_visual_tokens`, `deadline_s`, `events`"
    ),
}
