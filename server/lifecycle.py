"""The server's life: starting, serving, draining, gone; and the signals that move it. Must not know routes or text."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from models.errors import ModelLoadError
from models.stages import Stages
from server.answering import AnsweringSign
from server.collectors import ServerHealth
from server.daemon_thread import in_daemon_thread
from server.engine.adapter_registry import AdapterInfo
from server.engine.admission import Admission
from server.engine.messages import AddRequest, EngineReady, EngineStats, RequestTimes, TokenDelta
from server.errors import EngineUnavailable, LongwaveError, ModelNotFound, ServerDraining
from server.metrics import Metrics
from server.schemas.sampling_defaults import SamplingDefaults
from server.settings import FINE_TUNED, Settings
from server.text.chat_template import unread_variables
from server.text.generator import Generator
from server.text.operators_template import OperatorsTemplate
from server.text.tokenizer import TextTokenizer

logger = logging.getLogger("longwave")

HEARTBEAT_LIMIT = 30.0  # seconds without a word from the engine before it counts as hung,
LONGEST_TURNS = 3.0  # or so many times its longest step, if that is more
NOT_SERVED = " (If a job made it and nobody deleted it, the server's log says why it is not served.)"
WHOLE_MODELS = (
    " (If a job made it with training_type full, `longwave serve --model` with its folder serves it. Of another one "
    "that nobody deleted, the server's log says why it is not served.)"
)
CHECKPOINTS = " (Checkpoints are not served, only the finished model is.)"
CHECKPOINT = re.compile(r":ckpt-step-[0-9]+$")
CUT_GRACE = 2.0  # seconds that cut answers get to send their error event


class Engine(Protocol):
    """What the server needs of server.engine.client.EngineClient."""

    stats: EngineStats | None
    times: Callable[[RequestTimes], None] | None

    @property
    def is_ready(self) -> bool: ...
    @property
    def seconds_to_ready(self) -> float: ...
    @property
    def alive(self) -> bool: ...
    @property
    def heartbeat_age(self) -> float: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def num_deaths(self) -> int: ...

    async def start(self) -> None: ...
    async def ready(self) -> EngineReady: ...
    async def gone(self) -> None: ...
    def generate(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]: ...
    async def load_adapter(
        self, name: str, folder: str, *, owner: str = "", within: str | None = None, replace: bool = False
    ) -> AdapterInfo: ...
    async def unload_adapter(self, name: str, *, owner: str | None = None) -> None: ...
    def adapters(self) -> tuple[AdapterInfo, ...]: ...
    async def shutdown(self, timeout: float = 0.0) -> None: ...


class Phase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class Lifecycle:
    """Owns the engine and what exists only while it serves."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        load_tokenizer: Callable[[], Any],
        *,
        chat_template: str | None = None,
        began: float | None = None,
    ) -> None:
        """`chat_template`: what settings.chat_template holds. `began`: when this process did, on time.monotonic()'s
        clock; now, by default."""
        self.settings = settings
        self.engine = engine
        self.template = OperatorsTemplate(chat_template, settings.default_chat_template_kwargs)
        self.metrics = Metrics(settings.model_names[0], lambda: engine.stats, lambda: self.adapters(""))
        self.created = int(time.time())
        self.phase = Phase.STARTING
        self.changed = asyncio.Condition()
        self.generator: Generator | None = None
        self.sampling_defaults = SamplingDefaults()
        self.answering = AnsweringSign()  # while a request is open
        self.preparations: list[Callable[[], Awaitable[None]]] = []  # between the engine's readiness and the server's
        self.drains: list[Callable[[], Awaitable[None]]] = []  # what else has to stop in time
        self.why_not_served: Callable[[str, str], str | None] = lambda _name, _owner: None  # of a finished model
        self._load_tokenizer = load_tokenizer
        self._began = time.monotonic() if began is None else began
        self._engine_started = 0.0  # when its process did; 0: it has not
        self.metrics.watch_server(lambda: ServerHealth(self.is_live, self.is_ready, engine.num_deaths))
        engine.times = self.metrics.observe_times

    async def start_engine(self) -> None:
        """Once; `lifespan` does it where nobody did before. Raises EngineUnavailable."""
        if not self._engine_started:
            self._engine_started = time.monotonic()
            await self.engine.start()

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        await self.start_engine()
        coming_up = asyncio.create_task(self._come_up())
        try:
            yield
        finally:
            coming_up.cancel()
            with suppress(asyncio.CancelledError):
                await coming_up
            await self.engine.shutdown(0.0)
            if self.generator is not None:
                self.generator.tokenizer.close()

    @property
    def is_live(self) -> bool:
        """Whether a restart of this process would not help: the loop answers, and the engine is heard or coming."""
        return self.phase is not Phase.FAILED and self.engine.alive and self._is_heard

    @property
    def is_started(self) -> bool:
        return self.generator is not None

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.SERVING and self.engine.is_ready and self._is_heard

    @property
    def _is_heard(self) -> bool:
        stats = self.engine.stats
        longest = 0.0 if stats is None or self.engine.is_idle else stats.longest_turn
        return self.engine.heartbeat_age < max(HEARTBEAT_LIMIT, LONGEST_TURNS * longest)

    @property
    def max_model_len(self) -> int | None:
        """None while the model loads."""
        return None if self.generator is None else self.generator.ready.max_model_len

    def adapters(self, owner: str) -> list[AdapterInfo]:
        """Those that this owner may name."""
        return [info for info in self.engine.adapters() if info.owner in ("", owner)]

    def serves(self, adapter: str) -> bool:
        return any(info.name == adapter for info in self.engine.adapters())

    def check_model(self, model: str | None, owner: str = "") -> AdapterInfo | None:
        """The adapter that `model` names; None for the base model. Raises ModelNotFound."""
        if model is None or model in self.settings.model_names:
            return None
        for info in self.adapters(owner):
            if info.name == model:
                return info
        hint, settings = "", self.settings
        if model.startswith(FINE_TUNED) and CHECKPOINT.search(model):
            hint = CHECKPOINTS
        elif model.startswith(FINE_TUNED) and settings.enable_fine_tuning:
            hint = WHOLE_MODELS if settings.fine_tuning_max_full_parameters else NOT_SERVED
            if (reason := self.why_not_served(model, owner)) is not None:
                hint = f" It is finished and kept, but not served now: {reason}"
        raise ModelNotFound(f"The model `{model}` does not exist or you do not have access to it.{hint}", param="model")

    def adapter_name(self, model: str | None) -> str | None:
        """Of a model that was checked: what the engine knows it by; None for the base model."""
        return None if model in self.settings.model_names else model

    def accepting(self, model: str | None, owner: str = "") -> Generator:
        """The generator, for new work of `model`. Raises ModelNotFound, ServerDraining, EngineUnavailable."""
        self.check_model(model, owner)
        if self.phase is Phase.DRAINING:
            raise ServerDraining("The server is shutting down. Try again later.")
        return self.open_door()

    def open_door(self) -> Generator:
        """The generator, for work that was taken: also while the server ends. Raises EngineUnavailable."""
        if self.generator is None:
            raise EngineUnavailable("The model is still loading. Try again later.")
        if not self.engine.alive:
            raise EngineUnavailable("The engine failed too often and stays down: the server needs a restart.")
        if not self._is_heard:
            raise EngineUnavailable("The engine does not answer. Try again later.")
        return self.generator

    async def load_adapter(self, name: str, folder: Path, owner: str = "") -> None:
        """For that owner, or for everybody. Raises LongwaveError when the engine cannot serve it."""
        await self.engine.load_adapter(name, str(folder), owner=owner)

    async def wait_until(self, *phases: Phase) -> Phase:
        async with self.changed:
            await self.changed.wait_for(lambda: self.phase in phases)
        return self.phase

    async def drain(self) -> None:
        """Refuses new work, lets running answers and all other replies finish within the budget, then ends the rest
        with an error."""
        await self._enter(Phase.DRAINING)
        self.answering.show(False)  # training has to reach its end in time, too
        logger.info(
            "shutting down: running answers get %.0f s, another SIGTERM ends them now", self.settings.shutdown_timeout
        )
        work = [asyncio.ensure_future(drain()) for drain in (self._idle, *self.drains)]
        try:
            _, late = await asyncio.wait(work, timeout=self.settings.shutdown_timeout)
            if late:
                logger.warning("shutdown timeout: cutting what still runs")
                await self.cut()
        finally:
            for task in work:
                task.cancel()
        if self.settings.kv_offload_dir is not None:  # what is in host memory only has as long to reach the disk
            await self.engine.shutdown(self.settings.shutdown_timeout)

    async def _idle(self) -> None:
        if self.generator is not None:
            await self.generator.idle()

    async def cut(self) -> None:
        """Ends every running answer with an error event, now."""
        if self.generator is not None:
            self.generator.fail_all(ServerDraining("The server is shutting down and could not finish this answer."))
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_GRACE):
                    await self.generator.idle()

    async def _come_up(self) -> None:
        try:
            ready, tokenizer = await asyncio.gather(
                self.engine.ready(), in_daemon_thread(lambda: TextTokenizer(self._load_tokenizer(), self.template))
            )
            if unread := unread_variables(tokenizer):
                logger.warning("default-chat-template-kwargs: the chat template never reads %s", ", ".join(unread))
            for name, folder in self.settings.lora_folders.items():
                await self.engine.load_adapter(name, str(folder))
            admission = Admission.of(self.settings.engine_config())
            admission.learn(ready)
            self.metrics.learn(ready)
            if self.settings.generation_config == "auto" and ready.sampling_defaults:
                self.sampling_defaults = SamplingDefaults.of(ready.sampling_defaults)
                logger.info("sampling where a request names none: %s", self.sampling_defaults)
            self.generator = Generator(
                self.engine,
                tokenizer,
                admission,
                self.metrics,
                ready,
                max_n=self.settings.max_n,
                on_active=lambda is_active: self.answering.show(is_active and self.phase is not Phase.DRAINING),
            )
            for prepare in self.preparations:
                await prepare()
        except (LongwaveError, ModelLoadError) as error:
            await self._fail(str(error))
        except Exception as error:  # whatever a model's files can do to a tokenizer
            await self._fail(f"{type(error).__name__}: {error}")
        else:
            if self.phase is Phase.STARTING:
                self._tell_stages(ready)
                await self._enter(Phase.SERVING)

    def _tell_stages(self, ready: EngineReady) -> None:
        """Of the way from this process's first moment to here, in seconds."""
        now = time.monotonic()
        stages = Stages(self._began)
        before, after = self._engine_started - self._began, now - self._engine_started - sum(ready.stages.values())
        stages.seconds = {"before the engine": before, **ready.stages, "after it": after}
        self.metrics.started(stages.seconds)
        logger.info("ready in %.1f s: %s", now - self._began, stages)

    async def _fail(self, message: str) -> None:
        """Of the start; what fails because the server is ending already is no failure."""
        if self.phase is Phase.STARTING:
            logger.critical("cannot serve: %s", message)
            await self._enter(Phase.FAILED)

    async def _enter(self, phase: Phase) -> None:
        async with self.changed:
            self.phase = phase
            self.changed.notify_all()
