"""The sampler against exact distributions and naive per-request references."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.batch import SamplingParams, ScoredRows, StepOutput
from models.sampling import LaunchedSample, PromptScores, Sampler, sampler

EOS = 2
CPU = torch.device("cpu")


def _sampler(vocab_size: int, max_num_seqs: int = 64) -> Sampler:
    return Sampler(max_num_seqs=max_num_seqs, vocab_size=vocab_size, eos_token_ids=(EOS,), device=CPU)


def _sample(chooser: Sampler, logits: Tensor, slots: list[int], positions: list[int]) -> StepOutput:
    return chooser.sample(logits.clone(), np.array(slots), np.array(positions))


def _draws(params: SamplingParams, logits: Tensor, count: int) -> Tensor:
    """Token frequencies of `count` draws at different positions."""
    chooser = _sampler(logits.numel(), max_num_seqs=1)
    chooser.add_request(0, params, [0])
    output = _sample(chooser, logits.expand(count, -1), [0] * count, list(range(1, count + 1)))
    return torch.bincount(torch.tensor(output.token_ids), minlength=logits.numel())


def _chi_square_holds(counts: Tensor, probabilities: Tensor) -> bool:
    possible = probabilities > 0
    assert int(counts[~possible].sum()) == 0
    expected = probabilities[possible].double() * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    # Wilson-Hilferty: (X / n)^(1/3) is nearly normal; 4 sigma.
    return (statistic / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.7, 0.1, -0.3, -1.0, -1.2, -2.0, -2.5])


def _renormalised(logits: Tensor, keep: int) -> Tensor:
    probabilities = logits.softmax(-1)
    probabilities[probabilities.argsort(descending=True)[keep:]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(seed=1), LOGITS.softmax(-1)),
        (SamplingParams(seed=2, temperature=0.5), (LOGITS / 0.5).softmax(-1)),
        (SamplingParams(seed=3, temperature=2.0), (LOGITS / 2).softmax(-1)),
        (SamplingParams(seed=4, top_k=4), _renormalised(LOGITS, 4)),
        (SamplingParams(seed=5, top_p=0.8), _renormalised(LOGITS, 4)),  # cumulative .40 .64 .79 .90
        (SamplingParams(seed=6, top_k=4, top_p=0.8), _renormalised(LOGITS, 3)),  # of the four: .45 .72 .88
        (SamplingParams(seed=7, min_p=0.3), _renormalised(LOGITS, 3)),  # e^-1.0 = .37, e^-1.3 = .27
        (SamplingParams(seed=8, logit_bias={9: 5.0}), (LOGITS + 5 * (torch.arange(10) == 9)).softmax(-1)),
    ],
)
def test_draws_follow_the_exact_distribution(params: SamplingParams, expected: Tensor) -> None:
    probabilities = LOGITS.softmax(-1).cumsum(0)
    assert probabilities[2] < 0.8 < probabilities[3]
    assert _chi_square_holds(_draws(params, LOGITS, 20_000), expected)


def test_unlikely_tokens_are_drawn_as_rarely_as_they_should_be() -> None:
    logits = torch.full((1000,), -5.0)
    logits[0] = 5.0
    counts = _draws(SamplingParams(seed=1), logits, 20_000)
    expected = 20_000 * (1 - logits.softmax(-1)[0].item())
    assert abs(int(counts[1:].sum()) - expected) < 4 * math.sqrt(expected)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    chooser = _sampler(100)
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    for slot in range(5):
        chooser.add_request(slot, SamplingParams(temperature=0.0), [1])
    assert _sample(chooser, logits, list(range(5)), [1] * 5).token_ids == logits.argmax(-1).tolist()


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    params = [
        SamplingParams(seed=11, temperature=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=12, top_p=0.5),
        SamplingParams(seed=13, top_k=7, min_p=0.01),
        SamplingParams(seed=14, presence_penalty=1.0, logprobs=2),
    ]
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    chooser = _sampler(3000)
    for slot, param in enumerate(params):
        chooser.add_request(slot, param, [1, 2])
    together = _sample(chooser, logits, [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]).token_ids
    order = [3, 0, 4, 2, 1]
    other = _sampler(3000)
    for row in order:
        other.add_request(40 + row, params[row], [1, 2])
    shuffled = _sample(other, logits[order], [40 + row for row in order], [5 + row for row in order]).token_ids
    alone = []
    for row in range(5):
        single = _sampler(3000)
        single.add_request(row, params[row], [1, 2])
        alone += _sample(single, logits[row : row + 1], [row], [5 + row]).token_ids
    assert [together[row] for row in order] == shuffled
    assert together == alone


def test_the_same_seed_repeats_and_no_seed_does_not() -> None:
    logits = torch.zeros(1, 5000)

    def stream(seed: int | None) -> list[int]:
        chooser = _sampler(5000)
        chooser.add_request(0, SamplingParams(seed=seed), [1])
        return [_sample(chooser, logits, [0], [position]).token_ids[0] for position in range(1, 9)]

    assert stream(5) == stream(5)
    assert stream(-1) == stream(-1)
    assert stream(5) != stream(6)
    assert stream(None) != stream(None)


def test_sampling_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))

    def run() -> StepOutput:
        chooser = _sampler(50)
        for slot in range(7):
            chooser.add_request(slot, SamplingParams(seed=slot, logprobs=slot % 3 if slot % 2 else None), [1])
        return _sample(chooser, logits, list(range(7)), [3] * 7)

    whole = run()
    monkeypatch.setattr(sampler, "MAX_LOGITS_PER_PIECE", 100)
    pieces = run()
    assert pieces.token_ids == whole.token_ids
    ranks = [[row.rank if row else None for row in output.logprobs] for output in (pieces, whole)]
    assert ranks[0] == ranks[1]


def _naive_penalised(row: list[float], params: SamplingParams, prompt: list[int], generated: list[int]) -> list[float]:
    out = list(row)
    for token in range(len(out)):
        if token in prompt or token in generated:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        count = generated.count(token)
        out[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return out


penalties: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.5, 1.1]),
    }
)


requests_with_penalties = st.lists(
    st.tuples(penalties, st.lists(st.integers(0, 7), max_size=5)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(requests_with_penalties, st.integers(0, 99))
def test_penalties_equal_a_naive_reference(requests: list[tuple[dict[str, Any], list[int]]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chooser = _sampler(8, max_num_seqs=len(requests))
    params = [SamplingParams(temperature=0.0, **fields) for fields, _ in requests]
    generated: list[list[int]] = [[] for _ in requests]
    for slot, (_, prompt) in enumerate(requests):
        chooser.add_request(slot, params[slot], prompt)
    for _step in range(6):
        logits = torch.randn(len(requests), 8, generator=generator)
        positions = [len(prompt) + len(tokens) for (_, prompt), tokens in zip(requests, generated, strict=True)]
        chosen = _sample(chooser, logits, list(range(len(requests))), positions).token_ids
        for slot, token in enumerate(chosen):
            naive = _naive_penalised(logits[slot].tolist(), params[slot], requests[slot][1], generated[slot])
            assert naive[token] == pytest.approx(max(naive), abs=1e-5)
            generated[slot].append(token)


def test_a_preempted_request_goes_on_with_its_penalties() -> None:
    params = SamplingParams(seed=3, frequency_penalty=2.0, repetition_penalty=1.2)
    logits = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))

    def run(preempt_at: int | None) -> list[int]:
        chooser = _sampler(20)
        chooser.add_request(5, params, [1, 2])
        tokens: list[int] = []
        slot = 5
        for step in range(12):
            if step == preempt_at:
                chooser.remove_request(slot)
                slot = 6
                chooser.add_request(slot, params, [1, 2])
                chooser.append_known(slot, tokens)
            tokens += _sample(chooser, logits[step : step + 1], [slot], [2 + step]).token_ids
        return tokens

    assert run(None) == run(7)


def test_tokens_of_a_step_that_failed_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs again, after the host had no memory for its results."""
    logits = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))

    def no_memory(*_: object) -> LaunchedSample:
        raise MemoryError

    def run(fails_at: int | None) -> list[int]:
        chooser = _sampler(20)
        chooser.add_request(0, SamplingParams(seed=3, frequency_penalty=2.0), [1, 2])
        tokens: list[int] = []
        for step in range(12):
            if step == fails_at:
                with monkeypatch.context() as patch:
                    patch.setattr(sampler, "LaunchedSample", no_memory)
                    with pytest.raises(MemoryError):
                        _sample(chooser, logits[step : step + 1], [0], [2 + step])
            tokens += _sample(chooser, logits[step : step + 1], [0], [2 + step]).token_ids
        return tokens

    assert all(run(fails_at) == run(None) for fails_at in range(12))


def test_a_slots_next_request_inherits_nothing() -> None:
    chooser = _sampler(10, max_num_seqs=1)
    chooser.add_request(0, SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias={3: 100.0}), [1])
    assert _sample(chooser, LOGITS[None], [0], [1]).token_ids == [3]
    chooser.remove_request(0)
    chooser.add_request(0, SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias={4: 0.5}), [1])
    assert _sample(chooser, LOGITS[None], [0], [1]).token_ids == [0]


def test_min_tokens_forbids_every_stop_token_until_reached() -> None:
    chooser = _sampler(10)
    logits = torch.zeros(10)
    logits[EOS], logits[7], logits[4] = 9.0, 8.0, 1.0
    chooser.add_request(0, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7, 8, 9, 0, 1)), [1, 1, 1])
    chooser.add_request(1, SamplingParams(temperature=0.0), [1, 1, 1])
    chooser.add_request(2, SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True), [1, 1, 1])
    rows = logits.expand(3, -1)
    assert _sample(chooser, rows, [0, 1, 2], [3, 3, 3]).token_ids == [4, EOS, EOS]
    assert _sample(chooser, rows, [0, 1, 2], [4, 4, 4]).token_ids == [4, EOS, EOS]
    assert _sample(chooser, rows, [0, 1, 2], [5, 5, 5]).token_ids == [EOS, EOS, EOS]


def test_logprobs_are_the_models_own_log_softmax() -> None:
    chooser = _sampler(200)
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) * 3
    chooser.add_request(0, SamplingParams(seed=1, temperature=5.0, logprobs=0, presence_penalty=1.5), [1])
    chooser.add_request(1, SamplingParams(seed=1), [1])
    chooser.add_request(2, SamplingParams(temperature=0.0, logprobs=20, logit_bias={50: 100.0}), [1])
    output = _sample(chooser, logits, [0, 1, 2], [1, 1, 1])
    expected = logits.log_softmax(-1)
    assert output.logprobs[1] is None
    for row, k in ((0, 0), (2, 20)):
        entry = output.logprobs[row]
        assert entry is not None
        token = output.token_ids[row]
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert entry.rank == 1 + int((expected[row] > expected[row, token]).sum())
        best = expected[row].topk(k)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert output.token_ids[2] == 50


def test_a_vocabulary_smaller_than_what_is_asked_for_is_told_whole() -> None:
    chooser = _sampler(12)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    chooser.add_request(0, SamplingParams(temperature=0.0, logprobs=20), [1])
    entry = _sample(chooser, logits, [0], [1]).logprobs[0]
    assert entry is not None
    assert [token for token, _ in entry.top] == logits[0].argsort(descending=True).tolist()
    scores = PromptScores([ScoredRows(0, [3], num_top=20)], torch.device("cpu"))
    scores.add(logits)
    (score,) = scores.collect()
    assert score is not None
    assert (score.num_top, score.top_ids) == (12, entry.top_ids)


def test_rows_with_nan_or_inf_are_flagged_and_do_not_disturb_others() -> None:
    chooser = _sampler(2000)
    logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0))
    for slot in range(5):
        chooser.add_request(slot, SamplingParams(seed=slot, top_p=0.9, min_p=0.01, top_k=50, logprobs=3), [1])
    clean = _sample(chooser, logits, [0, 1, 2, 3, 4], [1] * 5)
    logits[1, 5], logits[3, 6], logits[4, 7] = torch.nan, torch.inf, -torch.inf
    output = _sample(chooser, logits, [0, 1, 2, 3, 4], [1] * 5)
    assert output.finite == [True, False, True, False, False]
    assert [output.token_ids[row] for row in (0, 2)] == [clean.token_ids[row] for row in (0, 2)]
    assert all(0 <= token < 2000 for token in output.token_ids)


def test_half_precision_logits_are_sampled_in_float32() -> None:
    chooser = _sampler(100)
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    chooser.add_request(0, SamplingParams(temperature=0.0, logprobs=1), [1])
    entry = _sample(chooser, logits, [0], [1]).logprobs[0]
    assert entry is not None
    assert entry.logprob == pytest.approx(logits.float().log_softmax(-1).max().item(), abs=1e-6)


def test_a_bias_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 100"):
        _sampler(100).add_request(0, SamplingParams(logit_bias={100: 1.0}), [1])


def test_no_rows_give_no_tokens() -> None:
    output = _sampler(100).sample(torch.empty(0, 100), np.empty(0, np.int64), np.empty(0, np.int64))
    assert output == StepOutput(token_ids=[], logprobs=[], finite=[])
