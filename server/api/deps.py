"""What routes ask FastAPI for. All of it is `async`: other functions are handed to threads, and the request waits."""

import secrets
import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from server.api.job_events import EventFeeds
from server.files.store import FileStore
from server.finetune import FineTuning
from server.lifecycle import Lifecycle
from server.training import Training


async def _lifecycle(request: Request) -> Lifecycle:
    lifecycle: Lifecycle = request.app.state.lifecycle
    return lifecycle


@dataclass(frozen=True, slots=True)
class Origin:
    """What the middleware found out about a request."""

    arrival_time: float
    cache_salt: bytes
    owner: str  # of files: one for each API key, empty without keys
    created: int  # seconds since 1970

    @staticmethod
    def new_id(prefix: str) -> str:
        """128 random bits: nobody guesses another caller's."""
        return f"{prefix}-{secrets.token_hex(16)}"


async def _origin(request: Request) -> Origin:
    state = request.state
    return Origin(state.arrival_time, state.cache_salt, state.owner, int(time.time()))


async def _files(request: Request) -> FileStore:
    files: FileStore = request.app.state.files
    return files


async def _fine_tuning(request: Request) -> FineTuning:
    jobs: FineTuning = request.app.state.fine_tuning
    return jobs


async def _feeds(request: Request) -> EventFeeds:
    feeds: EventFeeds = request.app.state.feeds
    return feeds


async def _training(request: Request) -> Training:
    training: Training = request.app.state.training
    return training


LifecycleDep = Annotated[Lifecycle, Depends(_lifecycle)]
OriginDep = Annotated[Origin, Depends(_origin)]
FilesDep = Annotated[FileStore, Depends(_files)]
FineTuningDep = Annotated[FineTuning, Depends(_fine_tuning)]
FeedsDep = Annotated[EventFeeds, Depends(_feeds)]
TrainingDep = Annotated[Training, Depends(_training)]
