"""What the application on Ray is made of, checked before anything slow is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from epd.control.request_budget import RequestLimits
from epd.control.retention import RetentionConfig, levels_down_to
from epd.control.routing import check_reduction
from epd.encode.sharding import Sharding
from epd.errors import ModelNotFoundError, RequestError
from epd.kv.scheduling import SchedulerConfig
from epd.machine import usable_cpus
from epd.models import embedded_model_path
from epd.reduction import DEFAULT_METHOD, LEAST_RETENTION, ReductionPolicy
from epd.topology import Stage, parse_topology

_VIDEO: frozenset[Stage] = frozenset({"video"})
_KV_ROLES: frozenset[Stage] = frozenset({"prefill", "decode"})


# The variable of the environment that holds a key which the arguments do not.
KEY_VARIABLES = {"api_key": "EPD_API_KEY", "admin_api_key": "EPD_ADMIN_API_KEY"}


class AppArgs(BaseModel):
    """What the application is made of.

    model: a folder in Hugging Face layout, by default the embedded shapes-vl. model_name: asked for under it.
    topology: see `epd.topology`. num_video_workers: that decode video, with num_video_threads each.
    api_key: by default what EPD_API_KEY is set to; without one everybody is let in. admin_api_key: to change
    roles and to come before others, by default what EPD_ADMIN_API_KEY is set to; without one nobody may.
    allowed_media_path: folder that file:// media may be read from. allowed_media_hosts: see `FetchPolicy`.
    num_threads: of torch in each stage worker, by default the machine's cores shared out among them.
    num_kv_tokens: room for keys and values at each worker. max_requests: answered at once.
    max_waiting, max_wait_s: for room at the workers. slo_ttft_s: a request whose first token cannot come so
    soon is refused, by default none is. hang_s: without a sign of life a worker is lost after.
    retention, reduction: share of the visual tokens that is kept where a request says nothing, and how those
    are chosen: see `epd.reduction`. retention_min: the share falls to it as the load rises, so that first
    tokens come within slo_ttft_s; by default it does not follow the load.
    drain_s: that requests are given to end when the application does.
    served_hosts: names that clients may call the server by: see `serve_app.http.host_check.HostCheck`.
    trace_dir: a Chrome trace of each request is written there, the latest max_traces are kept.
    otlp_endpoint: base URL of a collector that gets OpenTelemetry traces.
    max_batch_patches: that an encoder takes together. skip_static: a unit of a video is not encoded if none
    of its preprocessed values differs by more than this from the unit before; by default all are.
    max_num_batched_tokens, max_chunk_tokens, max_num_seqs: see `SchedulerConfig`. decode_max_num_seqs: of
    workers that only decode, by default the same. sharding: of one request's groups: over all encoders, on
    one, or where it is prefilled. elastic: workers of one role take others as the load changes.
    limits: of what one request may ask for, see `RequestLimits`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Path | None = None
    model_name: str | None = None
    topology: str = "1e1p1d"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_video_workers: int = Field(default=1, ge=1, le=64)
    num_video_threads: int = Field(default=2, ge=1, le=64)
    num_threads: int | None = Field(default=None, ge=1, le=256)
    num_kv_tokens: int | None = Field(default=None, ge=1)
    api_key: SecretStr | None = None
    admin_api_key: SecretStr | None = None
    allowed_media_path: Path | None = None
    allowed_media_hosts: frozenset[str] | None = None
    max_requests: int = Field(default=512, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    max_wait_s: float = Field(default=120.0, gt=0)
    slo_ttft_s: float | None = Field(default=None, gt=0)
    retention: float = Field(default=1.0, ge=LEAST_RETENTION, le=1)
    reduction: str = DEFAULT_METHOD
    retention_min: float | None = Field(default=None, ge=LEAST_RETENTION, le=1)
    hang_s: float = Field(default=10.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0)
    served_hosts: frozenset[str] | None = None
    trace_dir: Path | None = None
    max_traces: int = Field(default=256, ge=1)
    otlp_endpoint: str | None = None
    max_batch_patches: int = Field(default=4096, ge=1)
    skip_static: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    max_chunk_tokens: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=64, ge=1)
    decode_max_num_seqs: int | None = Field(default=None, ge=1)
    sharding: Sharding = "groups"
    elastic: bool = False
    limits: RequestLimits = Field(default_factory=RequestLimits)

    @property
    def model_path(self) -> Path:
        """Raises ModelNotFoundError when there is no model."""
        path = self.model or embedded_model_path()
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"received the model '{path}', where there is no config.json; give a folder in Hugging Face "
                "layout, or leave it out for the embedded model"
            )
        return path

    @property
    def reduction_policy(self) -> ReductionPolicy:
        """Raises RequestError for a method that is not there."""
        return ReductionPolicy(self.reduction, self.retention)

    @property
    def load_retention(self) -> RetentionConfig | None:
        """None where retention does not follow the load. Raises RequestError where it has nothing to keep."""
        if self.retention_min is None:
            return None
        if self.slo_ttft_s is None:
            raise RequestError(
                f"received a retention_min of {self.retention_min:g} without an SLO; allowed: with the time "
                "in which first tokens must come; set slo_ttft_s, by --slo-ttft"
            )
        return RetentionConfig(self.slo_ttft_s, levels_down_to(self.retention_min))

    @property
    def threads_per_worker(self) -> int:
        """Those of torch in each stage worker. One core is left to HTTP and Ray, which serve all of them."""
        share = (usable_cpus() - 1) // parse_topology(self.topology).num_workers
        return self.num_threads or max(1, share)

    @property
    def num_kv_pools(self) -> int:
        """Pools of keys and values that the workers may have at once: one for each role that needs one, and
        one for each other worker, which may be given such a role."""
        stages = [roles for roles in self.workers.values() if roles != _VIDEO]
        return sum(max(1, len(roles & _KV_ROLES)) for roles in stages)

    def scheduler(self, *, is_decode: bool) -> SchedulerConfig:
        """Of workers that only decode, or of the others."""
        seqs = (self.decode_max_num_seqs if is_decode else None) or self.max_num_seqs
        return SchedulerConfig(self.max_num_batched_tokens, seqs, self.max_chunk_tokens)

    def with_keys_from(self, environment: Mapping[str, str]) -> Self:
        """With keys that only the environment holds."""
        found = {name: environment.get(variable) for name, variable in KEY_VARIABLES.items()}
        missing = {name: SecretStr(key) for name, key in found.items() if key and not getattr(self, name)}
        return self.model_copy(update=missing)

    def resolved(self) -> Self:
        """The same for any process of this machine. Raises EPDError for a model or topology that is none."""
        parse_topology(self.topology)
        if self.api_key and self.api_key == self.admin_api_key:
            raise RequestError(
                "received the same admin_api_key and api_key; allowed: two; give users one of their own"
            )
        _ = self.reduction_policy, self.load_retention
        least = min(self.retention, self.retention_min or 1.0)
        check_reduction(ReductionPolicy(self.reduction, least), self.workers.values())
        folders = {"allowed_media_path": self.allowed_media_path, "trace_dir": self.trace_dir}
        paths = {name: folder and folder.resolve() for name, folder in folders.items()}
        return self.model_copy(update={"model": self.model_path.resolve(), **paths})

    @property
    def workers(self) -> Mapping[str, frozenset[Stage]]:
        """Roles by name. Raises RequestError for what is no topology."""
        workers = {worker.name: worker.roles for worker in parse_topology(self.topology).workers()}
        return workers | {f"v{number}": _VIDEO for number in range(self.num_video_workers)}
