"""POST /tokenize and /detokenize: vLLM's."""

from fastapi import APIRouter
from starlette.responses import Response

from server.api.deps import LifecycleDep, OriginDep
from server.api.json_route import StrictJSONRoute
from server.api.piecewise import written
from server.schemas.failure import BODY_FAILURES
from server.schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

router = APIRouter(route_class=StrictJSONRoute, tags=["tokenization"])


@router.post("/tokenize", response_model=TokenizeReply, responses=BODY_FAILURES)
async def tokenize(body: TokenizeRequest, lifecycle: LifecycleDep, origin: OriginDep) -> Response:
    """The tokens of a text, or of a conversation in the model's chat template."""
    generator = lifecycle.accepting(body.model, origin.owner)
    tokens = await generator.tokenize(body.text(), add_special_tokens=body.add_special_tokens is not False)

    def reply() -> bytes:
        strings = [generator.tokenizer.vocabulary_piece(token) for token in tokens] if body.return_token_strs else None
        whole = TokenizeReply(
            count=len(tokens), max_model_len=generator.ready.max_model_len, tokens=list(tokens), token_strs=strings
        )
        return whole.model_dump_json(exclude_none=True).encode()

    return written(await generator.tokenizer.in_thread(reply, len(tokens), fits=False))


@router.post("/detokenize", response_model=DetokenizeReply, responses=BODY_FAILURES)
async def detokenize(body: DetokenizeRequest, lifecycle: LifecycleDep, origin: OriginDep) -> Response:
    """The text of some tokens, special ones included."""
    generator = lifecycle.accepting(body.model, origin.owner)
    tokenizer = generator.tokenizer
    generator.check_vocabulary(body.tokens, "tokens")

    def reply() -> bytes:
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
        return DetokenizeReply(prompt=text).model_dump_json().encode()

    return written(await tokenizer.in_thread(reply, len(body.tokens), fits=False), "tokens")
