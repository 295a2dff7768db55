"""The streams of all open requests, by id: what the engine sends finds its reader. Knows no process."""

from collections.abc import AsyncGenerator, Callable

from server.engine.messages import TokenDelta
from server.engine.stream import TokenStream
from server.errors import LongwaveError


class OpenStreams:
    def __init__(self) -> None:
        self._by_id: dict[str, TokenStream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, request_id: str) -> TokenStream:
        return self._by_id[request_id]

    async def read(
        self, request_id: str, begin: Callable[[], None], abort: Callable[[str], None]
    ) -> AsyncGenerator[TokenDelta, None]:
        """Opens the stream, calls begin() and gives what comes, to the end; abort() if that does not come first. Raises
        ValueError for an id that is open already, what begin() raises, and what the stream failed with."""
        if request_id in self._by_id:
            raise ValueError(f"request {request_id} is already open")
        stream = self._by_id[request_id] = TokenStream(request_id)
        ended = False
        try:
            begin()
            while not ended:
                delta = await stream.get()
                ended = delta.finish_reason is not None
                yield delta
        finally:
            del self._by_id[request_id]
            if not ended:
                abort(request_id)  # of a request that has ended already, it says nothing

    def put(self, delta: TokenDelta) -> None:
        stream = self._by_id.get(delta.request_id)
        if stream is not None:
            stream.put(delta)

    def fail(self, request_id: str, error: LongwaveError) -> None:
        stream = self._by_id.get(request_id)
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: Callable[[], LongwaveError]) -> None:
        for stream in self._by_id.values():
            stream.fail(error())
