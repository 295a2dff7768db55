"""A run: its reports, verdicts, checkpoints and result."""

import fcntl
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import fp8, unquantized
from safetensors.torch import load_file, save_file
from training_runs import Reports, random_examples, random_preferences, tiny_plan, write_model

from models.registry import ModelSource
from models.training import (
    CheckpointError,
    DivergedError,
    ExampleError,
    LoraSettings,
    OtherRunError,
    Trainer,
    Verdict,
)
from models.training.folder import is_whole
from models.training.trainable import TrainableModel

EXAMPLES, VALIDATION = random_examples(10), random_examples(3, seed=9)
STEPS = 6  # two epochs of 4 + 4 + 2 examples


def trainer(model: Path, folder: Path, **changes: Any) -> Trainer:
    return Trainer(tiny_plan(model, **changes), EXAMPLES, VALIDATION, folder, "cpu")


def weights(result: Path) -> dict[str, torch.Tensor]:
    return load_file(next(result.glob("*.safetensors")))


def test_a_run_reports_every_step_and_leaves_a_whole_result(tiny_folder: Path, tmp_path: Path) -> None:
    run, reports = trainer(tiny_folder, tmp_path / "run"), Reports()
    outcome = run.run(reports)

    assert run.total_steps == STEPS
    assert [report.step for report in reports] == list(range(1, STEPS + 1))
    assert (outcome.finished, outcome.steps) == (True, STEPS)
    assert outcome.trained_tokens == 2 * sum(map(len, EXAMPLES)) == sum(report.tokens for report in reports)
    assert outcome.result == tmp_path / "run" / "result"
    assert is_whole(outcome.result)
    assert [report.checkpoint is not None for report in reports] == [False, True] * 3
    assert [report.valid_loss is not None for report in reports] == [False, True] * 3
    assert all(0 <= report.train_mean_token_accuracy <= 1 and report.seconds > 0 for report in reports)
    assert reports[-1].learning_rate < reports[0].learning_rate


def test_a_run_on_fp8_weights_ends_with_the_adapter_of_what_they_mean(tmp_path: Path) -> None:
    source, meant = fp8(tmp_path / "fp8")
    plain = unquantized(tmp_path / "plain")
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    learnt = []
    for folder in (source.folder, plain):
        outcome = trainer(folder, tmp_path / f"run-{folder.name}").run(Reports())
        assert (outcome.finished, outcome.steps) == (True, STEPS)
        assert outcome.result is not None
        learnt.append(weights(outcome.result))
    ours, expected = learnt
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_the_loss_falls_on_what_is_learnt(tiny_folder: Path, tmp_path: Path) -> None:
    reports = Reports()
    plan = tiny_plan(tiny_folder, n_epochs=30, batch_size=4, schedule="constant", checkpoint_every=100)
    Trainer(plan, EXAMPLES[:4], EXAMPLES[:4], tmp_path, "cpu").run(reports)
    assert reports[-1].train_loss < 0.3 * reports[0].train_loss
    assert reports[-1].train_mean_token_accuracy > 0.9
    assert reports[-1].valid_loss is not None
    assert reports[-1].valid_loss < reports[-2].train_loss


def test_every_checkpoint_holds_a_servable_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    reports = Reports()
    outcome = trainer(tiny_folder, tmp_path).run(reports)
    last = reports[-1].checkpoint
    assert last is not None
    assert outcome.result is not None
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (last / file).read_bytes() == (outcome.result / file).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LoraSettings(4, 8, dropout=0.2)},
        {"lora": None, "weight_decay": 0.1, "learning_rate": 1e-3},
        {"dtype": "bfloat16"},
        {"method": "dpo"},
        {"method": "dpo", "lora": None, "learning_rate": 1e-3},
    ],
    ids=["lora with dropout", "full", "bfloat16", "dpo", "dpo full"],
)
def test_a_run_paused_after_every_step_ends_with_the_same_bits(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    preferences = changes.get("method") == "dpo"
    data: Any = (random_preferences(10), random_preferences(2, 5)) if preferences else (EXAMPLES, VALIDATION)
    plan = tiny_plan(tiny_folder, **changes)
    whole = Reports()
    expected = Trainer(plan, *data, tmp_path / "whole", "cpu").run(whole)

    paused = []
    for step in range(1, STEPS + 1):
        reports = Reports(Verdict.PAUSE, after=step)
        outcome = Trainer(plan, *data, tmp_path / "paused", "cpu").run(reports)
        assert not outcome.finished
        assert outcome.steps == step
        again = [] if step == 1 else [step - 1]
        told = [step] if step % 2 == 0 else [step, step]  # once more with the checkpoint that the pause makes
        assert [report.step for report in reports] == again + told
        assert reports[-1].checkpoint == tmp_path / f"paused/checkpoints/step-{step:08d}"
        paused.append(reports[-1])
    outcome = Trainer(plan, *data, tmp_path / "paused", "cpu").run(Reports())

    assert outcome.finished
    assert outcome.trained_tokens == expected.trained_tokens
    assert expected.result is not None
    assert outcome.result is not None
    theirs = weights(outcome.result)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(expected.result).items())
    for one, other in zip(whole, paused, strict=True):
        assert replace(one, seconds=0.0, checkpoint=None) == replace(other, seconds=0.0, checkpoint=None)


def test_cancel_returns_at_once_and_writes_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    outcome = trainer(tiny_folder, tmp_path, checkpoint_every=100).run(Reports(Verdict.CANCEL, after=2))
    assert (outcome.finished, outcome.steps, outcome.result) == (False, 2, None)
    assert not list(tmp_path.glob("checkpoints/*"))
    assert not (tmp_path / "result").exists()


def test_a_finished_run_is_not_run_again(tiny_folder: Path, tmp_path: Path) -> None:
    expected = trainer(tiny_folder, tmp_path).run(Reports())
    reports = Reports()
    assert trainer(tiny_folder, tmp_path).run(reports) == expected
    assert [report.step for report in reports] == [STEPS]  # told once more, in case that nobody heard


def test_a_damaged_result_is_made_again_from_the_last_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    expected = trainer(tiny_folder, tmp_path).run(Reports())
    assert expected.result is not None
    file = expected.result / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert trainer(tiny_folder, tmp_path).run(Reports()) == expected
    assert file.read_bytes() == whole


def test_another_plan_is_not_mixed_with_the_folder_s_run(tiny_folder: Path, tmp_path: Path) -> None:
    trainer(tiny_folder, tmp_path).run(Reports())
    with pytest.raises(OtherRunError, match=r"another plan .*seed 1 / 0"):
        trainer(tiny_folder, tmp_path, seed=1).run(Reports())


def test_a_run_goes_on_where_its_model_has_moved_to(tiny_folder: Path, tmp_path: Path) -> None:
    plan, results = tiny_plan(Path("tiny")), []
    for after, place in ((None, "run"), (2, "moved"), (None, "moved")):
        model = shutil.copytree(tiny_folder, tmp_path / f"model-{place}-{after}")
        verdict = Verdict.CONTINUE if after is None else Verdict.PAUSE
        source = ModelSource("tiny", folder=model)
        run = Trainer(plan, EXAMPLES, VALIDATION, tmp_path / place, "cpu", source=source)
        results.append(run.run(Reports(verdict, after=after or 0)).result)
        shutil.rmtree(model)
    alone, paused, moved = results
    assert (alone is None, paused, moved is None) == (False, None, False)
    for file in ("adapter_config.json", "adapter_model.safetensors"):  # no trace of where the model was
        assert (alone / file).read_bytes() == (moved / file).read_bytes()  # type: ignore[operator]
    assert json.loads((moved / "adapter_config.json").read_bytes())["base_model_name_or_path"] == "tiny"  # type: ignore[operator]


def test_a_run_does_not_go_on_with_a_model_of_another_shape(tiny_folder: Path, tmp_path: Path) -> None:
    def run(model: Path, reports: Reports) -> None:
        source = ModelSource("tiny", folder=model)
        Trainer(tiny_plan(Path("tiny")), EXAMPLES, None, tmp_path, "cpu", source=source).run(reports)

    run(tiny_folder, Reports(Verdict.PAUSE, after=2))
    with pytest.raises(OtherRunError, match="belongs to a tiny of another shape"):
        run(write_model(tmp_path / "other", hidden_size=16), Reports())


def test_a_reference_of_another_model_is_not_taken_up(tiny_folder: Path, tmp_path: Path) -> None:
    """Left in the folder by a run that ended before its first checkpoint."""
    other = write_model(tmp_path / "other", hidden_size=16)
    data = random_preferences(4)
    losses = []
    for model, verdict in ((other, Verdict.CANCEL), (tiny_folder, Verdict.CANCEL)):
        reports = Reports(verdict, after=1)
        plan = tiny_plan(model, lora=None, method="dpo", batch_size=4)
        Trainer(plan, data, None, tmp_path / "run", "cpu").run(reports)
        losses.append(reports[0].train_loss)
    assert losses == pytest.approx([math.log(2)] * 2, abs=1e-5)


def test_what_a_killed_run_left_of_its_result_goes(tiny_folder: Path, tmp_path: Path) -> None:
    left = tmp_path / "run" / ".result-abc123"
    left.mkdir(parents=True)
    trainer(tiny_folder, tmp_path / "run").run(Reports(Verdict.CANCEL, after=1))
    assert not left.exists()


def test_two_processes_do_not_train_in_one_folder(tiny_folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process trains in"):
            trainer(tiny_folder, tmp_path).run(Reports())


def test_packing_changes_the_result_by_rounding_only(tiny_folder: Path, tmp_path: Path) -> None:
    """One example a forward against as many as fit: the loss is divided by the step's learnt tokens, not a batch's."""
    results = []
    for budget in (32, 512):
        reports = Reports()
        trainer(tiny_folder, tmp_path / str(budget), micro_batch_tokens=budget).run(reports)
        results.append([report.train_loss for report in reports])
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_tokens_that_the_model_does_not_have_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    bad = replace(EXAMPLES[0], tokens=(500, *EXAMPLES[0].tokens[1:]))
    for training, validation in (([EXAMPLES[1], bad], None), ([EXAMPLES[1]], [EXAMPLES[1], bad])):
        with pytest.raises(ExampleError, match="example 1: a token id is outside") as error:
            Trainer(tiny_plan(tiny_folder), training, validation, tmp_path, "cpu").run(Reports())
        assert error.value.in_validation is (validation is not None)


def test_an_example_of_the_validation_is_refused_as_one(tiny_folder: Path, tmp_path: Path) -> None:
    nothing = replace(EXAMPLES[0], targets=(False,) * len(EXAMPLES[0]))
    for training, validation in (([nothing], None), (EXAMPLES, [nothing])):
        with pytest.raises(ExampleError, match="example 0: no token is learnt") as error:
            Trainer(tiny_plan(tiny_folder), training, validation, tmp_path, "cpu")
        assert error.value.in_validation is (validation is not None)


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Log-probabilities become NaN in some forwards, as overflowing activations make them. One forward a step here."""
    logprobs, calls = TrainableModel.logprobs, [0]

    def poisoned(model: TrainableModel, batch: Any) -> Any:
        calls[0] += 1
        values, correct = logprobs(model, batch)
        return values * (math.nan if calls[0] in steps else 1.0), correct

    monkeypatch.setattr(TrainableModel, "logprobs", poisoned)


def test_a_step_whose_gradient_is_not_finite_changes_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poison(monkeypatch, {2, 3, 5, 6})
    reports = Reports()
    plan = tiny_plan(tiny_folder, micro_batch_tokens=512, checkpoint_every=1)
    outcome = Trainer(plan, EXAMPLES, None, tmp_path, "cpu").run(reports)
    assert outcome.finished
    assert [math.isnan(report.train_loss) for report in reports] == [False, True, True, False, True, True]
    assert caplog.text.count("nothing is changed") == 4
    kept = [load_file(tmp_path / f"checkpoints/step-0000000{step}/adapter_model.safetensors") for step in (4, 5, 6)]
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())
    assert all(torch.equal(tensor, kept[2][name]) for name, tensor in kept[0].items())


def test_three_of_them_in_a_row_end_the_run_even_across_a_pause(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2, 3, 4})
    plan = tiny_plan(tiny_folder, micro_batch_tokens=512)
    Trainer(plan, EXAMPLES, None, tmp_path, "cpu").run(Reports(Verdict.PAUSE, after=3))
    with pytest.raises(DivergedError, match=r"3 steps in a row \(up to step 4\)"):
        Trainer(plan, EXAMPLES, None, tmp_path, "cpu").run(Reports())


def test_a_full_disk_ends_the_run_and_keeps_what_was_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tiny_folder, tmp_path).run(Reports(Verdict.PAUSE, after=2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match="No space left on device"):
            trainer(tiny_folder, tmp_path).run(Reports())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert trainer(tiny_folder, tmp_path).run(Reports()).finished


def test_deterministic_mode_is_switched_on_for_the_run_alone(tiny_folder: Path, tmp_path: Path) -> None:
    seen = []

    def look(_report: Any) -> Verdict:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return Verdict.CONTINUE

    trainer(tiny_folder, tmp_path, deterministic=True).run(look)
    assert seen == [True] * STEPS
    assert not torch.are_deterministic_algorithms_enabled()


def test_state_files_hold_the_plan_and_no_pickle(tiny_folder: Path, tmp_path: Path) -> None:
    reports = Reports()
    trainer(tiny_folder, tmp_path).run(reports)
    last = reports[-1].checkpoint
    assert last is not None
    assert {path.suffix for path in last.iterdir()} == {".json", ".safetensors"}
    state = json.loads((last / "training_state.json").read_text())
    assert json.loads(state["identity"]["plan"])["batch_size"] == 4
    assert state["progress"]["step"] == STEPS
