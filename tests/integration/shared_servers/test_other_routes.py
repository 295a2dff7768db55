"""/v1/models, /tokenize, /detokenize, /health/*, /metrics on a real server."""

from pathlib import Path

import httpx
import openai
import pytest

from ..conftest import MAX_MODEL_LEN
from ..eager_answers import EagerAnswers
from ..questions import CAPITAL, MODEL, greedy
from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = "Long waves, 長い波, длинные волны 🌊 (naïve café)\n\tend"


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data

    assert card.id == MODEL
    assert card.object == "model"
    assert client.models.retrieve(MODEL).id == MODEL
    assert card.to_dict()["max_model_len"] == MAX_MODEL_LEN


def test_the_api_process_has_no_torch(server: ServerProcess) -> None:
    """It knows text, and what has no use for torch is there seconds earlier without."""
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_tokenize_and_detokenize_are_inverse(server: ServerProcess, eager: EagerAnswers) -> None:
    tokens = server.post("/tokenize", {"model": MODEL, "prompt": TEXT}).json()
    text = server.post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json()

    assert tokens["tokens"] == eager.tokenizer.encode(TEXT)
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    assert text == {"prompt": TEXT}


def test_tokenize_of_messages_counts_what_the_chat_uses(server: ServerProcess, eager: EagerAnswers) -> None:
    messages = [{"role": "user", "content": CAPITAL}]

    tokens = server.post("/tokenize", {"model": MODEL, "messages": messages}).json()

    assert tokens["count"] == eager.chat(CAPITAL, 24).num_prompt_tokens


@pytest.mark.parametrize("probe", ["live", "ready", "startup"])
def test_probes_are_ok_while_serving(server: ServerProcess, probe: str) -> None:
    reply = server.get(f"/health/{probe}")

    assert reply.status_code == 200
    head = httpx.head(f"{server.url}/health/{probe}")
    assert (head.status_code, head.content) == (200, b"")


def test_metrics_count_an_answer(server: ServerProcess) -> None:
    before = server.metrics()

    usage = greedy(server, CAPITAL, 8).usage

    assert usage is not None
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"longwave:{name}"] - before.get(f"longwave:{name}", 0.0)

    assert grown("generation_tokens_total") == usage.completion_tokens
    assert grown("request_success_total") == 1
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("attention_kernel_calls_total") > 0


def test_metrics_name_the_kernel_that_served(server: ServerProcess) -> None:
    greedy(server, CAPITAL, 2)
    server.wait_until_idle()

    assert 'kernel="cpu_reference"' in server.get("/metrics").text
