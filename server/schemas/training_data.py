"""Token ids and numbers on the wire: plain lists, or Tinker's chunks and tensors. Must not know what they are for."""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from server.engine.token_ids import TokenIds
from server.schemas.wire import RequestModel, TokenId, check_length, may_be_long
from server.training import PackedDatum

MAX_TOKENS = 1_048_576  # of one datum; the server's own bound on a call is lower
MAX_NUMBER = 1e6


def _unpacked(given: Any) -> Any:
    """Whole numbers alone look like token ids."""
    if not isinstance(given, TokenIds):
        return given
    check_length(given, MAX_TOKENS)
    return list(given)


Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS), may_be_long(MAX_TOKENS)]
Numbers = Annotated[
    list[Number], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS), BeforeValidator(_unpacked)
]


class TextChunk(RequestModel):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: Tokens


class ChunkedInput(RequestModel):
    """Tinker's ModelInput. Images are not served."""

    chunks: Annotated[list[TextChunk], Field(fail_fast=True, min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def _not_longer_than_one_list(self) -> Self:
        length = sum(len(chunk.tokens) for chunk in self.chunks)
        if length > MAX_TOKENS:
            raise ValueError(f"the chunks should have at most {MAX_TOKENS} tokens together, not {length}")
        return self


ModelInput = ChunkedInput | Tokens


def token_ids(given: ModelInput) -> TokenIds:
    ids = TokenIds()
    for tokens in (chunk.tokens for chunk in given.chunks) if isinstance(given, ChunkedInput) else (given,):
        ids.extend(tokens)
    return ids


class FlatTensor(RequestModel):
    """Tinker's TensorData: flat, of one dimension."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"sparse_crow_indices": (), "sparse_col_indices": ()}

    shape: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=1, max_length=1)] | None = None

    @property
    def numbers(self) -> Sequence[float]:
        raise NotImplementedError

    @model_validator(mode="after")
    def _has_its_shape(self) -> Self:
        if self.shape is not None and self.shape != [len(self.numbers)]:
            raise ValueError(f"the shape is {self.shape}, but there are {len(self.numbers)} numbers")
        return self


class NumberTensor(FlatTensor):
    data: Numbers
    dtype: Literal["int64", "float32"] = "float32"

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        broken = next((n for n in self.data if not n.is_integer()), None) if self.dtype == "int64" else None
        if broken is not None:
            raise ValueError(f"the dtype is int64, but {broken:.6g} is no whole number")
        return self

    @property
    def numbers(self) -> Sequence[float]:
        return self.data


class TokenTensor(FlatTensor):
    data: Tokens
    dtype: Literal["int64"] = "int64"

    @property
    def numbers(self) -> Sequence[int]:
        return self.data


class LossFnInputs(RequestModel):
    """One number for each token of the model_input."""

    target_tokens: TokenTensor | Tokens
    weights: NumberTensor | Numbers | None = None
    logprobs: NumberTensor | Numbers | None = None
    advantages: NumberTensor | Numbers | None = None

    def packed(self, name: str) -> bytes | None:
        given: NumberTensor | list[float] | None = getattr(self, name)
        if given is None:
            return None
        return array("f", given.data if isinstance(given, NumberTensor) else given).tobytes()


class Datum(RequestModel):
    model_input: ModelInput
    loss_fn_inputs: LossFnInputs

    def packed(self) -> PackedDatum:
        inputs = self.loss_fn_inputs
        targets = inputs.target_tokens
        return PackedDatum(
            tokens=token_ids(self.model_input).tobytes(),
            targets=token_ids(targets.data if isinstance(targets, TokenTensor) else targets).tobytes(),
            weights=inputs.packed("weights"),
            logprobs=inputs.packed("logprobs"),
            advantages=inputs.packed("advantages"),
        )
