"""What a signal is called. Knows no process."""

import signal


def signal_name(number: int) -> str:
    """Most real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
