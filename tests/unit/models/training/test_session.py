"""Models that learn call by call: their numbers are eager attention's and torch's, and no call's grouping shows."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from training_runs import SIZES, VOCABULARY, write_model
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

from models import registry
from models.training import (
    AdamParams,
    CheckpointError,
    Datum,
    DivergedError,
    ExampleError,
    LoraSettings,
    PlanError,
    SessionSettings,
    TrainingSession,
)
from models.training.calls import LossName

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own

LORA = LoraSettings(rank=4, alpha=8)
STEP = AdamParams(learning_rate=1e-2)
NAMES = iter(f"train-{number}" for number in range(1000))


def make_session(folder: Path, **changes: Any) -> TrainingSession:
    fields: dict[str, Any] = {"model": str(folder), "max_length": 64, "micro_batch_tokens": 48}
    return TrainingSession(registry.resolve(str(folder)), SessionSettings(**{**fields, **changes}), "cpu")


@pytest.fixture(scope="module")
def session(tiny_folder: Path) -> TrainingSession:
    return make_session(tiny_folder)


@pytest.fixture
def model(session: TrainingSession) -> str:
    name = next(NAMES)
    session.create(name, LORA, seed=1)
    return name


def random_data(count: int = 5, seed: int = 0, **changes: Any) -> list[Datum]:
    source = torch.Generator().manual_seed(seed)

    def one() -> Datum:
        length = int(torch.randint(3, 30, (1,), generator=source))
        ids = torch.randint(3, 100, (length + 1,), generator=source)
        weights = torch.rand(length, generator=source)
        return Datum(ids[:-1], ids[1:], weights, **changes)

    return [one() for _ in range(count)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def learn(session: TrainingSession, name: str, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        session.forward_backward(name, random_data(seed=seed + step), "cross_entropy")
        session.optim_step(name, STEP)


def test_logprobs_are_those_of_eager_attention(session: TrainingSession, model: str, tiny_folder: Path) -> None:
    eager = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    data = random_data()
    report = session.forward(model, data, "cross_entropy")
    loss = 0.0
    for datum, logprobs in zip(data, report.logprobs, strict=True):
        with torch.no_grad():
            expected = eager(datum.tokens[None]).logits[0].double().log_softmax(-1).gather(1, datum.targets[:, None])
        torch.testing.assert_close(logprobs.double(), expected[:, 0], rtol=0, atol=2e-4)
        assert datum.weights is not None
        loss -= float((expected[:, 0] * datum.weights.double()).sum())
    assert report.loss == pytest.approx(loss, rel=1e-4)
    assert report.tokens == sum(map(len, data))


def test_calls_add_up_to_the_gradient_of_one_call(session: TrainingSession) -> None:
    data = random_data(7)
    norms, weights = [], []
    for parts in ([data], [data[:2], data[2:3], data[3:]], [[datum] for datum in reversed(data)]):
        name = next(NAMES)
        session.create(name, LORA, seed=1)
        for part in parts:
            session.forward_backward(name, part, "cross_entropy")
        norms.append(session.optim_step(name, STEP))
        weights.append(flat(session.forward(name, data, "cross_entropy").logprobs))
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-5)
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-3, atol=1e-3)


def test_models_of_one_session_do_not_see_each_other(session: TrainingSession) -> None:
    alone, first, second = next(NAMES), next(NAMES), next(NAMES)
    for name in (alone, first, second):
        session.create(name, LORA, seed=7)
    learn(session, alone, 3)
    for step in range(3):  # their calls take turns
        session.forward_backward(first, random_data(seed=step), "cross_entropy")
        session.forward_backward(second, random_data(seed=100 + step), "cross_entropy")
        session.optim_step(first, STEP)
        session.optim_step(second, STEP)
    data = random_data(seed=50)
    answers = [flat(session.forward(name, data, "cross_entropy").logprobs) for name in (alone, first, second)]
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


def test_bfloat16_models_take_turns_too(tiny_folder: Path) -> None:
    """Their gradients go to float32 masters by hooks, which have to outlive the change of the active adapter."""
    session = make_session(tiny_folder, dtype="bfloat16")
    for name in ("train-a", "train-b", "train-c"):
        session.create(name, LORA, seed=7)
    learn(session, "train-a", 2)
    for step in range(2):
        for name in ("train-b", "train-c"):
            session.forward_backward(name, random_data(seed=step), "cross_entropy")
        for name in ("train-b", "train-c"):
            session.optim_step(name, STEP)
    data = random_data(seed=50)
    answers = [flat(session.forward(f"train-{name}", data, "cross_entropy").logprobs) for name in "abc"]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_new_model_gives_the_bases_answers_and_learning_changes_them(session: TrainingSession, model: str) -> None:
    other = next(NAMES)
    session.create(other, LoraSettings(rank=2, alpha=4, target_modules=("q_proj",)), seed=9)
    data = random_data()
    before = session.forward(model, data, "cross_entropy")
    assert torch.equal(flat(before.logprobs), flat(session.forward(other, data, "cross_entropy").logprobs))
    for _ in range(5):
        session.forward_backward(model, data, "cross_entropy")
        session.optim_step(model, STEP)
    assert session.forward(model, data, "cross_entropy").loss < 0.9 * before.loss
    assert session.forward(other, data, "cross_entropy").loss == before.loss


def test_a_step_is_torchs_adamw(session: TrainingSession, model: str, tmp_path: Path) -> None:
    params = AdamParams(3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    session.forward_backward(model, random_data(), "cross_entropy")
    optimizer = session._models[model].optimizer
    ours = optimizer._masters
    theirs = {name: parameter.detach().clone().requires_grad_() for name, parameter in ours.items()}
    for name, parameter in theirs.items():
        gradient = ours[name].grad
        assert gradient is not None
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
    torch.optim.AdamW(theirs.values(), lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1).step()
    assert session.optim_step(model, params) == pytest.approx(float(norm), rel=1e-6)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-7)


def test_a_policy_gradient_makes_the_rewarded_likelier_and_the_punished_less_likely(
    session: TrainingSession, model: str
) -> None:
    data = random_data(2, seed=3)
    before = session.forward(model, data, "cross_entropy").logprobs
    signs = [torch.full((len(data[0]),), 1.0), torch.full((len(data[1]),), -1.0)]
    rewarded = [
        Datum(datum.tokens, datum.targets, None, sampled, sign)
        for datum, sampled, sign in zip(data, before, signs, strict=True)
    ]
    report = session.forward_backward(model, rewarded, "importance_sampling")
    assert report.loss == pytest.approx(len(data[1]) - len(data[0]), abs=1e-3)  # every ratio is 1
    session.optim_step(model, AdamParams(1e-3))
    after = session.forward(model, data, "cross_entropy").logprobs
    assert float(after[0].sum()) > float(before[0].sum())
    assert float(after[1].sum()) < float(before[1].sum())
    ppo = session.forward_backward(model, rewarded, "ppo")
    assert ppo.clipped is not None


def test_forward_leaves_no_gradient(session: TrainingSession, model: str) -> None:
    session.forward(model, random_data(), "cross_entropy")
    with pytest.raises(PlanError, match="there was no forward_backward"):
        session.optim_step(model, STEP)


def test_a_failed_call_voids_the_gradient_it_was_part_of(session: TrainingSession, model: str) -> None:
    data = random_data()
    before = flat(session.forward(model, data, "cross_entropy").logprobs)
    session.forward_backward(model, data, "cross_entropy")
    overflowing = [
        Datum(data[0].tokens, data[0].targets, None, torch.full((len(data[0]),), -1e4), torch.ones(len(data[0])))
    ]
    with pytest.raises(DivergedError, match="importance_sampling loss is -inf"):
        session.forward_backward(model, overflowing, "importance_sampling")
    with pytest.raises(PlanError, match=r"a forward_backward since the last one has failed .*loss is -inf"):
        session.optim_step(model, STEP)
    assert torch.equal(flat(session.forward(model, data, "cross_entropy").logprobs), before)
    session.forward_backward(model, data, "cross_entropy")  # and it goes on
    assert session.optim_step(model, STEP) > 0


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("datum", "loss", "message"),
    [
        (Datum(ids(5, 120), ids(5, 5)), "cross_entropy", r"data\[0\]: a token id of its tokens is outside .* of 120"),
        (Datum(ids(5, 6), ids(5, -1)), "cross_entropy", "a token id of its targets is outside"),
        (Datum(ids(5, 6), ids(5)), "cross_entropy", "2 tokens but 1 targets"),
        (Datum(ids(5), ids(5), torch.ones(2)), "cross_entropy", "1 tokens but 2 weights"),
        (Datum(ids(5), ids(5), logprobs=torch.ones(1)), "cross_entropy", "cross_entropy takes no logprobs"),
        (Datum(ids(5), ids(5), logprobs=torch.ones(1)), "ppo", "ppo needs advantages"),
        (Datum(torch.ones(65).long(), torch.ones(65).long()), "cross_entropy", "1 to 64 tokens here, not 65"),
        (Datum(ids(), ids()), "cross_entropy", "1 to 64 tokens here, not 0"),
    ],
)
def test_data_that_cannot_be_learnt_from_are_refused(
    session: TrainingSession, model: str, datum: Datum, loss: LossName, message: str
) -> None:
    with pytest.raises(ExampleError, match=message):
        session.forward_backward(model, [datum], loss)


def test_saved_weights_go_on_as_if_nothing_had_happened(
    tiny_folder: Path, session: TrainingSession, tmp_path: Path
) -> None:
    left_alone, saved = next(NAMES), next(NAMES)
    for name in (left_alone, saved):
        session.create(name, LORA, seed=1)
        learn(session, name, 3)
    session.save(saved, tmp_path / "weights", optimizer=True, files={"label.json": "{}"})
    elsewhere = make_session(tiny_folder)
    elsewhere.create("train-x", LORA, seed=99)
    assert elsewhere.load("train-x", tmp_path / "weights", optimizer=True) == 3
    learn(session, left_alone, 2, seed=3)
    learn(elsewhere, "train-x", 2, seed=3)
    data = random_data(seed=50)
    answers = [s.forward(name, data, "cross_entropy") for s, name in ((session, left_alone), (elsewhere, "train-x"))]
    assert torch.equal(flat(answers[0].logprobs), flat(answers[1].logprobs))


@pytest.mark.parametrize("with_state", [True, False])
def test_without_its_state_the_optimiser_begins_anew(
    session: TrainingSession, tmp_path: Path, with_state: bool
) -> None:
    source, target = next(NAMES), next(NAMES)
    for name in (source, target):
        session.create(name, LORA, seed=1)
    learn(session, source, 2)
    session.save(source, tmp_path / "weights", optimizer=with_state, files={})
    learn(session, target, 1, seed=9)
    session.forward_backward(target, random_data(), "cross_entropy")  # is discarded
    assert session.load(target, tmp_path / "weights", optimizer=False) == 0
    data = random_data(seed=50)
    answers = [flat(session.forward(name, data, "cross_entropy").logprobs) for name in (source, target)]
    assert torch.equal(answers[0], answers[1])
    assert all(
        not value.any() for name, value in session._models[target].optimizer.state_tensors().items() if "exp_" in name
    )
    with pytest.raises(PlanError, match="there was no forward_backward"):
        session.optim_step(target, STEP)


def test_peft_reads_what_is_saved(session: TrainingSession, model: str, tiny_folder: Path, tmp_path: Path) -> None:
    learn(session, model, 2)
    session.save(model, tmp_path / "weights", optimizer=True, files={})
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "weights").eval()
    (datum,) = random_data(1)
    with torch.no_grad():
        expected = theirs(datum.tokens[None]).logits[0].log_softmax(-1).gather(1, datum.targets[:, None])[:, 0]
    torch.testing.assert_close(
        session.forward(model, [datum], "cross_entropy").logprobs[0], expected, rtol=0, atol=2e-4
    )


def _damage(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "lora", "optimizer", "message"),
    [
        (_damage, LORA, False, "a file of them is damaged"),
        (shutil.rmtree, LORA, False, "are not there"),
        (None, LoraSettings(rank=2, alpha=8), False, "the weights have r 4, this model has 2"),
        (None, LoraSettings(rank=4, alpha=16), False, "the weights have lora_alpha 8, this model has 16"),
        (None, LoraSettings(rank=4, alpha=8, target_modules=("q_proj",)), False, "of other layers"),
        (None, LORA, True, "saved without the optimiser's state"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    session: TrainingSession,
    tmp_path: Path,
    spoil: Callable[[Path], None] | None,
    lora: LoraSettings,
    optimizer: bool,
    message: str,
) -> None:
    source, target = next(NAMES), next(NAMES)
    session.create(source, LORA, seed=1)
    session.create(target, lora, seed=2)
    learn(session, source, 1)
    session.save(source, tmp_path / "weights", optimizer=False, files={})
    if spoil is not None:
        spoil(tmp_path / "weights")
    data = random_data()
    before = session.forward_backward(target, data, "cross_entropy")
    with pytest.raises(CheckpointError, match=message):
        session.load(target, tmp_path / "weights", optimizer=optimizer)
    assert session.forward(target, data, "cross_entropy").loss == pytest.approx(before.loss, rel=1e-6)
    assert session.optim_step(target, STEP) > 0  # its gradient is still there


def test_first_weights_are_a_function_of_the_seed(session: TrainingSession) -> None:
    names = [next(NAMES) for _ in range(3)]
    for name, seed in zip(names, (1, 1, 2), strict=True):
        session.create(name, LORA, seed)
        learn(session, name, 1)
    answers = [flat(session.forward(name, random_data(), "cross_entropy").logprobs) for name in names]
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


def test_modules_that_share_a_linear_layer_s_name_are_left_alone(tmp_path: Path) -> None:
    """Gemma 3n's linear layers are called q_proj, ..., and 0: as its first decoder layer is."""
    sizes: dict[str, Any] = {**SIZES, "intermediate_size": [48, 48], "head_dim": 16, "sliding_window": 8}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4}
    config = Gemma3nTextConfig(
        **sizes,
        **per_layer,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
    )
    session = make_session(write_model(tmp_path, config))
    session.create("train-gemma", LORA, seed=1)
    learn(session, "train-gemma", 1)
    assert session.steps("train-gemma") == 1


def test_targets_that_the_layers_do_not_have_are_refused_with_those_they_have(session: TrainingSession) -> None:
    with pytest.raises(PlanError, match=r"have no linear qkv that LoRA could adapt; they have down_proj, gate_proj"):
        session.create("train-q", LoraSettings(target_modules=("qkv", "q_proj")), seed=0)


def test_a_removed_model_is_gone_and_the_others_stay(session: TrainingSession, model: str) -> None:
    data = random_data()
    learn(session, model, 1)
    before = session.forward(model, data, "cross_entropy").loss
    doomed = next(NAMES)
    session.create(doomed, LORA, seed=5)
    session.forward(doomed, data, "cross_entropy")
    session.remove(doomed)
    assert not [name for name, _ in session._peft.named_parameters() if doomed in name]
    assert session.forward(model, data, "cross_entropy").loss == before
    with pytest.raises(KeyError):
        session.forward(doomed, data, "cross_entropy")


def test_models_are_saved_while_another_one_computes(session: TrainingSession, tmp_path: Path) -> None:
    """By another thread, in the middle of a forward and of a backward; neither shows in what the other one gives."""
    quiet, busy, twin = next(NAMES), next(NAMES), next(NAMES)
    for name in (quiet, busy, twin):
        session.create(name, LORA, seed=1)
        learn(session, name, steps=2)

    def saved(name: str, place: str) -> dict[str, bytes]:
        session.save(name, tmp_path / place, optimizer=True, files={})
        return {file.name: file.read_bytes() for file in (tmp_path / place).iterdir()}

    before = {name: saved(name, f"{name}-before") for name in (quiet, busy)}
    meanwhile: list[dict[str, dict[str, bytes]]] = []

    def save_both(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            places = {name: f"{name}-{len(meanwhile)}" for name in (quiet, busy)}
            meanwhile.append({name: pool.submit(saved, name, place).result() for name, place in places.items()})

    decoder: Any = session._base.decoder
    layer = decoder.layers[-1].mlp
    hooks = [layer.register_forward_hook(save_both), layer.register_full_backward_hook(save_both)]
    data = random_data(seed=7)
    report = session.forward_backward(busy, data, "cross_entropy")
    for hook in hooks:
        hook.remove()
    assert len(meanwhile) >= 2
    assert all(one == before for one in meanwhile)
    alone = session.forward_backward(twin, data, "cross_entropy")
    assert report.loss == alone.loss
    assert session.optim_step(busy, STEP) == session.optim_step(twin, STEP)
    assert saved(busy, "one") == saved(twin, "other")
