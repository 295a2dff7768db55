"""Log-probabilities and their gradients, in chunks, are those of the whole logits."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.training.logprobs import chunk_rows, token_logprobs

ROWS, HIDDEN, VOCABULARY = 37, 16, 211


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def inputs(learns: bool) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=True, dtype=torch.float64).requires_grad_(learns)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(VOCABULARY, (ROWS,)), torch.randn(ROWS)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 37, 1000])
def test_values_and_gradients_equal_the_whole(learns: bool, rows: int) -> None:
    head, hidden, labels, weights = inputs(learns)
    whole = head(hidden).float()
    expected = whole.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    wanted = torch.autograd.grad((expected * weights).sum(), [hidden, *(head.parameters() if learns else ())])

    actual, correct = token_logprobs(head, hidden, labels, rows, head_learns=learns)
    got = torch.autograd.grad((actual * weights).sum(), [hidden, *(head.parameters() if learns else ())])

    torch.testing.assert_close(actual, expected)
    assert torch.equal(correct, whole.argmax(-1) == labels)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("learns", [False, True])
def test_no_tensor_holds_more_than_a_chunk_of_logits(learns: bool) -> None:
    head, hidden, labels, _ = inputs(learns)
    limit = max(4 * VOCABULARY, HIDDEN * VOCABULARY)  # a chunk, or the head's weight
    with LargestTensor() as largest:
        actual, _ = token_logprobs(head, hidden, labels, 4, head_learns=learns)
        actual.sum().backward()
    assert largest.elements <= limit < ROWS * VOCABULARY


def test_without_gradients_nothing_is_kept() -> None:
    head, hidden, labels, _ = inputs(False)
    with torch.no_grad():
        actual, _ = token_logprobs(head, hidden, labels, 8, head_learns=False)
    assert not actual.requires_grad


def test_a_chunk_of_a_large_vocabulary_has_fewer_rows() -> None:
    assert chunk_rows(128256) == 1046
    assert chunk_rows(2**40) == 1
