"""Defines the application's arguments, checked before anything slow is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from epd.answer_parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, check_parser
from epd.colour import parse_colour
from epd.control.request_budget import RequestLimits
from epd.control.retention import RetentionConfig, levels_down_to
from epd.encode.sharding import BATCH_PATCHES, Sharding
from epd.engine_config import ENGINE_FIELDS, check_reduction
from epd.errors import RequestError
from epd.kv.pass_limits import PassLimits
from epd.lora_modules import check_served
from epd.models import MODEL_HELP, as_given, find_model, model_folder, served_name
from epd.models.folder import weight_files
from epd.pixel_settings import PIXEL_FIELDS
from epd.reduction import DEFAULT_METHOD, LEAST_RETENTION, METHODS, ReductionPolicy
from epd.serve_app.clients import check_keys
from epd.serve_app.worker_args import WorkerArgs

# Environment variables for keys that the arguments leave out.
KEY_VARIABLES = {"api_key": "EPD_API_KEY", "admin_api_key": "EPD_ADMIN_API_KEY"}
# Those that `epd serve` reads if a flag is not given.
ENVIRONMENT = {**KEY_VARIABLES, "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}


# Fields that are names, and what refuses those that are not known.
_NAMES: Mapping[str, Callable[[str], object]] = {
    "image_background": parse_colour,
    "reasoning_parser": partial(check_parser, "reasoning_parser"),
    "tool_call_parser": partial(check_parser, "tool_call_parser"),
}

# Of one file: what a connection may send in one request.
MAX_UPLOAD_BYTES = 128 << 20

# What the workers of each kind are started with.
STAGE_FIELDS = (
    "topology",
    "worker_classes",
    "decode_tensor_parallel_size",
    "connector",
    "elastic",
    "num_embeddings",
    "hang_s",
    "drain_s",
    "max_batch_patches",
    "max_num_batched_tokens",
    "max_chunk_tokens",
    "max_num_seqs",
    "decode_max_num_seqs",
    "encode_beside",
    "image_background",
    *(name for name in ENGINE_FIELDS if name != "group_tokens"),  # groups are cut before
)
MEDIA_FIELDS = (
    "revision",
    "hub",
    "num_video_threads",
    "allowed_media_path",
    "allowed_media_hosts",
    "files_dir",
    "image_background",
    "require_media_sandbox",
    "video_device",
    "hang_s",
    "drain_s",
    *PIXEL_FIELDS,
)


class AppArgs(WorkerArgs):
    """The application's arguments. Every field is also a flag of `epd serve` and a key of its YAML.

    A field's description is the help of its flag; `epd config show` prints the fields' resolved values.
    """

    model: Path | None = Field(
        default=None,
        description=MODEL_HELP,
    )
    model_name: str | None = Field(
        default=None, description="Name of the model in requests; by default its own."
    )
    num_fronts: int = Field(
        default=1, ge=1, le=64, description="Replicas that answer HTTP; each works with all workers."
    )
    num_video_threads: int = Field(
        default=2, ge=1, le=64, description="Videos that each video worker decodes at once."
    )
    num_embeddings: int | None = Field(
        default=None,
        ge=16,
        description="Embeddings of visual tokens that each encode worker keeps, and each prefill worker "
        "receives; by default 65536, or 5% of what it may use of a GPU, if num_kv_tokens is not set.",
    )
    api_key: SecretStr | None = Field(
        default=None, description="Key that clients must send; no authentication by default."
    )
    admin_api_key: SecretStr | None = Field(
        default=None,
        description="Key that allows changing roles and setting priorities; by default neither is allowed.",
    )
    api_keys_file: Path | None = Field(default=None, description="Keys of clients: lines of epd keys new.")
    allowed_media_path: Path | None = Field(
        default=None, description="Folder that file:// media may be read from; by default none may."
    )
    allowed_media_hosts: frozenset[str] | None = Field(
        default=None, description="Hosts to fetch media from, private ones too; by default all public hosts."
    )
    image_background: str = Field(
        default="#ffffff",
        description="Colour that transparent pixels of pictures show, as #rrggbb or R,G,B.",
    )
    require_media_sandbox: bool = Field(
        default=False,
        description="Refuse to start where the kernel gives the processes that read media no Landlock or no "
        "seccomp.",
    )
    video_device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="cuda, or cuda:N, decodes H.264 and HEVC on a GPU too, beside the CPU, in processes "
        "without Landlock and seccomp.",
    )
    max_requests: int = Field(default=512, ge=1, description="Requests answered at once; others get 429.")
    max_waiting: int = Field(default=256, ge=0, description="Requests that wait for room at the workers.")
    max_wait_s: float = Field(default=120.0, gt=0, description="Longest wait for room, in seconds.")
    slo_ttft_s: float | None = Field(
        default=None,
        gt=0,
        description="Target for the time to first token, in seconds: requests that cannot meet it get 429.",
    )
    retention: float = Field(
        default=1.0,
        ge=LEAST_RETENTION,
        le=1,
        description="Share of visual tokens kept unless a request sets its own, 0.05 to 1.",
    )
    reduction: str = Field(
        default=DEFAULT_METHOD, description=f"How the kept tokens are chosen: {', '.join(METHODS)}."
    )
    compute_share: float | None = Field(
        default=None,
        ge=LEAST_RETENTION,
        le=1,
        description="Share of visual tokens that later layers of the language model compute, with the "
        "reduction fastkv; each keeps some of these. By default the retention.",
    )
    max_visual_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Visual tokens of a request at most; frames and retention are chosen for it. By default "
        "what the model's context has room for.",
    )
    retention_min: float | None = Field(
        default=None,
        ge=LEAST_RETENTION,
        le=1,
        description="Lower retention down to this under load, to meet slo_ttft_s; by default it is fixed.",
    )
    hang_s: float = Field(
        default=10.0, gt=0, description="Seconds without a heartbeat after which a worker counts as lost."
    )
    encode_fallback_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds without an encoder after which a prefill worker encodes too, until one is back; "
        "by default requests wait. A GPU needs room for the tower.",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="Grace period for in-flight requests on shutdown, in seconds."
    )
    allowed_hosts: frozenset[str] | None = Field(
        default=None,
        description="Names that clients may call the server by, besides its address; by default any, except "
        "on loopback without a key.",
    )
    reasoning_parser: str | None = Field(
        default=None,
        description="Part what the model thinks from its answer, as the fields reasoning and "
        f"reasoning_content: {', '.join(REASONING_PARSERS)}.",
    )
    tool_call_parser: str | None = Field(
        default=None,
        description=f"How the model writes calls of functions: {', '.join(TOOL_CALL_PARSERS)}; by default "
        "what its chat template shows.",
    )
    enable_auto_tool_choice: bool = Field(
        default=True, description="Let the model choose whether to call a function."
    )
    trace_dir: Path | None = Field(default=None, description="Folder for a Chrome trace of each request.")
    max_traces: int = Field(
        default=256, ge=1, description="Traces kept in trace_dir; the oldest are deleted."
    )
    otlp_endpoint: str | None = Field(
        default=None, description="Base URL of a collector of OpenTelemetry traces."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Lines of logs: text, or json with a key for each field."
    )
    log_stats_interval: float = Field(
        default=10.0, gt=0, description="Seconds between lines of figures in the log, while busy."
    )
    disable_log_stats: bool = Field(default=False, description="Write no lines of figures.")
    files_dir: Path | None = Field(
        default=None,
        description="Folder for files of clients and batches (/v1/files, /v1/uploads, /v1/batches); by "
        "default none, with --local one that ends with the server.",
    )
    max_file_bytes: int = Field(
        default=MAX_UPLOAD_BYTES,
        ge=1,
        le=MAX_UPLOAD_BYTES,
        description="Bytes of one file in files_dir that a client uploads in one request.",
    )
    max_upload_bytes: int = Field(
        default=8 << 30, ge=1, description="Bytes of a medium in files_dir that a client uploads in parts."
    )
    max_files_bytes: int = Field(
        default=16 << 30, ge=1, description="Bytes of all files in files_dir; more uploads get 413."
    )
    max_files: int = Field(
        default=10_000, ge=1, le=1_000_000, description="Files in files_dir; more uploads get 429."
    )
    max_batches: int = Field(
        default=1000,
        ge=1,
        le=100_000,
        description="Most batches kept in files_dir; of more, the one that ended first is removed.",
    )
    max_batch_lines: int = Field(
        default=50_000, ge=1, le=10_000_000, description="Lines of a batch; one with more fails."
    )
    batch_concurrency: int = Field(
        default=4, ge=1, le=256, description="Lines of batches that a front answers at once."
    )
    max_batch_patches: int | None = Field(
        default=None,
        ge=1,
        description="Patches that an encoder batches together; by default "
        f"{BATCH_PATCHES['cpu']} on a CPU and {BATCH_PATCHES['cuda']} on a GPU.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens computed in one step; by default 2048, and 8192 on a GPU with 70 GB.",
    )
    max_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of one request prefilled in one step; by default those of a step.",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Sequences that run at once on a worker; by default 64, on a GPU 256, with 70 GB 1024.",
    )
    decode_max_num_seqs: int | None = Field(
        default=None, ge=1, description="The same for workers that only decode; by default max_num_seqs."
    )
    sharding: Sharding = Field(
        default="groups",
        description="Where one request's groups are encoded: groups (on all encoders), request (on one) or "
        "local (where they are prefilled).",
    )
    limits: RequestLimits = Field(
        default_factory=RequestLimits,
        description="Limits of one request, such as max_frames=4096; epd config show lists all.",
    )

    @field_validator("model", mode="before")
    @classmethod
    def _kept_path(cls, model: object) -> object:
        return as_given(model) if isinstance(model, str) else model

    @field_validator(*_NAMES)
    @classmethod
    def _known_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        try:
            if name is not None:
                _NAMES[info.field_name or ""](name)
        except RequestError as error:
            raise PydanticCustomError("name", "{reason}", {"reason": str(error)}) from None
        return name

    @property
    def model_path(self) -> Path:
        """Returns the model's folder on this machine. Raises EPDError as `model_folder` does."""
        return model_folder(self.model, self.revision, self.hub)

    @property
    def served_name(self) -> str:
        """Returns the model's name in requests."""
        return self.model_name or served_name(self.model)

    @property
    def reduction_policy(self) -> ReductionPolicy:
        """Returns the default reduction. Raises RequestError for a bad method or share."""
        return ReductionPolicy(self.reduction, self.retention, self.compute_share)

    @property
    def load_retention(self) -> RetentionConfig | None:
        """Returns the retention that follows the load, None if fixed. Raises RequestError without an SLO."""
        if self.retention_min is None:
            return None
        if self.slo_ttft_s is None:
            raise RequestError(
                f"received a retention_min of {self.retention_min:g} without an SLO; allowed: with a target "
                "for the time to first token; set slo_ttft_s"
            )
        return RetentionConfig(self.slo_ttft_s, levels_down_to(self.retention_min))

    def for_workers(self, *fields: str) -> Self:
        """Returns a copy with just these fields, and the model: what some replicas need."""
        kept = {name: getattr(self, name) for name in ("model", *fields)}
        return type(self).model_construct(**kept)

    def scheduler(self, *, is_decode: bool) -> PassLimits:
        """Returns the limits of a pass that are set, for workers that only decode or for the others."""
        seqs = (self.decode_max_num_seqs if is_decode else None) or self.max_num_seqs
        return PassLimits(self.max_num_batched_tokens, seqs, self.max_chunk_tokens)

    def with_keys_from(self, environment: Mapping[str, str]) -> Self:
        """Returns a copy with the keys that only the environment holds."""
        found = {name: environment.get(variable) for name, variable in KEY_VARIABLES.items()}
        missing = {name: SecretStr(key) for name, key in found.items() if key and not getattr(self, name)}
        return self.model_copy(update=missing)

    def resolved(self) -> Self:
        """Returns a checked copy with absolute paths, and the commit of a model of the hub.

        Raises EPDError for a bad model, topology or key.
        """
        self.check_workers()
        check_keys(self.api_key, self.admin_api_key, self.api_keys_file)
        _ = self.reduction_policy, self.load_retention, self.tower_merge
        self.check_cache()
        path = self.model_path
        weight_files(path)
        check_reduction(path, self.reduction)
        check_served(self.adapters, self.served_name)
        names = ("allowed_media_path", "trace_dir", "files_dir", "api_keys_file", "cache_dir")
        paths = {name: (folder := getattr(self, name)) and folder.resolve() for name in names}
        found = find_model(self.model, self.revision, self.hub)
        # A model of the hub keeps its name, and gets the commit: each machine has a cache of its own.
        model: dict[str, object] = (
            {"model": path.resolve()} if isinstance(found, Path) else {"revision": found.pinned(path)}
        )
        if self.lora_modules:
            model["lora_modules"] = frozenset(str(each.resolved()) for each in self.adapters)
        return self.model_copy(update={**model, **paths})
