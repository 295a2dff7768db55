"""/v1/files: upload, list, retrieve, content, delete."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.api.deps import FilesDep, LifecycleDep, OriginDep
from server.api.disconnect import ClientDisconnected
from server.api.piecewise import written
from server.errors import ServerDraining
from server.files.catalog import StoredFile
from server.files.receiving import receive_file
from server.lifecycle import Phase
from server.schemas.failure import BODY_FAILURES, READ_FAILURES, failures
from server.schemas.files import MAX_PAGE, UPLOAD_FORM, FileDeleted, FileList, FileObject

PATH = "/v1/files"
FILE_FAILURES = READ_FAILURES | failures(404, 507)
BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}
CHUNK_BYTES = 256 * 2**10

router = APIRouter(tags=["files"])


@router.post(PATH, responses=BODY_FAILURES | failures(429, 507), openapi_extra=UPLOAD_FORM)
async def upload_file(request: Request, lifecycle: LifecycleDep, files: FilesDep, origin: OriginDep) -> FileObject:
    """Takes a training file (JSONL) while it comes, and checks every line."""
    if lifecycle.phase is Phase.DRAINING:
        raise ServerDraining("The server is shutting down. Try again later.")
    try:
        content_type = request.headers["content-type"]
        return _object(await receive_file(files, content_type, request.stream(), origin.owner))
    except ClientDisconnect:
        raise ClientDisconnected from None


@router.get(PATH, response_model=FileList, responses=FILE_FAILURES | failures(400))
async def list_files(
    files: FilesDep,
    origin: OriginDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=256)] = None,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    def page() -> bytes:
        found = files.page(origin.owner, purpose=purpose, after=after, limit=limit + 1, order=order)
        page = [_object(stored) for stored in found[:limit]]
        listed = FileList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(found) > limit,
        )
        return listed.model_dump_json().encode()

    return written(await asyncio.to_thread(page))


@router.get(PATH + "/{file_id}", responses=FILE_FAILURES)
async def retrieve_file(file_id: str, files: FilesDep, origin: OriginDep) -> FileObject:
    return _object(await asyncio.to_thread(files.get, file_id, origin.owner))


@router.get(PATH + "/{file_id}/content", response_class=Response, responses=FILE_FAILURES | BYTES)
async def file_content(file_id: str, files: FilesDep, origin: OriginDep) -> Response:
    return FileContent(*await asyncio.to_thread(files.read, file_id, origin.owner))


@router.delete(PATH + "/{file_id}", responses=FILE_FAILURES)
async def delete_file(file_id: str, files: FilesDep, origin: OriginDep) -> FileDeleted:
    await asyncio.to_thread(files.delete, file_id, origin.owner)
    return FileDeleted(id=file_id)


class FileContent(StreamingResponse):
    """The bytes as they came, from a file that is open already: deleting it does not cut the reply."""

    def __init__(self, stored: StoredFile, opened: BinaryIO) -> None:
        ending = "jsonl" if stored.form is not None else "csv"
        headers = {
            "content-length": str(stored.bytes),
            "content-disposition": f'attachment; filename="{stored.id}.{ending}"',
            "x-content-type-options": "nosniff",
        }
        super().__init__(_pieces(opened), headers=headers, media_type="application/octet-stream")
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._opened:
            await super().__call__(scope, receive, send)


def _pieces(opened: BinaryIO) -> Iterator[bytes]:
    while piece := opened.read(CHUNK_BYTES):
        yield piece


def _object(stored: StoredFile) -> FileObject:
    return FileObject(
        id=stored.id,
        bytes=stored.bytes,
        created_at=stored.created_at,
        expires_at=stored.expires_at,
        filename=stored.filename,
        purpose="fine-tune" if stored.form is not None else "fine-tune-results",
    )
