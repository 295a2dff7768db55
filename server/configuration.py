"""Flags and LONGWAVE_* variables -> Settings, or every reason why not. Knows no single setting's meaning."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from server.environment import PREFIX, own_variables, port_is_an_address
from server.settings import Settings

COMPOSE_VARIABLES = {"LONGWAVE_CPUS", "LONGWAVE_MEMORY", "LONGWAVE_VERSION"}  # docker/compose.yaml's own, from its .env
#: The first is attention_backend.jit's, which works without a server.
OTHER_VARIABLES = {"LONGWAVE_KERNEL_IMAGE_DIR", *COMPOSE_VARIABLES}
_SETTING = re.compile(rf"\b({'|'.join(name for name in Settings.model_fields if '_' in name)})\b")


class ConfigurationError(Exception):
    """Every problem of a configuration, one line each."""

    exit_code = 3  # process supervisors: do not restart, it will not get better

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(overrides: Mapping[str, Any]) -> Settings:
    """Flags first, then LONGWAVE_* variables, then defaults. Raises ConfigurationError with all problems of
    one kind at once (docs/configuration.md)."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise ConfigurationError([_line(detail) for detail in error.errors(include_input=False)]) from None


def unknown_variables() -> list[str]:
    """LONGWAVE_* that nobody reads: misspelt, most likely."""
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields} | OTHER_VARIABLES
    return [name for name in own_variables() if name.upper() not in known]


def _line(detail: Any) -> str:
    said = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:  # what does not go together
        return _SETTING.sub(lambda found: found[0].replace("_", "-"), said)
    name, hint = str(detail["loc"][0]), ""
    if name == "port" and port_is_an_address():
        hint = (
            ". Kubernetes sets LONGWAVE_PORT for a service called longwave: rename it, or set enableServiceLinks: false"
        )
    return f"{name.replace('_', '-')}: {said}{hint}"
