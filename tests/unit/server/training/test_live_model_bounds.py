"""Whose a live model is, and what is refused of it."""

import pytest
from live_training import (
    Run,
    Work,
    compute,
    load,
    save,
)

from server.errors import (
    InsufficientStorage,
    InvalidRequest,
    QuotaExceeded,
    SequenceConflict,
    TrainingMissing,
)
from server.training import Call, NewModel, Saved, Unload

pytestmark = pytest.mark.timeout(180)


def test_other_owners_see_nothing(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create("me")
        (future,) = work.submit(model, save())
        await work.outcome(future)
        assert work.training.future(future.request_id, "me") is future
        assert work.training.future(f"{model.id}:0", "me") is model.creating
        for find in (
            lambda: work.training.model(model.id, "you"),
            lambda: work.training.future(future.request_id, "you"),
            lambda: work.training.future(f"{model.id}:0", "you"),
            lambda: work.training.future(f"{model.id}:77", "me"),
            lambda: work.training.future(f"{model.id}:x", "me"),
            lambda: work.training.future("nonsense", "me"),
        ):
            with pytest.raises(TrainingMissing):
                find()
        theirs = await work.create("you")
        (error,) = await work.do(theirs, load(model))
        assert isinstance(error, TrainingMissing)
        with pytest.raises(TrainingMissing):
            await work.training.delete_weights(load(model).path, "you")
        assert work.training.live("you") == [theirs]

    run(main)


def test_the_same_idempotency_key_is_the_same_model(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create(key="k")
        assert await work.create(key="k") is model
        assert await work.create("you", key="k") is not model
        with pytest.raises(SequenceConflict):
            await work.training.create("me", "base", NewModel(4, 32, None, 0), key="k")

    run(main)


def test_of_those_that_have_ended_the_last_ones_of_each_owner_are_known(run: Run) -> None:
    async def main(work: Work) -> None:
        theirs = await work.create("you")
        await work.training.delete(theirs)
        ended = []
        for number in range(4):
            ended.append(await work.create(key=str(number)))
            await work.training.delete(ended[-1])
        await work.create()
        for model in ended[:2]:
            with pytest.raises(TrainingMissing):
                work.training.model(model.id, "me")
        assert [work.training.model(model.id, "me") for model in ended[2:]] == ended[2:]
        assert work.training.model(theirs.id, "you") is theirs
        assert await work.create(key="0") is not ended[0]

    run(main, max_ended=2)


def test_models_and_ranks_are_bounded(run: Run) -> None:
    async def main(work: Work) -> None:
        with pytest.raises(InvalidRequest, match=r"rank is 17; .* up to rank 16") as error:
            await work.training.create("me", "base", NewModel(17, 32, None, 0))
        assert error.value.param == "lora_config.rank"
        model = await work.create()
        with pytest.raises(QuotaExceeded, match="1 models are live"):
            await work.create("you")
        await work.do(model, Unload())
        await work.create("you")

    run(main, max_models=1)


@pytest.mark.parametrize(
    ("call", "told", "param"),
    [
        (compute(*range(20), *range(20)), "has 40 tokens; one sequence has at most 32 here", "data[0].model_input"),
        (compute(1, 100), "outside the vocabulary of 100", "data[0].model_input"),
        (compute(*[1] * 51), "The call has 51 tokens; at most 50", "data"),
        (save("autosave"), "'autosave' is the name under which the server saves", "path"),
    ],
)
def test_calls_that_can_never_be_carried_out_are_refused_at_once(run: Run, call: Call, told: str, param: str) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        with pytest.raises(InvalidRequest, match=told) as error:
            work.training.submit(model, None, call)
        assert error.value.param == param
        assert model.sequence.next_seq_id == 1
        assert model.sequence.pending == []

    run(main, max_call_tokens=50)


def test_saved_names_are_kept_unless_they_may_be_replaced(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        first, second, third = await work.do(model, save(), save(), save(overwrite=True))
        assert isinstance(second, InvalidRequest)
        assert "already" in second.message
        assert first == third
        (fourth,) = await work.do(model, save("two"))
        assert isinstance(fourth, QuotaExceeded)
        await work.training.delete_weights(first.path, "me")
        assert isinstance((await work.do(model, save("two")))[0], Saved)

    run(main, max_saved=1)


def test_models_that_save_at_once_do_not_pass_their_owners_quota(run: Run) -> None:
    async def main(work: Work) -> None:
        models = [await work.create() for _ in range(3)] + [await work.create("you")]
        futures = [work.submit(model, save())[0] for model in models]
        *mine, yours = [type(await work.outcome(future)) for future in futures]
        assert sorted(mine, key=str) == [QuotaExceeded, QuotaExceeded, Saved]
        assert yours is Saved
        assert len(await work.training.saved("me")) == 1

    run(main, max_saved=1)


def test_a_disk_that_is_full_is_told(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        (error,) = await work.do(model, save())
        assert isinstance(error, InsufficientStorage)

    run(main, scripted={"fail": "Save", "kind": "storage"})


def test_deleted_weights_are_named_to_nobody_as_the_ones_to_go_on_from(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        first, second, served = await work.do(model, save(), save("two"), save("three", kind="sampler_weights"))
        assert model.last_saved == second
        await work.training.delete_weights(second.path, "me")
        assert model.last_saved == first
        assert first.path in model.way_on
        await work.training.delete_weights(first.path, "me")
        assert model.last_saved == served
        await work.training.delete_weights(served.path, "me")
        assert model.last_saved is None
        assert "Nothing of it was saved" in model.way_on

    run(main)
