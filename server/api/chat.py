"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.deps import LifecycleDep, OriginDep
from server.api.disconnect import until_disconnect
from server.api.json_route import StrictJSONRoute
from server.api.sse import EVENTS, answer
from server.schemas.chat import ChatCompletion, ChatCompletionRequest
from server.schemas.chat_reply import ChatReply
from server.schemas.failure import BODY_FAILURES
from server.text.generation import Job

router = APIRouter(route_class=StrictJSONRoute, tags=["chat"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=BODY_FAILURES | EVENTS)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, lifecycle: LifecycleDep, origin: OriginDep
) -> Response:
    """Answers a conversation; with `stream`, as server-sent events of chat.completion.chunk objects."""
    generator = lifecycle.accepting(body.model, origin.owner)
    job = Job(
        request_id=origin.new_id("chatcmpl"),
        prompts=(body.prompt(),),
        sampling=body.sampling_params(body.num_logprobs, lifecycle.sampling_defaults),
        max_tokens=body.token_limit,
        arrival_time=origin.arrival_time,
        n=body.choices,
        stop=body.stops,
        cache_salt=origin.cache_salt,
        adapter=lifecycle.adapter_name(body.model),
        prompt_field="messages",
        prompt_logprobs=body.prompt_logprobs,
    )
    reply = ChatReply(
        id=job.request_id,
        model=body.model,
        created=origin.created,
        logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
    )
    generation = await until_disconnect(request.receive, generator.open(job))
    interval = lifecycle.settings.ping_interval
    return answer(request, generation, reply, stream=bool(body.stream), ping_interval=interval)
