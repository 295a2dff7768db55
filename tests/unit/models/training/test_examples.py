"""Examples that cannot be learnt from are refused with their index."""

import pytest
from training_runs import random_examples

from models.training import Example, ExampleError, Preference, TrainingPlan
from models.training.examples import check, check_vocabulary, digest

PLAN = TrainingPlan("bundled", max_length=4)
GOOD = Example((5, 6, 7), (False, False, True))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Example((5, 6, 7), (True, True)), "3 tokens but 2 targets"),
        (Example((5, 6, 7, 8, 9), (True,) * 5), "5 tokens are more than max_length 4"),
        (Example((5, 6, 7), (True, False, False)), "no token is learnt"),  # nothing stands before the first
        (Example((), ()), "no token is learnt"),
        (Preference(GOOD, GOOD), "method 'supervised' learns from Example, not Preference"),
    ],
)
def test_a_bad_example_is_named(bad: Example | Preference, message: str) -> None:
    with pytest.raises(ExampleError, match=f"example 1: {message}") as caught:
        check([GOOD, bad], PLAN)
    assert caught.value.index == 1


def test_both_answers_of_a_preference_are_checked() -> None:
    plan = TrainingPlan("bundled", method="dpo", max_length=4)
    check([Preference(GOOD, GOOD)], plan)
    with pytest.raises(ExampleError, match="no token is learnt"):
        check([Preference(GOOD, Example((5, 6), (False, False)))], plan)


def test_no_examples_are_refused() -> None:
    with pytest.raises(ExampleError, match="no examples") as caught:
        check([], PLAN)
    assert caught.value.index is None


@pytest.mark.parametrize("token", [-1, 8])
def test_tokens_that_the_model_does_not_have_are_refused(token: int) -> None:
    check_vocabulary([GOOD], vocab_size=8)
    with pytest.raises(ExampleError, match="example 1: a token id is outside the vocabulary of 8"):
        check_vocabulary([GOOD, Example((5, token), (True, True))], vocab_size=8)


def test_the_digest_depends_on_tokens_targets_and_order() -> None:
    examples = random_examples(3)
    changed = [*examples[:2], Example(examples[2].tokens, (*examples[2].targets[:-1], False))]
    digests = {digest(e) for e in (examples, examples[::-1], changed, examples[:2], [])}
    assert len(digests) == 5
    assert digest(random_examples(3)) == digest(examples)
