"""What crosses the border between API process and engine process. msgspec only: no pickle, no strings of text."""

from typing import Literal

import msgspec

from models.batch import AdapterFacts, PromptLogprobs, SamplingParams, TokenLogprobs
from server.engine.offload_stats import OffloadStats
from server.engine.token_ids import TokenIds

FinishReason = Literal["stop", "length", "abort", "error"]


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    prompt_token_ids: TokenIds  # made once, for all requests of the prompt
    sampling: SamplingParams
    cache_salt: bytes = b""
    adapter: str | None = None  # a loaded adapter's name; None: the base model


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Answered by AdapterLoaded or CommandFailed with the same command_id."""

    command_id: int
    name: str
    folder: str  # PEFT's
    within: str | None = None  # the folder that it may not lead out of, and that it counts from
    replace: bool = False  # whether the name may have been loaded: open requests keep the adapter they began with


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Answered by AdapterUnloaded or CommandFailed. Open requests finish; new ones do not find the name."""

    command_id: int
    name: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToEngine = AddRequest | AbortRequests | LoadAdapter | UnloadAdapter | Shutdown


class EngineLoading(msgspec.Struct, frozen=True, tag=True):
    """Sent before EngineReady, whenever a stage of the start has ended."""

    stages: dict[str, float]  # that have ended, in seconds


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Sent once, after weights are loaded, the self-test passed and the KV pool is allocated."""

    model: str
    device: str  # "cpu" or the GPU's name
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    kernels: dict[str, str]  # layer type -> kernel that serves it (attention_backend.dispatch's names)
    stages: dict[str, float] = {}  # of its start, in seconds
    sampling_defaults: dict[str, float] = {}  # what the model's authors ask for


class TokenDelta(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that stopped it (it is the last of token_ids, and no text)
    num_cached_tokens: int = 0
    prompt_logprobs: list[PromptLogprobs] | None = None  # of the prompt's next tokens, from the second one on


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """The request ended without a usable result. `code` is one of server.errors' codes."""

    request_id: str
    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, tag=True):
    """Pushed after steps (at most 10 a second), with the last of an engine's work, and once a second when idle: also
    the engine's heartbeat."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    prompt_tokens: int  # counters since start
    generation_tokens: int
    num_preemptions: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens
    kernel_calls: dict[str, int]  # which kernel served, and how often
    step_tokens: int = 0  # tokens of the last step
    max_loras: int = 0  # 0: no adapters are served
    running_adapters: tuple[str, ...] = ()  # names, sorted
    waiting_adapters: tuple[str, ...] = ()  # names that waiting requests ask for
    adapter_placements: int = 0  # copies of an adapter into a slot
    offload: OffloadStats | None = None  # None: there is no slower memory for blocks
    num_drafts: int = 0  # counters since start: sequences of steps with guessed tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    missing_graphs: int = 0  # CUDA graphs for which there was no memory
    longest_turn: float = 0.0  # seconds that a step has kept it silent, or is expected to
    corrupted_requests: int = 0  # counter since start: failed, as the model's output for them was not finite


class RequestTimes(msgspec.Struct, frozen=True, tag=True):
    """Sent when a request ends: seconds, engine's clock (monotonic)."""

    request_id: str
    queued: float
    scheduled: float
    first_token: float
    last_token: float
    num_prompt_tokens: int
    num_generation_tokens: int


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    command_id: int
    facts: AdapterFacts


class AdapterUnloaded(msgspec.Struct, frozen=True, tag=True):
    command_id: int
    num_open: int  # requests that still run with it


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    """Nothing has changed. `code` is one of server.errors' codes."""

    command_id: int
    code: str
    message: str


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine is about to exit; every open request is lost."""

    message: str


CommandReply = AdapterLoaded | AdapterUnloaded | CommandFailed
FromEngine = (
    EngineLoading | EngineReady | TokenDelta | RequestFailed | EngineStats | RequestTimes | CommandReply | EngineFailed
)
