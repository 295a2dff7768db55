"""POST /v1/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.deps import LifecycleDep, OriginDep
from server.api.disconnect import until_disconnect
from server.api.json_route import StrictJSONRoute
from server.api.sse import EVENTS, answer
from server.schemas.completion_reply import CompletionReply
from server.schemas.completions import Completion, CompletionRequest
from server.schemas.failure import BODY_FAILURES
from server.text.generation import Job

router = APIRouter(route_class=StrictJSONRoute, tags=["completions"])


@router.post("/v1/completions", response_model=Completion, responses=BODY_FAILURES | EVENTS)
async def create_completion(
    body: CompletionRequest, request: Request, lifecycle: LifecycleDep, origin: OriginDep
) -> Response:
    """Continues one or several prompts, texts or token ids; with `stream`, as server-sent events."""
    generator = lifecycle.accepting(body.model, origin.owner)
    job = Job(
        request_id=origin.new_id("cmpl"),
        prompts=body.prompts(),
        sampling=body.sampling_params(body.logprobs, lifecycle.sampling_defaults),
        max_tokens=body.token_limit,
        arrival_time=origin.arrival_time,
        n=body.choices,
        stop=body.stops,
        cache_salt=origin.cache_salt,
        adapter=lifecycle.adapter_name(body.model),
        echo=bool(body.echo),
        prompt_logprobs=body.prompt_logprobs,
    )
    generation = await until_disconnect(request.receive, generator.open(job))
    reply = CompletionReply(
        id=job.request_id,
        model=body.model,
        created=origin.created,
        echoes=generation.echoes,
        logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
        n=job.n,
    )
    interval = lifecycle.settings.ping_interval
    return answer(request, generation, reply, stream=bool(body.stream), ping_interval=interval)
