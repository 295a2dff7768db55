"""What a request's sampling is where it says nothing: neutral, or what the model's authors ask for."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.errors import ModelLoadError

MAX_TOP_K = 1_000_000

Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=MAX_TOP_K, description="0 or -1: off.")]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=2)]  # logits divided by much less are infinite


class SamplingDefaults(BaseModel):
    """Neutral by default, as OpenAI's are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0

    @classmethod
    def of(cls, asked: dict[str, float]) -> "SamplingDefaults":
        """Of a model's generation_config.json. Raises ModelLoadError for what no request could ask for."""
        try:
            return cls(**asked)  # type: ignore[arg-type]  # pydantic checks
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))} {e['input']}: {e['msg']}" for e in error.errors())
            raise ModelLoadError(
                f"generation_config.json has sampling that is not served: {wrong}. "
                "--generation-config vllm leaves it out."
            ) from error

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.model_dump(exclude_defaults=True).items())
