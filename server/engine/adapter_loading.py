"""Commands that load and unload adapters while steps go on: files are read in a thread, everything else happens between
two steps. Knows no requests."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from models.batch import AdapterFacts
from models.errors import AdapterError
from server.engine.adapters import AdapterTable
from server.engine.messages import AdapterLoaded, AdapterUnloaded, CommandFailed, FromEngine, LoadAdapter, UnloadAdapter
from server.engine.runner import AdapterSlots

logger = logging.getLogger(__name__)


class AdapterLoading:
    """One adapter is read at a time, in the order of the commands, and registered before the next: what takes the place
    of others never lies beside all of them."""

    def __init__(self, slots: AdapterSlots | None, table: AdapterTable) -> None:
        self._slots = slots
        self._table = table
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")
        self._pending: list[LoadAdapter] = []  # the first one is being read
        self._reading: tuple[int, Future[AdapterFacts]] | None = None
        self._numbers = count()

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def load(self, command: LoadAdapter) -> Sequence[FromEngine]:
        """Begins; what can be refused at once is."""
        if self._slots is None:
            return [_failed(command, "invalid_adapter", "this server was started without --enable-lora")]
        refusal = self._refusal(command)
        if refusal is not None:
            return [refusal]
        self._pending.append(command)
        if self._reading is None:
            self._read(self._slots)
        return []

    def unload(self, command: UnloadAdapter) -> FromEngine:
        adapter = self._table.retire(command.name)
        if adapter is None:
            return CommandFailed(command.command_id, "model_not_found", f"There is no adapter `{command.name}`.")
        return AdapterUnloaded(command.command_id, adapter.num_open)

    def finished(self) -> list[FromEngine]:
        """Replies to the loads that have ended since the last call."""
        replies: list[FromEngine] = []
        while self._slots is not None and self._reading is not None and self._reading[1].done():
            replies.append(self._finish(self._pending.pop(0), *self._reading))
            self._reading = None
            if self._pending:
                self._read(self._slots)
        return replies

    def _read(self, slots: AdapterSlots) -> None:
        """Begins with the first one that is pending."""
        command, number = self._pending[0], next(self._numbers)
        self._reading = number, self._reader.submit(slots.read, number, command.folder, command.within)

    def _refusal(self, command: LoadAdapter) -> CommandFailed | None:
        """As if all that are pending had been loaded."""
        pending = [other.name for other in self._pending]
        replaces = self._table.find(command.name) is not None
        if command.name in pending or (replaces and not command.replace):
            return CommandFailed(
                command.command_id, "adapter_exists", f"The adapter `{command.name}` has already been loaded."
            )
        if self._table.num_kept_with(pending) - replaces >= self._table.max_registered:
            return CommandFailed(
                command.command_id,
                "insufficient_quota",
                f"{self._table.max_registered} adapters are loaded, as many as this server keeps (max_cpu_loras): "
                "unload one first.",
            )
        return None

    def _finish(self, command: LoadAdapter, number: int, future: Future[AdapterFacts]) -> FromEngine:
        try:
            facts = future.result()
        except AdapterError as error:
            return _failed(command, "invalid_adapter", str(error))
        except Exception:  # no memory for it, say; the folder's name is the operator's
            logger.exception("adapter %s was not loaded", command.name)
            return _failed(command, "server_error", "the server failed to read it")
        self._table.register(number, command.name, facts.digest)
        logger.info("adapter %s: rank %d, %d layers", command.name, facts.rank, facts.num_layers)
        return AdapterLoaded(command.command_id, facts)


def _failed(command: LoadAdapter, code: str, reason: str) -> CommandFailed:
    return CommandFailed(command.command_id, code, f"The adapter `{command.name}` cannot be loaded: {reason}.")
