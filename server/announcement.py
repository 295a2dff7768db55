"""What a server prints once it serves: where, on which kernels, a command to try it, and when it asks nobody for a key.
Knows no flags."""

import ipaddress
import json

import typer
from pydantic import SecretStr

from server.client_settings import ClientSettings
from server.lifecycle import Lifecycle


def announce(lifecycle: Lifecycle, port: int) -> None:
    settings, generator = lifecycle.settings, lifecycle.generator
    assert generator is not None  # it is ready
    ready = generator.ready
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    url = f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"
    name = settings.model_names[0]
    kernels = ", ".join(f"{layer}: {kernel}" for layer, kernel in sorted(ready.kernels.items()))
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    )
    key = f' -H "Authorization: Bearer {_shown(settings.api_key)}"' if settings.api_key else ""
    quoted = body.replace("'", "'\\''")
    typer.echo(
        f"Longwave serves {name} on {url} ({ready.device}, {ready.dtype}, {ready.max_model_len} tokens; {kernels})"
    )
    typer.echo("Try it:")
    typer.echo(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'")
    if not settings.api_key and not _is_loopback(settings.host):
        typer.echo(f"No API key is set: whoever reaches {settings.host} port {port} is answered.", err=True)


def _shown(keys: tuple[SecretStr, ...]) -> str:
    """What a shell makes the first of them, if they come from the variable; for people, if not."""
    if keys != ClientSettings().api_key:
        return "<key>"
    return "$LONGWAVE_API_KEY" if len(keys) == 1 else "${LONGWAVE_API_KEY%%,*}"


def _is_loopback(host: str) -> bool:
    """False for a name that is not localhost: what it stands for is not known here."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
