"""Rows of many adapters in one batch are what PEFT answers for each alone, and the base model's rows never change."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import GREEDY, generate
from random_adapters import FAMILIES, LIMITS, PackedBatch, alone, family, save_adapter
from safetensors.torch import load_file, save_file
from tiny_models import as_loaded, random_model, tiny_config

from models.adapters import LoraLimits, find_linears
from models.adapters.slots import memory_bytes
from models.batch import NO_ADAPTER, ScheduledSeq, ScoredRows, StepBatch
from models.packed_linear import PackedLinear, pack_linears
from models.runner import ModelRunner

PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 40)), [99] * 18, [11, 12], [40, 30, 20, 10]]
#: Small sums of numbers near 1 in float32, added in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TARGETS: list[dict[str, Any]] = [{}, {"r": 3, "lora_alpha": 5}, {"r": 16, "use_rslora": True}]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_what_peft_answers(name: str, tmp_path: Path) -> None:
    model = family(name)
    adapted = save_adapter(model, tmp_path, seed=3)
    batch = PackedBatch(model)
    batch.slots.read(0, str(tmp_path))
    batch.slots.place(0, 2)
    (ours,) = batch.logits([PROMPTS[1]], [2])
    unmerged = alone(adapted, PROMPTS[1])
    assert not torch.allclose(unmerged, batch.logits([PROMPTS[1]], [NO_ADAPTER])[0], rtol=0.1, atol=0.1)
    torch.testing.assert_close(ours, unmerged, **CLOSE)
    torch.testing.assert_close(ours, alone(adapted.merge_and_unload(), PROMPTS[1]), **CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_three_adapters_and_the_base_model_in_one_batch_equal_each_alone(name: str, tmp_path: Path) -> None:
    model = family(name)
    expected = [
        alone(save_adapter(model, tmp_path / str(at), seed=at, **config), PROMPTS[at])
        for at, config in enumerate(TARGETS)
    ]
    batch = PackedBatch(model)
    without = batch.logits(PROMPTS, [NO_ADAPTER] * 5)
    for at in range(3):
        batch.slots.read(at, str(tmp_path / str(at)))
        batch.slots.place(at, at)
    mixed = batch.logits(PROMPTS, [0, 1, 2, NO_ADAPTER, NO_ADAPTER])
    for ours, peft in zip(mixed[:3], expected, strict=True):
        torch.testing.assert_close(ours, peft, **CLOSE)
    assert torch.equal(mixed[3], without[3])
    assert torch.equal(mixed[4], without[4])


def test_rows_of_the_base_model_are_bitwise_the_same_with_and_without_slots(tmp_path: Path) -> None:
    """Before slots are there, with empty slots, beside adapters, and after the slots are gone."""
    model = family("llama")
    save_adapter(model, tmp_path, seed=1)
    batch = PackedBatch(model)
    batch.slots.remove()
    before = batch.logits(PROMPTS, [NO_ADAPTER] * 5)
    assert all("forward" not in vars(layer.module) for layer in find_linears(model).values())
    batch = PackedBatch(model)
    assert all(map(torch.equal, before, batch.logits(PROMPTS, [NO_ADAPTER] * 5)))
    assert all(map(torch.equal, before, batch.logits(PROMPTS, [3] * 5))), "an empty slot changes nothing"
    batch.slots.read(0, str(tmp_path))
    batch.slots.place(0, 3)
    mixed = batch.logits(PROMPTS, [3, NO_ADAPTER, 3, NO_ADAPTER, NO_ADAPTER])
    same = [torch.equal(*pair) for pair in zip(before, mixed, strict=True)]
    assert same == [False, True, False, True, True]
    batch.slots.remove()
    assert all(map(torch.equal, before, batch.logits(PROMPTS, [3] * 5)))


def test_linears_that_are_packed_for_a_cpu_take_adapters_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("llama")
    products: list[PackedLinear] = []
    whole = PackedLinear.whole
    monkeypatch.setattr(PackedLinear, "whole", lambda layer, x: products.append(layer) or whole(layer, x))
    adapted = save_adapter(model, tmp_path, seed=5)
    if not pack_linears(model):
        pytest.skip("this CPU has no oneDNN")
    batch = PackedBatch(model)
    batch.slots.read(0, str(tmp_path))
    batch.slots.place(0, 0)
    products.clear()
    (ours,) = batch.logits([PROMPTS[1]], [0])
    torch.testing.assert_close(ours, alone(adapted, PROMPTS[1]), **CLOSE)
    assert len(products) == 4 * model.config.num_hidden_layers + 1, (
        "what lies together is one product with adapters too"
    )


def test_patterns_give_layers_their_own_rank_and_alpha(tmp_path: Path) -> None:
    model = family("llama")
    patterns = {
        "rank_pattern": {"q_proj": 4, r"^model\.layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"model.layers.0.self_attn.v_proj": 3, "down_proj": 1},
    }
    adapted = save_adapter(model, tmp_path, seed=7, **patterns)
    batch = PackedBatch(model)
    assert batch.slots.read(0, str(tmp_path)).rank == 8
    batch.slots.place(0, 1)
    (ours,) = batch.logits([PROMPTS[1]], [1])
    torch.testing.assert_close(ours, alone(adapted, PROMPTS[1]), **CLOSE)


def test_a_slot_that_is_filled_again_keeps_nothing_of_what_it_held(tmp_path: Path) -> None:
    model = family("llama")
    save_adapter(model, tmp_path / "wide", seed=1, r=16)
    narrow = save_adapter(model, tmp_path / "narrow", seed=2, r=2, target_modules=["q_proj", "v_proj"])
    batch = PackedBatch(model)
    for number, name in enumerate(("wide", "narrow")):
        batch.slots.read(number, str(tmp_path / name))
        batch.slots.place(number, 0)
    (ours,) = batch.logits([PROMPTS[1]], [0])
    torch.testing.assert_close(ours, alone(narrow, PROMPTS[1]), **CLOSE)


def test_an_adapter_that_overflows_damages_its_own_rows_only(tmp_path: Path) -> None:
    model = family("llama").half()  # type: ignore[no-untyped-call]
    save_adapter(model, tmp_path, seed=1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(
        {name: tensor.sign() * 6e4 if "lora_A" in name else tensor for name, tensor in tensors.items()},
        tmp_path / "adapter_model.safetensors",
    )  # x A^T is infinite in any row, before the mask
    batch = PackedBatch(model)
    before = batch.logits(PROMPTS, [NO_ADAPTER] * 5)
    batch.slots.read(0, str(tmp_path))
    batch.slots.place(0, 0)
    mixed = batch.logits(PROMPTS, [NO_ADAPTER, 0, NO_ADAPTER, NO_ADAPTER, NO_ADAPTER])
    assert not mixed[1].isfinite().all()
    for at in (0, 2, 3, 4):
        assert torch.equal(before[at], mixed[at])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_on_a_gpu_rows_are_what_peft_answers_and_the_base_models_rows_are_its_own(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    model = family("llama")
    expected = [alone(save_adapter(model, tmp_path / str(at), seed=at), PROMPTS[at]) for at in range(3)]
    batch = PackedBatch(model.to("cuda:0", dtype))  # type: ignore[arg-type]
    without = batch.logits(PROMPTS, [NO_ADAPTER] * 5)
    for at in range(3):
        batch.slots.read(at, str(tmp_path / str(at)))
        batch.slots.place(at, at)
        batch.slots.drop(at)  # the copy into the slot may still be under way
    mixed = batch.logits(PROMPTS, [0, 1, 2, NO_ADAPTER, NO_ADAPTER])
    for ours, peft in zip(mixed[:3], expected, strict=True):
        assert (ours.float().cpu() - peft).norm() <= tolerance * peft.norm()
    for at in (3, 4):  # beside adapters, projections are one product each: rounded otherwise
        assert (mixed[at] - without[at]).float().norm() <= 0.2 * tolerance * without[at].float().norm()


def test_a_runner_generates_with_adapters_what_peft_generates(tmp_path: Path) -> None:
    """Chunked prefill, decode and preemption, three adapters and the base model together."""
    model = random_model(tiny_config())
    adapted = [save_adapter(model, tmp_path / str(at), seed=at) for at in range(3)]
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_blocks": 64}
    runner = ModelRunner(as_loaded(model), block_size=16, lora=LoraLimits(3, 8), **limits)  # type: ignore[arg-type]
    runner.warm_up()
    assert runner.adapters is not None
    for at in range(3):
        runner.adapters.read(at, str(tmp_path / str(at)))
        runner.adapters.place(at, at)
    slots = [0, 1, 2, NO_ADAPTER, 1]
    wanted = []
    for prompt, slot in zip(PROMPTS, slots, strict=True):
        tokens = list(prompt)
        with adapted[slot].disable_adapter() if slot == NO_ADAPTER else nullcontext():
            for _ in range(6):
                tokens.append(int(alone(adapted[slot], tokens)[-1].argmax()))
        wanted.append(tokens[len(prompt) :])
    for preempt_every in (0, 5):
        outputs = generate(runner, PROMPTS, 6, budget=24, preempt_every=preempt_every, adapter_slots=slots)
        assert [output.tokens for output in outputs] == wanted


def test_prompts_are_scored_by_the_adapters_of_their_rows(tmp_path: Path) -> None:
    """Adapters know the rows of a whole batch, of which the head sees those that are scored."""
    model = random_model(tiny_config())
    adapted = [save_adapter(model, tmp_path / str(at), seed=at) for at in range(2)]
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_blocks": 64}
    runner = ModelRunner(as_loaded(model), block_size=16, lora=LoraLimits(2, 8), **limits)  # type: ignore[arg-type]
    assert runner.adapters is not None
    for at in range(2):
        runner.adapters.read(at, str(tmp_path / str(at)))
        runner.adapters.place(at, at)
    runner._sampler.rows_per_piece = 4
    prompts, seqs, scored = PROMPTS[:2], [], []
    for at, prompt in enumerate(prompts):
        runner.add_request(at, GREEDY, prompt)
        blocks = list(range(1 + 4 * at, 5 + 4 * at))
        seqs.append(ScheduledSeq(at, prompt, 0, blocks, sample=True, adapter_slot=at))
        scored.append(ScoredRows(at, prompt[1:], 0))
    output = runner.execute(StepBatch(tuple(seqs), scored=tuple(scored)))
    for prompt, peft, token, found in zip(prompts, adapted, output.token_ids, output.prompt_logprobs, strict=True):
        logits = alone(peft, prompt)
        wanted = logits[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert found is not None
        assert torch.frombuffer(bytearray(found.logprobs), dtype=torch.float32).tolist() == pytest.approx(
            wanted.tolist(), abs=1e-3
        )
        assert token == int(logits[-1].argmax())


def test_a_runner_without_adapters_refuses_a_step_that_names_a_slot() -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 32, "num_blocks": 8}
    runner = ModelRunner(as_loaded(random_model(tiny_config())), block_size=16, **limits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without adapters"):
        generate(runner, [[3, 4]], 1, adapter_slots=[0])


def test_the_memory_of_the_slots_is_known_beforehand() -> None:
    model = family("llama")
    slots = PackedBatch(model).slots
    held = sum(forward.a.nbytes + forward.b.nbytes for forward in slots._forwards.values())
    assert memory_bytes(find_linears(model), LIMITS, torch.float32) == held > 0


@pytest.mark.gpu
def test_replayed_steps_answer_with_adapters_what_steps_without_graphs_answer(tmp_path: Path) -> None:
    """float32. Graphs with adapters are recorded when they are first wanted, in the middle of others' steps."""
    model = random_model(tiny_config())
    for at in range(3):
        save_adapter(model, tmp_path / str(at), seed=at)
    loaded = as_loaded(model.to("cuda:0"))  # type: ignore[arg-type]
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_blocks": 64}
    answers = []
    for enforce_eager in (True, False):
        runner = ModelRunner(loaded, block_size=16, lora=LoraLimits(3, 8), enforce_eager=enforce_eager, **limits)  # type: ignore[arg-type]
        runner.warm_up()
        assert runner.adapters is not None
        found = []
        for at, slots in enumerate(([NO_ADAPTER] * 5, [0, NO_ADAPTER, NO_ADAPTER, 0, 0], [0, 1, 2, NO_ADAPTER, 1])):
            runner.adapters.read(at, str(tmp_path / str(at)))  # two of them after graphs with adapters were recorded
            runner.adapters.place(at, at)
            outputs = generate(runner, PROMPTS, 6, budget=24, adapter_slots=slots)
            found.append([output.tokens for output in outputs])
        found.append([output.tokens for output in generate(runner, PROMPTS, 6)])
        answers.append(found)
        if runner._graphs is not None:
            assert any(key.adapted for key in runner._graphs._recorded)
        runner.adapters.remove()
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][3] != answers[0][2]
