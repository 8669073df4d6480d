"""Builds the service from the application's arguments and a fleet, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from epd.answer_parsers import REASONING_PARSERS, tool_call_parser_of
from epd.control.elasticity.assignment import switchable_roles
from epd.control.elasticity.controller import ControllerConfig
from epd.encoders.checkpoint import Checkpoint
from epd.engine_config import EngineConfig
from epd.errors import ModelError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.fleet import Fleet
from epd.serve_app.http.chat_answers import ApiSettings
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.orchestration.config import OrchestratorConfig, SwitchLimits
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.stages.placement import dtype_on
from epd.store.object_values import ObjectValues
from epd.store.piece_files import PieceFiles, namespace
from epd.topology import Stage, parse_topology
from epd.worker_classes import REST

# A worker that gets a language model of several ranks starts their processes, which import and load.
_SWITCH_OF_RANKS_S = 300.0


def create_service(
    args: AppArgs, fleet: Fleet, owner: str = "", controller: ControllerConfig | None = None
) -> tuple[Orchestrator, ApiSettings]:
    """Returns the service, which is not started, and the settings of who answers requests with it.

    owner: by which the fleet's workers know its requests
    controller: of roles, where they follow the load; None for the default
    Raises EPDError.
    """
    planner = RequestPlanner(
        args.model_path,
        args.served_name,
        group_tokens=args.group_tokens,
        limits=args.limits,
        pixels=args.pixels,
        lora_modules=args.adapters,
        thought_mark=REASONING_PARSERS[args.reasoning_parser][0] if args.reasoning_parser else "",
    )
    service = Orchestrator(fleet, planner, _orchestrator_config(args, controller), owner=owner)
    return service, _api_settings(args, planner, owner)


def worker_settings(args: AppArgs, worker_class: str = REST, device: str | None = None) -> WorkerSettings:
    """Returns the settings of the workers of a class. device: that the worker was given, if any."""
    own = args.of_class(worker_class)
    engine = own.engine if device is None else own.engine.model_copy(update={"device": device})
    types = _types(args)
    return WorkerSettings(
        args.model_path,
        engine,
        num_embeddings=own.num_embeddings,
        num_threads=own.threads_per_worker if types else None,
        encoded_in=types.get("encode"),
        embeddings_in=types.get("prefill"),
        num_kv_pools=args.num_kv_pools,
        tensor_parallel=args.tensor_parallel,
        encode_beside=args.encode_beside,
        is_alone=args.num_stage_workers == 1,
        keeps_weights=args.elastic and worker_class == REST,
        scheduler=args.scheduler(is_decode=False),
        max_batch_patches=own.max_batch_patches,
        max_resize_pixels=args.limits.max_resize_pixels,
        decode_scheduler=args.scheduler(is_decode=True),
        image_background=args.image_background,
        switchable=_switchable(args),
    )


def _types(args: AppArgs) -> Mapping[Stage, torch.dtype]:
    """Returns the types that stages compute in where workers are of several classes; nothing for others."""
    if not args.worker_classes:
        return {}
    return {
        stage: dtype_on(own.device.partition(":")[0], own.dtype, args.model_path)
        for name, part in args.parts.items()
        for own in (args.of_class(name),)
        for group in part.groups
        for stage in group.roles
    }


def media_settings(args: AppArgs) -> MediaSettings:
    default = MediaSettings(args.model_path)
    files = args.files_dir and FileSettings(args.files_dir)
    fetch = replace(
        default.fetch,
        allowed_hosts=args.allowed_media_hosts,
        media_folder=args.allowed_media_path,
        uploads_folder=files.files_folder if files else None,
    )
    return replace(default, fetch=fetch, num_read_threads=args.num_video_threads, pixels=args.pixels)


def _orchestrator_config(args: AppArgs, controller: ControllerConfig | None = None) -> OrchestratorConfig:
    return OrchestratorConfig(
        switching=SwitchLimits() if args.max_ranks == 1 else SwitchLimits(limit_s=_SWITCH_OF_RANKS_S),
        max_waiting=args.max_waiting,
        max_wait_s=args.max_wait_s,
        sharding=args.sharding,
        encode_fallback_s=args.encode_fallback_s,
        classes=frozenset(args.worker_classes),
        cache_dir=args.cache_dir and args.cache_dir.expanduser(),
        elastic=replace(controller or ControllerConfig(), roles=_switchable(args)) if args.elastic else None,
        retention=args.load_retention,
    )


def _switchable(args: AppArgs) -> tuple[frozenset[Stage], ...]:
    """Returns the sets of roles that workers may get as the load changes."""
    return switchable_roles(parse_topology(args.topology)) if args.elastic else ()


def _api_settings(args: AppArgs, planner: RequestPlanner, front: str) -> ApiSettings:
    """Returns the settings of who answers requests.

    planner: supplies the checkpoint's own sampling and the model's limits
    """
    return ApiSettings(
        api_key=args.api_key.get_secret_value() if args.api_key else None,
        admin_api_key=args.admin_api_key.get_secret_value() if args.admin_api_key else None,
        api_keys_file=args.api_keys_file,
        max_requests=args.max_requests,
        limits=planner.limits,
        default_params=planner.settings.sampling,
        default_deadline_s=args.slo_ttft_s,
        default_reduction=args.reduction_policy,
        max_visual_tokens=args.max_visual_tokens,
        allowed_hosts=args.allowed_hosts,
        trace_dir=args.trace_dir,
        max_traces=args.max_traces,
        otlp_endpoint=args.otlp_endpoint,
        log_stats_s=None if args.disable_log_stats else args.log_stats_interval,
        files=_file_settings(args),
        front=front,
        name_files=partial(_name_files, args.engine) if args.cache_dir else None,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser or _shown_parser(planner),
        enable_auto_tool_choice=args.enable_auto_tool_choice,
    )


def _name_files(options: EngineConfig) -> tuple[PieceFiles, ObjectValues | None]:
    """Opens what is known of named videos: see `KeptNames`. Raises RequestError for a bad folder or URL."""
    assert options.cache_dir is not None
    about = {"kind": "names of videos"}
    name, shown = namespace(about), {"model": "(all)", **about}
    files = PieceFiles(options.cache_dir.expanduser(), name, options.cache_bytes, shown)
    url = options.cache_objects
    return files, None if url is None else ObjectValues(url, name, shown)


def _shown_parser(planner: RequestPlanner) -> str:
    """Returns the parser of the calls that the model's template shows; it may have none."""
    checkpoint: Checkpoint | None = getattr(planner.adapter, "checkpoint", None)
    try:
        return tool_call_parser_of(checkpoint.tool_template if checkpoint is not None else "")
    except ModelError:
        return tool_call_parser_of("")


def _file_settings(args: AppArgs) -> FileSettings | None:
    if args.files_dir is None:
        return None
    return FileSettings(
        args.files_dir,
        max_file_bytes=args.max_file_bytes,
        max_upload_bytes=args.max_upload_bytes,
        max_folder_bytes=args.max_files_bytes,
        max_files=args.max_files,
        max_batches=args.max_batches,
        max_lines=args.max_batch_lines,
        num_in_flight=args.batch_concurrency,
        is_shared=args.api_keys_file is not None,
    )
