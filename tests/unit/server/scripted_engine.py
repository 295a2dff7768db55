"""A tiny byte-level tokenizer, an engine that says what a test tells it to, and a real server on a real socket."""

import asyncio
import io
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from token_logprobs import token_logprobs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.batch import PromptLogprobs, TokenLogprobs
from server.app import create_app
from server.engine.adapter_registry import AdapterInfo
from server.engine.messages import AddRequest, EngineReady, EngineStats, RequestTimes, TokenDelta
from server.errors import AdapterExists, EngineUnavailable, LongwaveError, ModelNotFound
from server.lifecycle import Lifecycle
from server.process import Server, listen, uvicorn_config
from server.settings import Settings
from server.text.tokenizer import BYTE_OF_CHARACTER

MODEL = "tiny"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 512
MAX_MODEL_LEN = 4096
LIMIT = 60.0  # seconds for anything to happen: generous, since the machine may be busy


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; two merges; three control tokens."""
    characters = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)
    vocabulary = {character: at for at, character in enumerate(characters)} | {"he": 256, "ll": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>", chat_template=TEMPLATE
    )


EOS = 260


@dataclass
class Script:
    """What the engine does with every request."""

    text: bytes = b"hello world"
    cached: int = 0
    ends: bool = True  # false: goes on for ever after `text`, one "." at a time
    fail_after: int | None = None  # tokens
    failure: LongwaveError = field(default_factory=lambda: EngineUnavailable("The engine stopped."))
    hold_after: int | None = None  # tokens; then it waits for `resume`


class ScriptedEngine:
    """Implements server.lifecycle.Engine. Touched by tests from another thread: only plain reads and appends."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = EngineStats(1, 2, 100, 75, 10, 20, 3, 40, 30, {"cpu_reference": 7}, 5)
        self.times: Callable[[RequestTimes], None] | None = None
        self.script = Script()
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []
        self.held: list[str] = []
        self.resume = threading.Event()
        self.load = threading.Event()
        self.load.set()
        self.load_failure: LongwaveError | None = None
        self.sampling_defaults: dict[str, float] = {}  # of the model's files
        self.is_ready = False
        self.seconds_to_ready = 0.0
        self.alive = True
        self.heartbeat_age = 0.0
        self.is_idle = False
        self.num_deaths = 0
        self.was_shut_down = False
        self.shutdown_timeouts: list[float] = []
        self.uses_all_time = False  # to shut down
        self.infos: dict[str, AdapterInfo] = {}
        self.refusal: LongwaveError | None = None  # of the next adapter

    async def start(self) -> None:
        return None

    async def ready(self) -> EngineReady:
        await _wait(self.load)
        if self.load_failure is not None:
            raise self.load_failure
        self.is_ready = True
        return EngineReady(
            MODEL,
            "cpu",
            "float32",
            MAX_MODEL_LEN,
            VOCAB_SIZE,
            [EOS],
            64,
            100,
            {"full": "cpu_reference"},
            {"imports": 1.5, "weights": 2.0},
            sampling_defaults=self.sampling_defaults,
        )

    async def gone(self) -> None:
        while self.alive:
            await asyncio.sleep(0.002)

    async def load_adapter(
        self, name: str, folder: str, *, owner: str = "", within: str | None = None, replace: bool = False
    ) -> AdapterInfo:
        if self.refusal is not None:
            raise self.refusal
        if name in self.infos and not replace:
            raise AdapterExists(f"The adapter `{name}` has already been loaded.")
        self.infos[name] = AdapterInfo(name, folder, owner, within, "digest", 8, 1, None, 1_700_000_000)
        return self.infos[name]

    async def unload_adapter(self, name: str, *, owner: str | None = None) -> None:
        if name not in self.infos or owner not in (None, self.infos[name].owner):
            raise ModelNotFound(f"The adapter `{name}` does not exist.")
        del self.infos[name]

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self.infos.values())

    async def shutdown(self, timeout: float = 0.0) -> None:
        self.was_shut_down = True
        self.shutdown_timeouts.append(timeout)
        if self.uses_all_time:
            await asyncio.sleep(timeout)

    async def generate(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        ended = False
        try:
            async for delta in self._deltas(request, self.script):
                ended = delta.finish_reason is not None
                yield delta
        finally:
            if not ended:
                self.aborted.append(request.request_id)
            elif self.times is not None:
                self.times(RequestTimes(request.request_id, 0.0, 0.1, 0.3, 0.7, len(request.prompt_token_ids), 5))

    async def _deltas(self, request: AddRequest, script: Script) -> AsyncIterator[TokenDelta]:
        name, limit = request.request_id, request.sampling.max_tokens
        if request.sampling.prompt_logprobs is not None and len(request.prompt_token_ids) > 1:
            yield TokenDelta(name, [], prompt_logprobs=list(_prompt_logprobs(request)))
        for at in range(limit):
            if at == script.fail_after:
                raise script.failure
            if at == script.hold_after:
                self.held.append(name)
                await _wait(self.resume)
            if at < len(script.text):
                token = script.text[at]
            elif script.ends:
                yield TokenDelta(name, [EOS], _logprobs(request, EOS), "stop", EOS, script.cached)
                return
            else:
                token = ord(".")
                await asyncio.sleep(0.001)  # a step of the engine
            finish = "length" if at == limit - 1 else None
            yield TokenDelta(name, [token], _logprobs(request, token), finish, None, script.cached)


def _logprobs(request: AddRequest, token: int) -> list[TokenLogprobs] | None:
    wanted = request.sampling.logprobs
    if wanted is None:
        return None
    return [token_logprobs(-0.5, [((token + other) % 256, -0.5 - other) for other in range(wanted)])]


def _prompt_logprobs(request: AddRequest) -> Iterator[PromptLogprobs]:
    """In pieces of three tokens: the token at place p has -p, and is the first of alternatives which have less. Where p
    is even, its rank says that it is not."""
    scored, wanted = list(request.prompt_token_ids)[1:], request.sampling.prompt_logprobs or 0
    for at in range(0, len(scored), 3):
        values = -np.arange(at + 1, min(at + 3, len(scored)) + 1, dtype=np.float32)
        ranks = np.array([1 if value % 2 else 100 for value in values], np.int32)
        steps = np.arange(wanted, dtype=np.int32)
        ids = (np.array(scored[at : at + 3], np.int32)[:, None] + steps) % VOCAB_SIZE
        top = values[:, None] - steps
        yield PromptLogprobs(wanted, values.tobytes(), ranks.tobytes(), ids.tobytes(), top.astype(np.float32).tobytes())


async def _wait(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.002)


@dataclass
class LiveServer:
    url: str
    engine: ScriptedEngine
    lifecycle: Lifecycle
    loop: asyncio.AbstractEventLoop
    port: int

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LIMIT, **options)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LIMIT)


def settings(**changes: Any) -> Settings:
    return Settings(**{"model": MODEL, "ping_interval": 30.0, **changes})


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


@contextmanager
def live_server(
    *, wait: bool = True, engine: ScriptedEngine | None = None, template: str | None = None, **changes: Any
) -> Iterator[LiveServer]:
    engine = engine or ScriptedEngine()
    lifecycle = Lifecycle(settings(**changes), engine, tiny_tokenizer, chat_template=template)
    listener = listen("127.0.0.1", 0)
    server = Server(uvicorn_config(create_app(lifecycle), lifecycle.settings))
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    try:
        wait_until(lambda: server.started and (lifecycle.is_ready or not wait))
        yield LiveServer(f"http://127.0.0.1:{port}", engine, lifecycle, loops[0], port)
    finally:
        engine.resume.set()
        engine.load.set()
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive(), _what_is_waited_for(thread, loops[0])


def _what_is_waited_for(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> str:
    """By a server that does not end."""
    text = io.StringIO()
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=text)
    for ident, frame in sys._current_frames().items():
        print("the server's thread:" if ident == thread.ident else "another thread:", file=text)
        traceback.print_stack(frame, file=text)
    return text.getvalue()


def scored(server: LiveServer) -> list[int | None]:
    """What the engine was asked for with each choice of the last request."""
    last = server.engine.requests[-1].request_id.rpartition("-")[0]
    asked = [request for request in server.engine.requests if request.request_id.startswith(last)]
    asked.sort(key=lambda request: int(request.request_id.rpartition("-")[2]))
    return [request.sampling.prompt_logprobs for request in asked]
