"""The only reader of the environment in this room, but for pydantic-settings, which fills Settings from LONGWAVE_*."""

import os
from pathlib import Path

PREFIX = "LONGWAVE_"


def data_home() -> Path:
    """The user's data folder (XDG base directory specification)."""
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".local" / "share"


def own_variables() -> list[str]:
    """The names of those that are set for this program."""
    return sorted(name for name in os.environ if name.upper().startswith(PREFIX))


def port_is_an_address() -> bool:
    """Kubernetes sets LONGWAVE_PORT to tcp://... for a service called longwave."""
    return "://" in os.environ.get("LONGWAVE_PORT", "")
