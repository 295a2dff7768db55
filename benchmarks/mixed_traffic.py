"""Requests of every kind that a server answers, and some that it must refuse: each says whether its reply was right."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.trial_client import ask, chat
from benchmarks.trial_server import TrialServer

URL = "http://192.0.2.1/a.png"  # of RFC 5737: nobody has it
LINE = {"messages": [{"role": "user", "content": URL}, {"role": "assistant", "content": "Hello."}]}
TIMEOUT = 120.0

#: (server, a number that no other request has) -> whether it was answered, or refused, as it must be.
Kind = Callable[[TrialServer, int], Awaitable[bool]]


async def stream(server: TrialServer, number: int) -> bool:
    answer = await ask(server.url, chat(server, f"{number} Count from one to ten. {URL}", 24, stream=True))
    return answer.is_whole


async def whole(server: TrialServer, number: int) -> bool:
    return (await ask(server.url, chat(server, f"{number} Say hello.", 8, n=2, temperature=1, seed=number))).is_whole


async def long_prompt(server: TrialServer, number: int) -> bool:
    return (await ask(server.url, chat(server, f"{number} " + "wave " * 300, 4, logprobs=True))).is_whole


async def completion(server: TrialServer, number: int) -> bool:
    body = {"model": server.target.model, "prompt": f"{number}, {number + 1},", "max_tokens": 8, "stop": ["."]}
    return (await ask(server.url, json.dumps(body).encode(), "/v1/completions")).is_whole


async def tokens(server: TrialServer, number: int) -> bool:
    body = {"model": server.target.model, "prompt": f"{number} {URL}"}
    return (await ask(server.url, json.dumps(body).encode(), "/tokenize")).status == 200


async def reads(server: TrialServer, _number: int) -> bool:
    paths = ("/v1/models", "/metrics", "/health/ready", "/v1/files", "/v1/fine_tuning/jobs", "/", "/openapi.json")
    return all([(await ask(server.url, None, path)).status == 200 for path in paths])


async def nonsense(server: TrialServer, number: int) -> bool:
    body = chat(server, "x", 8, temperature=-number - 1)
    return (await ask(server.url, body)).status == 400 and (await ask(server.url, b'{"model": ')).status == 400


async def picture(server: TrialServer, _number: int) -> bool:
    """What other servers would fetch."""
    part = {"type": "image_url", "image_url": {"url": URL}}
    body = {"model": server.target.model, "messages": [{"role": "user", "content": [part]}]}
    return (await ask(server.url, json.dumps(body).encode())).status == 400


async def unknown_model(server: TrialServer, _number: int) -> bool:
    """Not one that anybody looks for in the hub."""
    body = json.loads(chat(server, "x", 1)) | {"model": "HuggingFaceTB/SmolLM2-360M-Instruct"}
    return (await ask(server.url, json.dumps(body).encode())).status == 404


async def leaves(server: TrialServer, number: int) -> bool:
    """A client that goes at its first text."""
    body = chat(server, f"{number} Count.", 300, stream=True)
    return (await ask(server.url, body, leave=lambda _came, has_text: has_text)).first is not None


async def file(server: TrialServer, number: int) -> bool:
    """Uploaded, read, deleted."""
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
        stored = await uploaded(client, number)
        content = await client.get(f"/v1/files/{stored}/content")
        deleted = await client.delete(f"/v1/files/{stored}")
    return content.status_code == deleted.status_code == 200 and deleted.json()["deleted"]


async def job(server: TrialServer, number: int) -> bool:
    """One step of fine-tuning, an answer of what came of it, and nothing left of either."""
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 1}}}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
        asked = {"model": server.target.model, "training_file": await uploaded(client, number), "method": method}
        made = (await client.post("/v1/fine_tuning/jobs", json=asked)).json()
        while made.get("status") in ("validating_files", "queued", "running"):
            await asyncio.sleep(0.5)
            made = (await client.get(f"/v1/fine_tuning/jobs/{made['id']}")).json()
        if made.get("status") != "succeeded":
            return False
        body = json.loads(chat(server, "Hello.", 2)) | {"model": made["fine_tuned_model"]}
        answer = await ask(server.url, json.dumps(body).encode())
        gone = await client.delete(f"/v1/models/{made['fine_tuned_model']}")
        file_gone = await client.delete(f"/v1/files/{asked['training_file']}")
    return answer.is_whole and gone.status_code == file_gone.status_code == 200


async def uploaded(client: httpx.AsyncClient, number: int) -> str:
    content = (json.dumps(LINE) + "\n").encode() * 2
    files: dict[str, Any] = {"file": (f"{number}.jsonl", content)}
    reply = await client.post("/v1/files", files=files, data={"purpose": "fine-tune"})
    return str(reply.json()["id"])


#: What comes again and again, each as often as it is written here.
MIXED: tuple[Kind, ...] = (
    stream, whole, stream, completion, stream, leaves, stream, tokens, long_prompt, stream, nonsense, stream, reads,
    whole, leaves, stream, completion, file, picture, unknown_model,
)  # fmt: skip
EVERY_KIND: tuple[Kind, ...] = (*dict.fromkeys(MIXED), job)
