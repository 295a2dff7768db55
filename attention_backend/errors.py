"""What the public functions of this room raise besides ValueError and TypeError."""


class UnsupportedError(NotImplementedError):
    """No kernel serves this problem. The message says what is served."""
