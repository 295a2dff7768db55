"""Which token ids are refused, at the very edge, and with which words."""

import struct

import pytest

from models.batch import SamplingParams
from server.engine.kv_cache import KVCache
from server.engine.limits import SchedulerConfig, refusal
from server.engine.messages import AddRequest, RequestFailed
from server.engine.request import Request
from server.engine.token_ids import TokenIds

VOCAB_SIZE = 32_000
PLAIN = SamplingParams()
CONFIG = SchedulerConfig(8, 256, 1000, VOCAB_SIZE, ())


def refused(prompt: TokenIds, sampling: SamplingParams = PLAIN) -> RequestFailed | None:
    message = AddRequest("r", prompt, sampling)
    made = Request(message, sequence_number=0, eos_token_ids=(), max_model_len=1000, now=0.0)
    return refusal(made, CONFIG, KVCache(100, 16))


def text(name: str) -> RequestFailed:
    return RequestFailed("r", "unsupported_parameter", f"{name} has a token id outside of 0 to {VOCAB_SIZE - 1}.")


@pytest.mark.parametrize("place", [0, 50, 99])
def test_prompts_name_tokens_of_the_vocabulary(place: int) -> None:
    for token_id, problem in {0: None, VOCAB_SIZE - 1: None, VOCAB_SIZE: text("The prompt")}.items():
        ids = [5] * 100
        ids[place] = token_id
        assert refused(TokenIds(ids)) == problem
    for negative in (-1, -(2**31)):  # as nobody of ours sends them
        signed = struct.pack("=100i", *[5] * place, negative, *[5] * (99 - place))
        assert refused(TokenIds(signed)) == text("The prompt")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_biases_and_stop_tokens_do_too(token_id: int) -> None:
    prompt = TokenIds([1])
    assert refused(prompt, SamplingParams(logit_bias={5: 1.0, token_id: 1.0})) == text("logit_bias")
    assert refused(prompt, SamplingParams(stop_token_ids=(5, token_id))) == text("stop_token_ids")
    edges = (0, VOCAB_SIZE - 1)
    assert refused(prompt, SamplingParams(logit_bias=dict.fromkeys(edges, 1.0), stop_token_ids=edges)) is None


def test_the_first_problem_is_the_one_that_is_named() -> None:
    assert refused(TokenIds()) == RequestFailed("r", "server_error", "The prompt has no tokens.")
    problem = refused(TokenIds([VOCAB_SIZE] * 1000), SamplingParams(stop_token_ids=(-1,)))
    assert problem is not None
    assert problem.code == "context_length_exceeded"
    assert refused(TokenIds([VOCAB_SIZE]), SamplingParams(logit_bias={-1: 1.0})) == text("The prompt")
