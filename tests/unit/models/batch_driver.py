"""A scheduler of a few lines that drives a runner, and transformers' own answer to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from models.attention_sites import attention_implementation
from models.batch import NO_ADAPTER, SamplingParams, ScheduledSeq, StepBatch, StepOutput, TokenLogprobs
from models.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Generated:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)


@dataclass
class _Request:
    slot: int
    tokens: list[int]
    block_ids: list[int]
    adapter_slot: int = NO_ADAPTER
    computed: int = 0
    out: Generated = field(default_factory=Generated)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    budget: int = 64,
    first_slot: int = 0,
    preempt_every: int = 0,
    adapter_slots: Sequence[int] | None = None,
) -> list[Generated]:
    """Continuous batching with chunked prefill: decodes first, then prompts, at most `budget` tokens a step.

    With `preempt_every`, all pages are given up and computed again after that many steps.
    """
    per_request = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    slots = adapter_slots or [NO_ADAPTER] * len(prompts)
    requests, block = [], 1
    for i, prompt in enumerate(prompts):
        blocks = -(-(len(prompt) + count) // runner.block_size)
        requests.append(_Request(first_slot + i, list(prompt), list(range(block, block + blocks)), slots[i]))
        block += blocks
        runner.add_request(first_slot + i, per_request[i], prompt)
    steps = 0
    while open_requests := [request for request in requests if len(request.out.tokens) < count]:
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            for i, request in enumerate(requests):
                runner.remove_request(request.slot)
                request.computed = 0
                request.block_ids = request.block_ids[::-1]
                runner.add_request(request.slot, per_request[i], prompts[i])
                runner.append_known(request.slot, request.out.tokens)
        _step(runner, sorted(open_requests, key=lambda request: request.pending), budget)
    for request in requests:
        runner.remove_request(request.slot)
    return [request.out for request in requests]


def _step(runner: ModelRunner, requests: list[_Request], budget: int) -> StepOutput:
    seqs, sampling = [], []
    for request in requests:
        new = min(request.pending, budget)
        if new == 0:
            break
        budget -= new
        end = request.computed + new
        used = request.block_ids[: -(-end // runner.block_size)]
        last = end == len(request.tokens)
        new_tokens = request.tokens[request.computed : end]
        seqs.append(ScheduledSeq(request.slot, new_tokens, request.computed, used, last, request.adapter_slot))
        request.computed = end
        if last:
            sampling.append(request)
    output = runner.execute(StepBatch(tuple(seqs)))
    for request, token, logprob, finite in zip(sampling, output.token_ids, output.logprobs, output.finite, strict=True):
        request.tokens.append(token)
        request.out.tokens.append(token)
        request.out.logprobs.append(logprob)
        request.out.finite.append(finite)
    return output


def eager_tokens(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own generate answers with eager attention, greedily, end tokens forbidden."""
    generator: Any = model
    with attention_implementation(model, "eager"):
        output = generator.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
