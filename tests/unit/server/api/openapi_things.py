"""What there is on the fuzzed server: what stays, and new things for calls that use theirs up. Made over HTTP, as any
caller makes them."""

import json
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx

MODEL = "tiny"  # scripted_engine's, which takes seconds to import
LIMIT = 60.0  # seconds for anything to happen: generous, since the machine may be busy
JOBS, TRAINING = "/v1/fine_tuning/jobs", "/v1/training"
ENDED = ("succeeded", "failed")
PAIR = '{"prompt": "a", "completion": "b"}\n'
WRONG_PAIR = '{"prompt": "bad", "completion": "b"}\n'  # the scripted trainer fails at it
PREFERENCE = json.dumps(
    {
        "input": {"messages": [{"role": "user", "content": "a"}]},
        "preferred_output": [{"role": "assistant", "content": "b"}],
        "non_preferred_output": [{"role": "assistant", "content": "c"}],
    }
)
DATUM = {"model_input": [1, 2, 3], "loss_fn_inputs": {"target_tokens": [2, 3, 4]}}


class Things:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._numbers = count()

    def get(self, path: str) -> Any:
        return _read(self._client.get(path))

    def data(self, path: str) -> list[dict[str, Any]]:
        """Of a list, the newest first."""
        data: list[dict[str, Any]] = self.get(path)["data"]
        return data

    def post(self, path: str, /, **body: Any) -> Any:
        return _read(self._client.post(path, json=body))

    def new_name(self) -> str:
        return f"new-{next(self._numbers)}"

    def file(self, content: str = PAIR * 2) -> str:
        form, files = {"purpose": "fine-tune"}, {"file": ("a.jsonl", content.encode())}
        return str(_read(self._client.post("/v1/files", data=form, files=files))["id"])

    def job(self, file: str) -> str:
        hyperparameters = {"n_epochs": 2, "batch_size": 2}
        return str(self.post(JOBS, model=MODEL, training_file=file, hyperparameters=hyperparameters)["id"])

    def paused_job(self, file: str) -> str:
        job = self.job(file)
        self.post(f"{JOBS}/{job}/pause")
        return job

    def end_jobs(self) -> None:
        """Where somebody works on them."""
        _until(lambda: all(job["status"] in ENDED for job in self.data(JOBS)))

    def adapter(self) -> str:
        name = self.new_name()
        self._client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "a"}).raise_for_status()
        return name

    def live_model(self) -> str:
        future = self.post(f"{TRAINING}/create_model", base_model=MODEL, lora_config={"rank": 8})
        self.result(future)
        return str(future["model_id"])

    def saved_weights(self, model: str) -> str:
        return str(self.result(self.call("save_weights", model, path=self.new_name()))["path"])

    def call(self, name: str, model: str, /, **body: Any) -> Any:
        """Its future."""
        return self.post(f"{TRAINING}/{name}", model_id=model, **body)

    def result(self, future: Any) -> Any:
        results: list[Any] = []

        def ended() -> bool:
            results.append(self.post(f"{TRAINING}/retrieve_future", request_id=future["request_id"]))
            return results[-1].get("type") != "try_again"

        _until(ended)
        return results[-1]

    def end(self, future: Any) -> None:
        """However it does: where a call is wrong, its result is a refusal."""
        ask = {"request_id": future["request_id"]}

        def ended() -> bool:
            reply = self._client.post(f"{TRAINING}/retrieve_future", json=ask)
            return reply.status_code != 200 or reply.json().get("type") != "try_again"

        _until(ended)

    def ended_calls(self) -> list[str]:
        """The request ids of one of every kind."""
        model = self.live_model()
        saved = self.saved_weights(model)
        calls = [
            self.call("forward_backward", model, data=[DATUM]),
            self.call("forward", model, data=[DATUM]),
            self.call("optim_step", model),
            self.call("save_weights_for_sampler", model, path=self.new_name()),
            self.call("load_weights", model, path=saved),
            self.call("sample", model, prompt=[1, 2], num_samples=2, sampling_params={"max_tokens": 2}),
            self.call("unload_model", model),
        ]
        for call in calls:
            self.result(call)
        return [f"{model}:0", f"{model}:1", *(str(call["request_id"]) for call in calls)]


def _read(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, f"{reply.request.method} {reply.request.url}: {reply.text}"
    return reply.json()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
