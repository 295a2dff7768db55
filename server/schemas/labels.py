"""What a caller may write on a request, for its own books or for services that are not offered here: checked, bounded,
and without effect on an answer."""

from typing import Annotated

from pydantic import Field

from server.schemas.wire import UNUSED, RequestModel
from server.setting_types import few_keys

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # OpenAI's: pairs, characters

MetadataKey = Annotated[str, Field(min_length=1, max_length=MAX_KEY, pattern=r"^[^\x00]+$")]
MetadataValue = Annotated[str, Field(max_length=MAX_VALUE, pattern=r"^[^\x00]*$")]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA), few_keys(MAX_METADATA)]
Label = Annotated[str, Field(max_length=MAX_VALUE)]
#: OpenAI's `mode` and `ttl`, and what may come to them: what is cached, and for how long, is the server's choice.
CacheOptions = Annotated[
    dict[MetadataKey, Label | bool | Annotated[int, Field(ge=0, le=2**31)] | None],
    Field(max_length=MAX_METADATA),
    few_keys(MAX_METADATA),
]


class LabelFields(RequestModel):
    """Those of completions of both kinds."""

    user: Annotated[Label | None, Field(description=UNUSED)] = None
    metadata: Annotated[Metadata | None, Field(description=UNUSED)] = None
    store: Annotated[bool | None, Field(description=UNUSED)] = None
    service_tier: Annotated[Label | None, Field(description=UNUSED)] = None
    safety_identifier: Annotated[Label | None, Field(description=UNUSED)] = None
    prompt_cache_key: Annotated[Label | None, Field(description=UNUSED)] = None
    prompt_cache_retention: Annotated[Label | None, Field(description=UNUSED)] = None
    prompt_cache_options: Annotated[CacheOptions | None, Field(description=UNUSED)] = None
    parallel_tool_calls: Annotated[bool | None, Field(description=UNUSED)] = None
