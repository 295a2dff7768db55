"""A caller of /v1/training, what it sends, and the process that it keeps busy."""

from typing import Any

import httpx

from .questions import MODEL
from .server_process import ServerProcess


class Trainee:
    """A caller of /v1/training, as a researcher's script is one."""

    def __init__(self, server: ServerProcess, key: str, base: str = MODEL) -> None:
        self.base = base
        self.http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=120)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(f"/v1/training/{path}", json=body)

    def submit(self, call: str, model: str, **body: Any) -> str:
        reply = self.post(call, {"model_id": model, **body})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["request_id"])

    def ended(self, request_id: str) -> httpx.Response:
        """The reply that is not try_again."""
        while True:
            reply = self.post("retrieve_future", {"request_id": request_id})
            if reply.status_code != 200 or reply.json().get("type") != "try_again":
                return reply

    def result(self, request_id: str) -> Any:
        reply = self.ended(request_id)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def do(self, call: str, model: str, **body: Any) -> Any:
        return self.result(self.submit(call, model, **body))

    def create(self) -> str:
        body = {"base_model": self.base, "lora_config": {"rank": 8}, "seed": 1}
        model = self.post("create_model", body).json()["model_id"]
        self.result(f"{model}:0")
        return str(model)

    def tokens(self, text: str) -> list[int]:
        reply = self.http.post("/tokenize", json={"model": self.base, "prompt": text, "add_special_tokens": False})
        return list(reply.json()["tokens"])


def datum(tokens: list[int], **inputs: Any) -> dict[str, Any]:
    return {"model_input": tokens[:-1], "loss_fn_inputs": {"target_tokens": tokens[1:], **inputs}}


def training_process(server: ServerProcess) -> int | None:
    return next(iter(server.children("server.training.worker")), None)
