"""The ASGI application: routers, middleware, lifespan. No logic."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from server.api import (
    chat,
    completions,
    failures,
    files,
    fine_tuning,
    health,
    lora,
    metrics,
    models,
    playground,
    tokenization,
    training,
)
from server.api.job_events import EventFeeds
from server.body_limit import BodyLimit
from server.engine import block_files
from server.files.body import StreamedBody
from server.files.store import FileLimits, FileStore
from server.finetune import FineTuning
from server.lifecycle import Lifecycle
from server.middleware import OPEN_PATHS, Authentication, NoWebSocket, OriginForm, RequestContext
from server.settings import Settings
from server.training import Training

#: Headers of replies that pages of other origins may read, beside those that they always may.
READ_BY_PAGES = ("x-request-id", "retry-after")


class Application(FastAPI):
    _describing = threading.Lock()

    def setup(self) -> None:
        """Its own route only, in a thread: the first description takes the better part of a second."""
        assert self.openapi_url is not None
        self.add_api_route(self.openapi_url, self._described, methods=["GET", "HEAD"], include_in_schema=False)

    def _described(self) -> JSONResponse:
        with self._describing:
            return JSONResponse(self.openapi())

    def openapi(self) -> dict[str, Any]:
        """FastAPI announces its own 422 on every route; ours answer 400, in OpenAI's shape. Keys are bearer tokens."""
        if not self.openapi_schema:
            schema = super().openapi()
            schema["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
            has_keys = bool(self.state.lifecycle.settings.api_key)
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
                    operation["security"] = [{"api_key": []}] if has_keys and path not in OPEN_PATHS else []
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
        return super().openapi()


def _turned_off(settings: Settings) -> dict[str, str]:
    """Routes that a flag has taken away, and what who asks for them is told."""
    flags = {
        "/v1/fine_tuning": (settings.enable_fine_tuning, "--no-enable-fine-tuning"),
        "/v1/training": (settings.enable_training, "--no-enable-training"),
    }
    return {route: f"The server was started with {flag}." for route, (on, flag) in flags.items() if not on}


def create_app(lifecycle: Lifecycle) -> FastAPI:
    """Raises OSError or ValueError for a kv_offload_dir that named_folders would have refused."""
    settings = lifecycle.settings
    limits = FileLimits(settings.max_file_bytes, settings.max_total_file_bytes, settings.max_files)
    store = FileStore(settings.data_folder / "files", limits)
    lifecycle.metrics.watch_files(lambda: store.failures)
    jobs = FineTuning(
        settings.data_folder / "finetune",
        store,
        replace(settings.trainer_config(), answering_fd=lifecycle.answering.fd, template=lifecycle.template),
        lifecycle.load_adapter,
        lifecycle.engine.unload_adapter,
        lifecycle.serves,
        max_live_jobs=settings.max_fine_tuning_jobs,
        max_model_len=lambda: lifecycle.max_model_len,
    )
    if settings.enable_fine_tuning:
        lifecycle.preparations.append(jobs.start)
        lifecycle.drains.append(jobs.drain)
        lifecycle.metrics.watch_fine_tuning(jobs.stats)
        lifecycle.why_not_served = jobs.why_not_served
    calls = replace(settings.training_config(), answering_fd=lifecycle.answering.fd)
    low_level = Training(settings.data_folder / "training", calls, lifecycle)
    if settings.enable_training:
        lifecycle.preparations.append(low_level.start)
        lifecycle.drains.append(low_level.drain)
        lifecycle.metrics.watch_training(low_level.stats)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(_prepare, app, store)
        try:
            async with lifecycle.lifespan(app):
                yield
        finally:
            await low_level.close()
            await jobs.close()
            store.close()

    app = Application(
        title="Longwave",
        version=longwave_version(),
        description="Long-context generation behind an OpenAI-compatible API.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.lifecycle = lifecycle
    app.state.files = store
    app.state.fine_tuning = jobs
    app.state.feeds = EventFeeds()
    app.state.training = low_level
    failures.install(app, _turned_off(settings))
    for resource in (chat, completions, models, lora, files, tokenization, health, metrics, playground):
        app.include_router(resource.router)
    if settings.enable_fine_tuning:
        app.include_router(fine_tuning.router)
    if settings.enable_training:
        app.include_router(training.router)
    _add_middleware(app, lifecycle)
    return app


def _add_middleware(app: FastAPI, lifecycle: Lifecycle) -> None:
    """The last added is the outermost."""
    settings = lifecycle.settings
    streamed = frozenset({files.PATH})
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout=settings.body_timeout, streamed=streamed)
    app.add_middleware(
        StreamedBody,
        paths=streamed,
        max_file_bytes=settings.max_file_bytes,
        pause=settings.body_timeout,
        timeout=settings.upload_timeout,
    )
    keys = [key.get_secret_value() for key in settings.api_key]
    blocks = settings.kv_offload_dir
    salts = None if blocks is None else block_files.secret(blocks)  # None: new ones each time
    app.add_middleware(Authentication, keys=keys, secret=salts)
    app.add_middleware(NoWebSocket)
    app.add_middleware(RequestContext, metrics=lifecycle.metrics)
    if settings.allowed_origins:  # outside of what answers errors, so that a page reads those, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=READ_BY_PAGES,
        )
    app.add_middleware(OriginForm)


def _prepare(app: FastAPI, store: FileStore) -> None:
    """Builds routes, too: FastAPI does it when it first looks at them, in a tenth of a second of whoever came first."""
    store.start()
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "headers": []})


def longwave_version() -> str:
    try:
        return version("longwave")
    except PackageNotFoundError:  # run from a checkout
        return "0+unknown"
