"""Token ids and numbers on the wire: plain lists, or Tinker's chunks and tensors. Must not know what they are for."""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from server.engine.token_ids import TokenIds
from server.schemas.wire import MayBeLong, RequestModel, TokenId
from server.training import PackedDatum

MAX_TOKENS = 1_048_576  # of one datum; the server's own bound on a call is lower
MAX_NUMBER = 1e6


def _unpacked(given: Any) -> Any:
    """Whole numbers alone look like token ids."""
    return list(given) if isinstance(given, TokenIds) else given


Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS), MayBeLong]
Numbers = Annotated[
    list[Number], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS), BeforeValidator(_unpacked)
]


class TextChunk(RequestModel):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: Tokens


class ChunkedInput(RequestModel):
    """Tinker's ModelInput. Images are not served."""

    chunks: Annotated[list[TextChunk], Field(min_length=1, max_length=1024)]


ModelInput = ChunkedInput | Tokens


def token_ids(given: ModelInput) -> list[int]:
    if isinstance(given, ChunkedInput):
        return [token for chunk in given.chunks for token in chunk.tokens]
    return given


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
            tokens=array("i", token_ids(self.model_input)).tobytes(),
            targets=array("i", targets.data if isinstance(targets, TokenTensor) else targets).tobytes(),
            weights=inputs.packed("weights"),
            logprobs=inputs.packed("logprobs"),
            advantages=inputs.packed("advantages"),
        )
