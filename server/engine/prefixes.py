"""What a full block holds, as an identity: which tokens after which others, for whom. Knows no block and no memory, so
that the same prefix is recognised in any of them."""

import hashlib
import itertools
from dataclasses import dataclass

from server.engine.request import Request

_serials = itertools.count(1)


def new_serial() -> int:
    return next(_serials)


def hash_block(parent: bytes, token_bytes: bytes) -> bytes:
    """SHA-256: salts of other tenants and long prompts of theirs are not to be guessed or collided with."""
    return hashlib.sha256(parent + token_bytes).digest()


def root_hash(cache_salt: bytes, adapter_digest: str = "") -> bytes:
    """The salt is hashed by itself: whatever its length, no salt and digest together look like another pair."""
    salt = hashlib.sha256(cache_salt).digest()
    return hashlib.sha256(b"longwave prefix cache\0" + salt + adapter_digest.encode()).digest()


@dataclass(frozen=True, slots=True)
class Prefix:
    """A block's tokens and all before them."""

    hash: bytes  # chained
    token_bytes: bytes  # token ids as 32-bit integers
    parent: int  # serial number of the prefix that is one block shorter; 0 at the root
    cache_salt: bytes
    adapter_digest: str  # empty: the base model's keys and values
    serial: int  # of this content, never reused: a child of a forgotten parent can not match again by accident

    def continues(self, parent: int, token_bytes: bytes, request: Request) -> bool:
        """Whether the request has just this content after the prefix `parent`, and may have it."""
        same_owner = self.cache_salt == request.cache_salt and self.adapter_digest == request.adapter_digest
        return self.parent == parent and self.token_bytes == token_bytes and same_owner
