"""/v1/fine_tuning/jobs: create, list, retrieve, cancel, pause, resume, events, checkpoints."""

import re
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request

from server.api.deps import FeedsDep, FineTuningDep, LifecycleDep, OriginDep
from server.api.job_events import EventFeed
from server.api.json_route import StrictJSONRoute
from server.api.sse import EVENTS
from server.errors import InvalidRequest, ServerDraining, UnsupportedParameter
from server.finetune import FineTuning, Job
from server.lifecycle import Phase
from server.schemas.failure import BODY_FAILURES, READ_FAILURES, failures
from server.schemas.fine_tuning import MAX_PAGE, FineTuningJobRequest
from server.schemas.fine_tuning_reply import (
    FineTuningJob,
    FineTuningJobCheckpoint,
    FineTuningJobCheckpointList,
    FineTuningJobEvent,
    FineTuningJobEventList,
    FineTuningJobList,
)
from server.schemas.labels import MAX_KEY, MAX_METADATA, MAX_VALUE
from server.settings import FINE_TUNED, SAVED_WEIGHTS

PATH = "/v1/fine_tuning/jobs"
ONE = PATH + "/{fine_tuning_job_id}"
JOB_FAILURES = READ_FAILURES | failures(400, 404, 507)
METADATA_FILTER = re.compile(r"metadata\[(.*)\]", re.DOTALL)

Id = Annotated[str | None, Query(max_length=256)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]

router = APIRouter(route_class=StrictJSONRoute, tags=["fine-tuning"])


@router.post(PATH, responses=BODY_FAILURES | failures(409, 429, 507))
async def create_job(
    body: FineTuningJobRequest,
    lifecycle: LifecycleDep,
    jobs: FineTuningDep,
    origin: OriginDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=256)] = None,
) -> FineTuningJob:
    """Starts a job that fine-tunes a model. Sent again with the same `Idempotency-Key`, it is the same job."""
    if lifecycle.phase is Phase.DRAINING:
        raise ServerDraining("The server is shutting down. Try again later.")
    is_tuned = body.model.startswith((FINE_TUNED, SAVED_WEIGHTS))  # also one that is not served, or no longer
    if is_tuned or lifecycle.check_model(body.model, origin.owner) is not None:
        raise UnsupportedParameter(
            "A fine-tuned model or an adapter is not trained further here; models are "
            + ", ".join(lifecycle.settings.model_names),
            param="model",
        )
    return FineTuningJob.of(await jobs.create(origin.owner, body.job(), idempotency_key))


@router.get(PATH, responses=JOB_FAILURES)
async def list_jobs(
    request: Request, jobs: FineTuningDep, origin: OriginDep, after: Id = None, limit: PageSize = 20
) -> FineTuningJobList:
    """The newest first; `metadata[key]=value` leaves those that have it, `metadata=null` those that have none."""
    wanted = _metadata_filter(request)
    if wanted is None:
        found = await _without_metadata(jobs, origin.owner, after, limit + 1)
    else:
        found = await jobs.page(origin.owner, after, limit + 1, wanted)
    return FineTuningJobList(data=[FineTuningJob.of(job) for job in found[:limit]], has_more=len(found) > limit)


@router.get(ONE, responses=JOB_FAILURES)
async def retrieve_job(fine_tuning_job_id: str, jobs: FineTuningDep, origin: OriginDep) -> FineTuningJob:
    return FineTuningJob.of(await jobs.get(fine_tuning_job_id, origin.owner))


@router.post(ONE + "/cancel", responses=JOB_FAILURES)
async def cancel_job(fine_tuning_job_id: str, jobs: FineTuningDep, origin: OriginDep) -> FineTuningJob:
    """Ends the job at once."""
    return FineTuningJob.of(await jobs.cancel(fine_tuning_job_id, origin.owner))


@router.post(ONE + "/pause", responses=JOB_FAILURES)
async def pause_job(fine_tuning_job_id: str, jobs: FineTuningDep, origin: OriginDep) -> FineTuningJob:
    """A job that runs stops after its next step, with a checkpoint."""
    return FineTuningJob.of(await jobs.pause(fine_tuning_job_id, origin.owner))


@router.post(ONE + "/resume", responses=JOB_FAILURES)
async def resume_job(fine_tuning_job_id: str, jobs: FineTuningDep, origin: OriginDep) -> FineTuningJob:
    """A paused job goes on from its last checkpoint."""
    return FineTuningJob.of(await jobs.resume(fine_tuning_job_id, origin.owner))


@router.get(ONE + "/events", response_model=FineTuningJobEventList, responses=JOB_FAILURES | failures(503) | EVENTS)
async def list_events(
    fine_tuning_job_id: str,
    lifecycle: LifecycleDep,
    jobs: FineTuningDep,
    feeds: FeedsDep,
    origin: OriginDep,
    after: Id = None,
    limit: PageSize = 20,
    stream: bool = False,
    accept: Annotated[str, Header(max_length=1024)] = "",
    last_event_id: Annotated[str | None, Header(max_length=256)] = None,
) -> Any:
    """The newest first. With `stream=true` or `Accept: text/event-stream`: the oldest first, as server-sent events,
    until the job has ended; `Last-Event-ID` (or `after`) says where to go on."""
    if not (stream or "text/event-stream" in accept):
        found = await jobs.events(fine_tuning_job_id, origin.owner, after, limit + 1)
        events = [FineTuningJobEvent.of(event) for event in found[:limit]]
        return FineTuningJobEventList(data=events, has_more=len(found) > limit)
    with ExitStack() as place:
        place.enter_context(feeds.place(origin.owner))
        job = await jobs.get(fine_tuning_job_id, origin.owner)
        events_of_job = await jobs.follow(job, last_event_id or after)
        interval = lifecycle.settings.ping_interval
        return EventFeed(place.pop_all(), events_of_job, lambda: lifecycle.phase is Phase.DRAINING, interval)


@router.get(ONE + "/checkpoints", responses=JOB_FAILURES)
async def list_checkpoints(
    fine_tuning_job_id: str, jobs: FineTuningDep, origin: OriginDep, after: Id = None, limit: PageSize = 10
) -> FineTuningJobCheckpointList:
    """The newest first."""
    job, found = await jobs.checkpoints(fine_tuning_job_id, origin.owner, after, limit + 1)
    page = [FineTuningJobCheckpoint.of(job, checkpoint) for checkpoint in found[:limit]]
    return FineTuningJobCheckpointList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(found) > limit,
    )


async def _without_metadata(jobs: FineTuning, owner: str, after: str | None, limit: int) -> list[Job]:
    found: list[Job] = []
    while len(found) < limit:
        page = await jobs.page(owner, after, MAX_PAGE, {})
        found += [job for job in page if not job.request.metadata]
        if len(page) < MAX_PAGE:
            break
        after = page[-1].id
    return found[:limit]


def _metadata_filter(request: Request) -> dict[str, str] | None:
    """None: jobs without metadata."""
    wanted: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        found = METADATA_FILTER.fullmatch(name)
        if found is None:
            continue
        if len(found[1]) > MAX_KEY or len(value) > MAX_VALUE or len(wanted) >= MAX_METADATA:
            raise InvalidRequest("The metadata filter is too long, or has too many keys.", param="metadata")
        wanted[found[1]] = value
    none_at_all = request.query_params.getlist("metadata")
    if none_at_all and (wanted or set(none_at_all) != {"null"}):
        raise InvalidRequest("The metadata filter is metadata[key]=value, or metadata=null alone.", param="metadata")
    return None if none_at_all else wanted
