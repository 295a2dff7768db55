"""Jobs as their owners see and change them."""

from pathlib import Path

import pytest
from job_makers import MODEL, REQUEST, create, leases, messages, opened, step, training, validated

from server.finetune.leases import TRAIN, VALIDATE
from server.finetune.records import Adapter, Status
from server.finetune.store import WrongStatusError
from server.schemas.fine_tuning_reply import FineTuningJobCheckpoint


def test_a_job_comes_back_as_it_was_created(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        job = create(store, suffix="mine", metadata={"team": "a"}, validation_file="file-2")
    with opened(tmp_path) as store:
        assert store.find("ftjob-1", "me") == job
        assert (job.status, job.seed, job.attempt, job.plan) == (Status.VALIDATING, 7, 0, None)
        assert messages(store) == [
            "Created fine-tuning job: ftjob-1", "Validating training file: file-1 and validation file: file-2",
        ]  # fmt: skip


def test_a_job_of_a_version_without_schedules_is_read_with_the_one_that_it_had(tmp_path: Path) -> None:
    old = """{"model": "base", "method": "supervised", "training_file": "file-1", "hyperparameters": {"n_epochs": 2}}"""
    with opened(tmp_path) as store:
        create(store)
        store.connection.execute("UPDATE jobs SET request = ?", (old,))
        asked = store.get("ftjob-1").request.hyperparameters
        assert (asked.n_epochs, asked.lr_scheduler_type, asked.warmup_ratio) == (2, "cosine", 0.03)


def test_another_owners_jobs_do_not_exist(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        create(store, "ftjob-2", "them")
        assert store.find("ftjob-1", "them") is None
        assert [job.id for job in store.page("them", None, 10, {})] == ["ftjob-2"]


def test_pages_go_from_the_newest_to_the_oldest_also_within_a_second(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        ids = [create(store, f"ftjob-{number}").id for number in range(7)][::-1]
        assert [job.id for job in store.page("me", None, 3, {})] == ids[:3]
        assert [job.id for job in store.page("me", ids[2], 10, {})] == ids[3:]


@pytest.mark.parametrize("key", ["team", "a.b", 'quo"te', "brack[0]et", "$", "ünï", "a'b", "back\\slash"])
def test_metadata_filters_by_any_key_and_value(tmp_path: Path, key: str) -> None:
    with opened(tmp_path) as store:
        create(store, metadata={key: "x", "other": "y"})
        create(store, "ftjob-2", metadata={key: "y"})
        create(store, "ftjob-3")
        assert [job.id for job in store.page("me", None, 10, {key: "x"})] == ["ftjob-1"]
        assert [job.id for job in store.page("me", None, 10, {key: "x", "other": "y"})] == ["ftjob-1"]
        assert store.page("me", None, 10, {key: "x", "other": "z"}) == []


def test_an_idempotency_key_makes_one_job_per_owner(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first = create(store, key="k")
        assert create(store, "ftjob-2", key="k") == first
        assert create(store, "ftjob-3", "them", key="k").id == "ftjob-3"
        assert len(store.page("me", None, 10, {})) == 1


def test_only_jobs_that_have_not_ended_count_in_the_limit(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store, max_live=1)
        assert store.create("ftjob-2", "me", MODEL, REQUEST, 7, 1.0, None, 1, 1, set) is None
        store.cancel("ftjob-1", 2.0)
        create(store, "ftjob-2", max_live=1)


def test_cancelling_is_final_and_can_be_repeated(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        cancelled = store.cancel("ftjob-1", 200.0)
        assert (cancelled.status, cancelled.finished_at) == (Status.CANCELLED, 200.0)
        assert store.cancel("ftjob-1", 300.0) == cancelled
        for act in (store.pause, store.resume):
            with pytest.raises(WrongStatusError):
                act("ftjob-1", 300.0)
        assert leases(store).claim(VALIDATE, MODEL, 400.0) is None


def test_a_paused_job_is_not_taken_up_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        held = leases(store)
        create(store)
        store.pause("ftjob-1", 101.0)
        assert held.claim(VALIDATE, MODEL, 102.0) is None
        assert store.resume("ftjob-1", 103.0).status is Status.VALIDATING
        validated(store, held)
        store.pause("ftjob-1", 104.0)
        assert held.claim(TRAIN, MODEL, 105.0) is None
        assert store.resume("ftjob-1", 106.0).status is Status.QUEUED
        assert held.claim(TRAIN, MODEL, 107.0) is not None


def test_a_job_that_runs_cannot_be_resumed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        training(store, leases(store))
        with pytest.raises(WrongStatusError):
            store.resume("ftjob-1", 110.0)


def test_counts_name_every_status(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        create(store, "ftjob-2")
        store.cancel("ftjob-2", 1.0)
        assert store.counts() == {status.value: 0 for status in Status} | {"validating_files": 1, "cancelled": 1}


def test_events_can_be_read_from_both_ends(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        for number in range(5):
            store.journal.say("ftjob-1", 1.0, f"event {number}")
        every = store.journal.events("ftjob-1", after=0, before=None, limit=100)
        newest = store.journal.events("ftjob-1", after=None, before=None, limit=2)
        assert newest == every[::-1][:2]
        assert store.journal.events("ftjob-1", after=None, before=newest[-1].sequence, limit=100) == every[::-1][2:]
        assert store.journal.events("ftjob-1", after=every[3].sequence, before=None, limit=2) == every[4:6]
        assert store.journal.event_place("ftjob-1", every[3].id) == every[3].sequence
        assert store.journal.event_place("ftjob-2", every[3].id) is None


def test_checkpoints_are_the_newest_first_with_their_metrics(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        held = leases(store)
        create(store)
        job = training(store, held)
        for number in range(1, 6):
            held.stepped(job, 103.0, step(number, valid_loss=1.5), 5, checkpoint=number % 2 == 0)
        found = store.journal.checkpoints("ftjob-1", before_step=None, limit=10)
        assert [(point.metrics.step, point.metrics.valid_loss) for point in found] == [(4, 1.5), (2, 1.5)]
        at = store.journal.checkpoint_step("ftjob-1", found[0].id)
        assert store.journal.checkpoints("ftjob-1", before_step=at, limit=10) == found[1:]
        assert [one.step for one in store.journal.steps("ftjob-1")] == [1, 2, 3, 4, 5]


def test_finished_adapters_are_kept_by_base_model_until_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        held = leases(store)
        create(store)
        job = training(store, held)
        held.succeeded(job, 200.0, model="ft:base::1", trained_tokens=40, result_file="file-9", notes=[])
        assert store.adapters(MODEL) == [Adapter("ft:base::1", "me", "ftjob-1", MODEL, 200.0)]
        assert store.adapters("another base") == []
        assert store.holds_adapter_of("ftjob-1")
        store.remove_adapter("ft:base::1")
        assert store.adapters(MODEL) == []


def test_a_validation_has_openais_names_of_one_over_the_whole_file(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        held.stepped(job, 103.0, step(1, valid_loss=1.5, valid_mean_token_accuracy=0.25), 4, checkpoint=True)
        held.stepped(job, 104.0, step(2), 4, checkpoint=False)
        last, _, first = store.journal.events(job.id, after=None, before=None, limit=3)
        assert first.data is not None
        assert last.data is not None
        assert (first.data["full_valid_loss"], first.data["full_valid_mean_token_accuracy"]) == (1.5, 0.25)
        assert not [name for name in last.data if "valid" in name]
        (point,) = store.journal.checkpoints(job.id, before_step=None, limit=9)
        shown = FineTuningJobCheckpoint.of(job, point).metrics.model_dump()
        assert (shown["full_valid_loss"], shown["full_valid_mean_token_accuracy"]) == (1.5, 0.25)
