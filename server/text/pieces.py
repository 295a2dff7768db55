"""A delta of many tokens in pieces that take few milliseconds each to spell out and to write: the event loop has its
turns between them. A stream merges what a slow reader leaves, up to thousands of tokens. Knows no wire format."""

from collections.abc import Iterator

from server.engine.messages import TokenDelta

#: Log-probabilities of a piece, those of alternatives included: 16 tokens with 20 each, 10 ms.
MAX_LOGPROBS = 336
MAX_TOKENS = 2048  # of a piece without


def in_pieces(delta: TokenDelta) -> Iterator[TokenDelta]:
    """What they say together, in their order, is what `delta` says; the last one ends it."""
    most = MAX_TOKENS
    if delta.logprobs:
        most = max(1, MAX_LOGPROBS // (1 + len(delta.logprobs[0].top)))
    count = len(delta.token_ids)
    if count <= most:
        yield delta
        return
    for start in range(0, count, most):
        end = start + most
        yield TokenDelta(
            delta.request_id,
            delta.token_ids[start:end],
            None if delta.logprobs is None else delta.logprobs[start:end],
            delta.finish_reason if end >= count else None,
            delta.stop_token_id if end >= count else None,
            delta.num_cached_tokens,
        )
