"""A delta of many tokens in pieces that take few milliseconds each to spell out and to write: the event loop has its
turns between them. A step scores thousands of a prompt's tokens, and a stream merges what a slow reader leaves. Knows
no wire format."""

from collections.abc import Iterator

from msgspec.structs import replace

from server.engine.messages import TokenDelta

#: Log-probabilities of a piece, those of alternatives included: 16 tokens with 20 each, 10 ms.
MAX_LOGPROBS = 336
FEW_LOGPROBS, FEW_TOKENS = 84, 16  # of a piece that takes no longer than most steps' do
MAX_TOKENS = 64  # of a piece without: a byte each of SentencePiece, looked at for 32 stop strings, 30 ms


def is_long(piece: TokenDelta) -> bool:
    """Whether spelling it out takes long enough to count as a piece of long work."""
    num_logprobs = sum(len(scores) * (1 + scores.num_top) for scores in piece.prompt_logprobs or ())
    if piece.logprobs:
        num_logprobs += len(piece.token_ids) * (1 + piece.logprobs[0].num_top)
    return len(piece.token_ids) > FEW_TOKENS or num_logprobs > FEW_LOGPROBS


def in_pieces(delta: TokenDelta) -> Iterator[TokenDelta]:
    """What they say together, in their order, is what `delta` says; the last one ends it."""
    for scores in delta.prompt_logprobs or ():
        at_once = max(1, MAX_LOGPROBS // (1 + scores.num_top))
        for start in range(0, len(scores), at_once):
            piece = [scores.part(start, start + at_once)]
            yield TokenDelta(delta.request_id, [], num_cached_tokens=delta.num_cached_tokens, prompt_logprobs=piece)
    if delta.prompt_logprobs and not delta.token_ids and delta.finish_reason is None:
        return
    most = MAX_TOKENS
    if delta.logprobs:
        most = max(1, MAX_LOGPROBS // (1 + delta.logprobs[0].num_top))
    count = len(delta.token_ids)
    if count <= most:
        yield delta if not delta.prompt_logprobs else replace(delta, prompt_logprobs=None)
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
