"""The `longwave` command: serve, chat, bench, kernels, doctor. Only wiring; what a command needs is imported when it
runs."""

import contextlib
import json
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args, get_type_hints

import typer
from rich.console import Console

from server.bench.cli import bench_app
from server.client_settings import ClientSettings
from server.configuration import ConfigurationError, load_settings, unknown_variables
from server.kernels_cli import kernels_app
from server.log import begin_log
from server.repeated_flags import ServeCommand
from server.settings import BUNDLED_MODEL, Settings
from server.vllm_command_line import refused

if TYPE_CHECKING:
    from fastapi import FastAPI
    from transformers import PreTrainedTokenizerBase

    from models.registry import ModelSource
    from server.lifecycle import Lifecycle

# Plain help: rich's table cuts the names of flags short in a terminal of 80 columns.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(kernels_app, name="kernels")
app.add_typer(bench_app, name="bench")

Flag = typer.Option
EXIT_FAILED = 1


def main() -> None:
    app()


def _print_version(asked: bool) -> None:
    if asked:
        from server.app import longwave_version

        typer.echo(f"longwave {longwave_version()}")
        raise typer.Exit


@app.callback()
def longwave(
    version: Annotated[
        bool, Flag("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Long-context generation behind an OpenAI-compatible server."""


def _refuse(problems: list[str], exit_code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe takes no line, and is not what is wrong
        for problem in problems:
            typer.echo(f"longwave: {problem}", err=True)
    raise typer.Exit(exit_code)


@app.command(cls=ServeCommand)
def serve(
    ctx: typer.Context,
    positional_model: Annotated[str | None, typer.Argument(metavar="MODEL", help=f"Default: {BUNDLED_MODEL}.")] = None,
    model: Annotated[str | None, Flag(help="Bundled name, folder or hub id[@revision].")] = None,
    cache_dir: Annotated[Path | None, Flag(help="For compiled kernels and the converted bundled model.")] = None,
    data_dir: Annotated[Path | None, Flag(help="For uploaded files and fine-tuning.")] = None,
    served_model_name: Annotated[list[str] | None, Flag(help="Name(s) clients ask for.")] = None,
    host: Annotated[str | None, Flag(help="Address to listen on.")] = None,
    port: Annotated[int | None, Flag(help="Port to listen on.")] = None,
    api_key: Annotated[list[str] | None, Flag(help="Key(s) clients must send; or LONGWAVE_API_KEY.")] = None,
    allowed_origins: Annotated[list[str] | None, Flag(help="Whose web pages may ask (CORS); * for all.")] = None,
    load_format: Annotated[str | None, Flag(help="auto, or dummy: random weights.")] = None,
    chat_template: Annotated[
        Path | None, Flag(help="Jinja file in the place of the model's own chat template.")
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None, Flag(help="JSON: variables of the chat template where a request names none.")
    ] = None,
    dtype: Annotated[str | None, Flag(help="auto, bfloat16, float16 or float32.")] = None,
    device: Annotated[str | None, Flag(help="auto, cpu or cuda.")] = None,
    max_model_len: Annotated[int | None, Flag(help="Longest prompt and answer together, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, Flag(help="Most sequences of one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, Flag(help="Most tokens of one step.")] = None,
    tpot_target_ms: Annotated[
        float | None, Flag(help="Longest step while others' tokens wait; by the device if not given.")
    ] = None,
    gpu_memory_utilization: Annotated[float | None, Flag(help="Share of the GPU's memory to use.")] = None,
    kv_cache_dtype: Annotated[str | None, Flag(help="auto, bfloat16, float16, float32 or fp8.")] = None,
    kv_cache_memory_bytes: Annotated[int | None, Flag(help="Size of the KV cache, instead of what is free.")] = None,
    num_gpu_blocks_override: Annotated[int | None, Flag(help="Number of KV blocks, instead of what fits.")] = None,
    block_size: Annotated[int | None, Flag(help="Tokens of a KV block: 16, 32, 64 or 128.")] = None,
    enable_prefix_caching: Annotated[bool | None, Flag(help="Keep and share the KV of common beginnings.")] = None,
    enforce_eager: Annotated[bool | None, Flag(help="Run steps without CUDA graphs.")] = None,
    generation_config: Annotated[
        str | None, Flag(help="Sampling where a request names none: auto (the model's file) or vllm (neutral).")
    ] = None,
    num_speculative_tokens: Annotated[int | None, Flag(help="Most tokens guessed by prompt lookup; 0: none.")] = None,
    prompt_lookup_max: Annotated[int | None, Flag(help="Most tokens of a match in prompt lookup.")] = None,
    prompt_lookup_min: Annotated[int | None, Flag(help="Least tokens of a match in prompt lookup.")] = None,
    kv_offload_gb: Annotated[float | None, Flag(help="GiB of host memory for KV blocks given up.")] = None,
    kv_offload_dir: Annotated[Path | None, Flag(help="Where KV blocks go that host memory gives up.")] = None,
    kv_offload_disk_gb: Annotated[float | None, Flag(help="GiB that they may take there.")] = None,
    max_queued_requests: Annotated[int | None, Flag(help="Requests that may wait; more get 503.")] = None,
    queue_timeout: Annotated[float | None, Flag(help="Seconds a request may wait.")] = None,
    enable_lora: Annotated[bool | None, Flag(help="Serve LoRA adapters beside the model.")] = None,
    max_loras: Annotated[int | None, Flag(help="Most adapters of one step.")] = None,
    max_lora_rank: Annotated[int | None, Flag(help="Largest rank of an adapter.")] = None,
    max_cpu_loras: Annotated[int | None, Flag(help="Most adapters loaded, in host memory.")] = None,
    lora_modules: Annotated[list[str] | None, Flag(help="Adapter(s) to begin with: name=folder.")] = None,
    allow_runtime_lora_updating: Annotated[bool | None, Flag(help="Serve /v1/load_lora_adapter.")] = None,
    lora_dir: Annotated[Path | None, Flag(help="Where /v1/load_lora_adapter may load from.")] = None,
    max_n: Annotated[int | None, Flag(help="Most choices of one request.")] = None,
    max_body_bytes: Annotated[int | None, Flag(help="Largest request body.")] = None,
    max_file_bytes: Annotated[int | None, Flag(help="Largest uploaded file.")] = None,
    max_total_file_bytes: Annotated[int | None, Flag(help="All uploaded files together.")] = None,
    max_files: Annotated[int | None, Flag(help="Most uploaded files.")] = None,
    enable_fine_tuning: Annotated[bool | None, Flag(help="Serve /v1/fine_tuning/jobs.")] = None,
    max_fine_tuning_jobs: Annotated[int | None, Flag(help="Most fine-tuning jobs that have not ended.")] = None,
    max_fine_tuning_events: Annotated[int | None, Flag(help="Most events of a job that are kept.")] = None,
    fine_tuning_retention_days: Annotated[float | None, Flag(help="Days that jobs without a model are kept.")] = None,
    fine_tuning_max_length: Annotated[int | None, Flag(help="Most tokens of a training example.")] = None,
    fine_tuning_batch_tokens: Annotated[int | None, Flag(help="Tokens of one forward in training.")] = None,
    fine_tuning_checkpoint_every: Annotated[int | None, Flag(help="Steps between a job's checkpoints.")] = None,
    fine_tuning_max_full_parameters: Annotated[int | None, Flag(help="Largest model that jobs may tune fully.")] = None,
    max_full_models: Annotated[int | None, Flag(help="Most fully tuned models that are kept.")] = None,
    fine_tuning_deterministic: Annotated[bool | None, Flag(help="On a GPU too, jobs repeat bit for bit.")] = None,
    training_gpu_share: Annotated[float | None, Flag(help="Share of time that training takes beside answers.")] = None,
    enable_training: Annotated[bool | None, Flag(help="Serve /v1/training, the low-level calls.")] = None,
    max_training_models: Annotated[int | None, Flag(help="Most live models of low-level training.")] = None,
    max_training_call_tokens: Annotated[int | None, Flag(help="Most tokens of one such call.")] = None,
    training_idle_timeout: Annotated[float | None, Flag(help="Seconds a live model is kept without a call.")] = None,
    max_saved_weights: Annotated[int | None, Flag(help="Most saved weights of one API key.")] = None,
    ping_interval: Annotated[float | None, Flag(help="Seconds of silence before a stream's `:` line.")] = None,
    shutdown_timeout: Annotated[float | None, Flag(help="Seconds running answers get after SIGTERM.")] = None,
    keep_alive_on_engine_death: Annotated[
        bool | None, Flag(help="Stay up when the engine stays down, instead of ending with 4.")
    ] = None,
    log_level: Annotated[str | None, Flag(help="critical, error, warning, info or debug.")] = None,
) -> None:
    """Serve a model behind an OpenAI-compatible API. Every flag is also a variable: --port is LONGWAVE_PORT.
    Defaults are in brackets."""
    flags = {name: value for name, value in locals().items() if name in Settings.model_fields and value is not None}
    if positional_model is not None:
        if model not in (None, positional_model):
            _refuse([f"the model is named twice: {positional_model} and {model}"], ConfigurationError.exit_code)
        flags["model"] = positional_model
    for name in ("api_key", "allowed_origins", "served_model_name", "lora_modules"):
        if name in flags:
            flags[name] = ",".join(flags[name])
    try:
        settings = load_settings(flags)
    except ConfigurationError as error:
        _refuse([*refused(ctx.obj), *error.problems], error.exit_code)
    if problems := refused(ctx.obj, settings.model):
        _refuse(problems, ConfigurationError.exit_code)
    _serve(settings)


def _write_defaults_into_help() -> None:
    """From Settings, their only home: a flag that is not given is None, so that its variable counts."""
    for name, hint in get_type_hints(serve, include_extras=True).items():
        default = Settings.model_fields[name].default if name in Settings.model_fields else None
        if default not in (None, (), {}):
            shown = default if not isinstance(default, bool) else "on" if default else "off"
            get_args(hint)[1].help += f" [{shown}]"


_write_defaults_into_help()


def _serve(settings: Settings) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first process of a container would not hear it
    from models import registry
    from models.errors import ModelLoadError
    from server import named_folders, process
    from server.announcement import announce
    from server.engine.client import EngineClient
    from server.lifecycle import Lifecycle
    from server.text.operators_template import TemplateFileError, read_template

    _begin_log(settings.log_level.upper())
    if unknown := unknown_variables():
        logging.getLogger("longwave").warning("no such setting, and so not used: %s", ", ".join(unknown))
    problems, chat_template = named_folders.problems(settings), None
    try:
        chat_template = None if settings.chat_template is None else read_template(settings.chat_template)
    except TemplateFileError as error:
        problems.append(f"chat-template: {error}")
    try:
        source = registry.resolve(settings.model, cache_dir=settings.cache_dir, image_dir=settings.model_image_dir)
    except ModelLoadError as error:
        problems.append(str(error))
    if problems:
        _refuse(problems, ConfigurationError.exit_code)
    try:
        listener = process.listen(settings.host, settings.port)
    except OSError as error:
        _refuse([f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"], EXIT_FAILED)
    port = listener.getsockname()[1]
    logging.getLogger("longwave").info("loading %s", settings.model)
    lifecycle = Lifecycle(
        settings,
        EngineClient(settings.engine_config()),
        lambda: _load_tokenizer(source),
        chat_template=chat_template,
        began=process.began(),
    )
    process.end(process.serve(lambda: _make_app(lifecycle), lifecycle, listener, lambda: announce(lifecycle, port)))


def _begin_log(level: str) -> None:
    """Of libraries warnings, at most, and not even those below `level`: any client can make uvicorn warn."""
    begin_log(level)
    for library in ("httpx", "uvicorn"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))


def _make_app(lifecycle: "Lifecycle") -> "FastAPI":
    from server.app import create_app

    return create_app(lifecycle)


def _load_tokenizer(source: "ModelSource") -> "PreTrainedTokenizerBase":
    """In a thread, beside the engine's start. This process has no use for torch, which takes seconds to import."""
    from models.unused_packages import leave_out_torch

    source.fetch(weights=False)  # a conversion does have one
    leave_out_torch()
    from models.descriptions import load_tokenizer

    return load_tokenizer(source)


@app.command()
def chat(
    url: Annotated[str, Flag(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, Flag(help="Default: LONGWAVE_API_KEY.")] = None,
    model: Annotated[str | None, Flag(help="Default: the server's first.")] = None,
    system: Annotated[str | None, Flag(help="Instructions for the whole conversation.")] = None,
    temperature: Annotated[float, Flag(min=0, max=2, help="Small models ramble when it is high.")] = 0.0,
) -> None:
    """Talk to a server in the terminal. Ctrl-C stops an answer, Ctrl-D or /exit ends."""
    from server.terminal import ChatError, Conversation, connect, first_model, talk

    try:
        with connect(url, api_key or ClientSettings().key) as client:
            conversation = Conversation(client, model or first_model(client), temperature)
            if system is not None:
                conversation.messages.append({"role": "system", "content": system})
            raise typer.Exit(talk(conversation, Console()))
    except ChatError as error:
        _refuse([str(error)], EXIT_FAILED)


@app.command()
def doctor(
    model: Annotated[str | None, Flag(help="Default: what `longwave serve` would serve.")] = None,
    as_json: Annotated[bool, Flag("--json", help="For programs.")] = False,
) -> None:
    """Say what this machine has, and which kernels serve which layers of a model, and why. Exit code 1: the model is
    not there, or broken."""
    from server.diagnosis import print_diagnosis
    from server.doctor import diagnose

    try:
        settings = load_settings({} if model is None else {"model": model})
    except ConfigurationError as error:
        _refuse(error.problems, error.exit_code)
    diagnosis = diagnose(settings.engine_config(), settings.lora_folders)
    if unknown := unknown_variables():
        diagnosis.problems.append(f"No such setting, and so not used: {', '.join(unknown)}.")
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        print_diagnosis(diagnosis)
    if not diagnosis.servable:
        raise typer.Exit(1)
