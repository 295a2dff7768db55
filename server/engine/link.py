"""The two AF_UNIX sockets between API and engine process, and what their frames hold. No TCP, no pickle.

To the engine: one message a frame. From the engine: all messages of one turn in a frame. Prompts are 32-bit integers
as memory has them: the engine, which takes them in between two steps, has nothing to convert."""

import logging
from collections.abc import Sequence

import msgspec
import zmq

from server.engine.messages import FromEngine, RequestFailed, ToEngine
from server.engine.token_ids import TokenIds

logger = logging.getLogger(__name__)

TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"  # file names in the private directory
MAX_MESSAGES = 1024  # taken in one receive(), so that a flood of requests does not hold up a step


def _to_wire(value: object) -> object:
    if isinstance(value, TokenIds):
        return memoryview(value)
    raise NotImplementedError(f"no message has a {type(value).__name__}")


def _from_wire(wanted: type, value: object) -> object:
    if wanted is TokenIds and isinstance(value, bytes):
        return TokenIds(value)
    raise TypeError(f"{type(value).__name__} instead of {wanted.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=_from_wire)
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode(message: ToEngine | Sequence[FromEngine]) -> bytes:
    return _encoder.encode(message)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    return _from_engine.decode(frame)


def decode_to_engine(frame: bytes) -> ToEngine | RequestFailed | None:
    """A frame that is not what it should be is answered, if it says for whom, instead of ending the engine."""
    try:
        return _to_engine.decode(frame)
    except msgspec.DecodeError as error:
        logger.error("unreadable message from the API process: %s", error)
    try:
        fields = msgspec.msgpack.decode(frame)
    except msgspec.DecodeError:
        return None
    request_id = fields.get("request_id") if isinstance(fields, dict) else None
    if not isinstance(request_id, str):
        return None
    return RequestFailed(request_id, "server_error", "The request did not reach the engine in a readable form.")


class EngineLink:
    """The engine's end: synchronous. The API process has bound both sockets before this process began."""

    def __init__(self, directory: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)  # bounded by the API process's admission
        self._inbox.connect(f"ipc://{directory}/{TO_ENGINE}")
        self._outbox = self._context.socket(zmq.PUSH)  # the default limit: a stopped API process stops the engine
        self._outbox.connect(f"ipc://{directory}/{FROM_ENGINE}")

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]:
        messages: list[ToEngine | RequestFailed] = []
        if not self._inbox.poll(int(timeout * 1000)):
            return messages
        try:
            while len(messages) < MAX_MESSAGES:
                message = decode_to_engine(self._inbox.recv(zmq.NOBLOCK))
                if message is not None:
                    messages.append(message)
        except zmq.Again:
            pass
        return messages

    def send(self, messages: list[FromEngine]) -> None:
        self._outbox.send(encode(messages))

    def close(self, linger: float = 2.0) -> None:
        """Returns when all that was sent has left, or after `linger` seconds."""
        self._inbox.close(0)
        self._outbox.close(int(linger * 1000))
        self._context.term()
