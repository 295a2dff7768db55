"""Which requests can ever run: numbers of tokens and blocks against what this engine has. Knows nothing of load."""

from collections.abc import Iterator
from dataclasses import dataclass

from server.engine.kv_cache import KVCache
from server.engine.messages import RequestFailed
from server.engine.request import Request
from server.engine.tpot_target import TpotTarget


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    queue_timeout: float | None = None  # seconds
    tpot_target: TpotTarget | None = None  # None: chunks of prompts are limited in tokens only


def refusal(request: Request, config: SchedulerConfig, cache: KVCache) -> RequestFailed | None:
    """Why the request can never run; None when it can. The API process refuses the same things earlier and nicer."""
    problem = next(_problems(request, config, cache), None)
    return None if problem is None else RequestFailed(request.request_id, *problem)


def _problems(request: Request, config: SchedulerConfig, cache: KVCache) -> Iterator[tuple[str, str]]:
    """Codes and messages. The first one counts: nobody looks any further."""
    length, most, sampling = request.num_prompt_tokens, config.vocab_size - 1, request.sampling
    if length == 0:
        yield "server_error", "The prompt has no tokens."
    if length >= config.max_model_len:
        text = f"The prompt has {length} tokens; this server's maximum context length is {config.max_model_len}."
        yield "context_length_exceeded", text
    stored = request.max_length - 1  # the last token is never run
    usable = cache.pool.num_usable
    if cache.blocks_for(stored) > usable:
        room = usable * cache.block_size
        text = f"The prompt and its completion need {stored} tokens of KV cache; this server has room for {room}."
        yield "context_length_exceeded", text
    named = {
        "The prompt": (request.token_ids.largest(),),
        "logit_bias": sampling.logit_bias,
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, token_ids in named.items():
        if any(not 0 <= token_id <= most for token_id in token_ids):
            yield "unsupported_parameter", f"{name} has a token id outside of 0 to {most}."
