"""Engines with as little of everything as their settings allow: one slot, a token more than slots, a pool that just
holds the longest request, contexts that end at a block's edge. Every request ends once, with its own answer."""

import random

import fake_runner
import pytest
from cranked_engine import Engine, tokens
from fake_runner import expected

from server.engine.drafting import DraftLimits


def narrow_engine(rng: random.Random) -> tuple[Engine, int]:
    """And its longest context."""
    block_size = rng.choice([16, 32, 128])
    max_num_seqs = rng.choice([1, 2, 3, 8])
    length = rng.choice([2, block_size, block_size + 1, 2 * block_size + 1, 3 * block_size])
    blocks = -(-(length - 1) // block_size)  # of one request; the last token is never run
    engine = Engine(
        1 + blocks + rng.choice([0, 0, 1, 3, 2 * blocks]),
        block_size,
        budget=max_num_seqs + rng.choice([0, 0, 1, max_num_seqs, 24]),
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        caching=rng.random() < 0.8,
        overlaps=rng.random() < 0.7,
    )
    return engine, length


@pytest.mark.parametrize("drafts", [None, DraftLimits(step_cost=0.0, row_cost=0.0, max_rows=64)])
@pytest.mark.parametrize("seed", range(12))
def test_an_engine_with_no_room_to_spare_answers_everybody(
    seed: int, drafts: DraftLimits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "drafts", drafts)
    rng = random.Random(seed)
    engine, length = narrow_engine(rng)
    shared = tokens(rng, length)
    wanted: dict[str, list[int]] = {}
    for number in range(25):
        prompt = shared[: rng.randrange(length)] + tokens(rng, rng.randrange(1, length))
        if rng.random() < 0.4:
            prompt = [fake_runner.QUOTES, *prompt[:4], fake_runner.QUOTES, *prompt]
        prompt = prompt[: length - 1]
        room = length - len(prompt)
        count = rng.choice([room, rng.randrange(1, room + 1)])
        engine.add(f"r{number}", prompt, max_tokens=count, salt=bytes([rng.randrange(3)]))
        wanted[f"r{number}"] = expected(prompt, count)
        for _ in range(rng.randrange(5)):
            engine.turn()
            engine.scheduler.open.check_integrity()
        if rng.random() < 0.15:
            engine.abort(*rng.sample(sorted(wanted), k=1))
    engine.run()
    engine.assert_nothing_is_held()
    assert not engine.failures
    for name, answer in wanted.items():
        got = engine.tokens.get(name, [])
        assert got == (answer[: len(got)] if engine.reasons[name] == "abort" else answer)
