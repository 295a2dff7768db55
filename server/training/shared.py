"""The one training process that all live models of a server share: there while there are any. Knows no model."""

import asyncio
import logging
import os
from collections.abc import Callable

from server.training.child import Child
from server.training.config import TrainingConfig
from server.training.messages import Arguments, Ready
from server.training.sampling import Serving

logger = logging.getLogger("longwave")


class SharedChild:
    """`on_death` is told of a process that ended by itself, and how."""

    def __init__(self, config: TrainingConfig, serving: Serving, on_death: Callable[[Child, str], None]) -> None:
        self._config = config
        self._serving = serving
        self._on_death = on_death
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def child(self) -> Child | None:
        return self._child

    @property
    def ready(self) -> Ready | None:
        """What it knows of the base model; None while there is no process that knows."""
        child = self._child
        if child is None or child.ended.done() or not child.ready.done():
            return None
        return child.ready.result()

    async def get(self) -> Child:
        """With its base model loaded; it is started where there is none. Raises ChildEndedError, OSError."""
        async with self._starting:
            if self._child is None or self._child.ended.done():
                child = self._child = await Child.start(
                    self._arguments(),
                    self._config.worker,
                    silence_limit=self._config.silence_limit,
                    call_seconds=self._config.call_seconds / self._config.gpu_share,
                )
                child.ended.add_done_callback(lambda ended: self._mourn(child, ended.result()))
            child = self._child
        await asyncio.shield(child.ready)
        return child

    async def end(self) -> None:
        """Gives its memory back; returns when no process is left, whoever ended it."""
        child, self._child = self._child, None
        if child is not None:
            ending = asyncio.create_task(child.close(), name="training-process-ending")
            self._ending.add(ending)  # goes on when its caller is cancelled
            ending.add_done_callback(self._ending.discard)
        if self._ending:
            await asyncio.wait(self._ending)

    def _mourn(self, child: Child, reason: str) -> None:
        if child is self._child:  # else we have ended it
            self._child = None
            logger.error("%s", reason)
            self._on_death(child, reason)

    def _arguments(self) -> Arguments:
        config = self._config
        return Arguments(
            model=config.source,
            device=config.device,
            cache_dir=None if config.cache_dir is None else str(config.cache_dir),
            model_image_dir=None if config.model_image_dir is None else str(config.model_image_dir),
            max_length=config.max_length,
            max_model_len=self._serving.max_model_len,
            micro_batch_tokens=config.micro_batch_tokens,
            parent_pid=os.getpid(),
            log_level=logging.getLogger().getEffectiveLevel(),
            answering_fd=config.answering_fd,
            gpu_share=config.gpu_share,
        )
