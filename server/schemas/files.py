"""/v1/files on the wire: OpenAI's file object, its pages, and the multipart form of an upload."""

from typing import Any, Literal

from pydantic import Field

from server.schemas.wire import WireModel

MAX_PAGE = 10_000


class FileObject(WireModel):
    id: str = Field(max_length=64)
    object: Literal["file"] = "file"
    bytes: int = Field(ge=0)
    created_at: int = Field(ge=0)
    expires_at: int | None = Field(None, ge=0)
    filename: str = Field(max_length=255)
    purpose: Literal["fine-tune", "fine-tune-results"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(WireModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None = Field(max_length=64)
    last_id: str | None = Field(max_length=64)
    has_more: bool


class FileDeleted(WireModel):
    id: str = Field(max_length=64)
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


UPLOAD_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["fine-tune"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}
