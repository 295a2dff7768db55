"""What the tests ask, and how: greedy chat through the official client, alone or many at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openai.types.chat import ChatCompletion

from .server_process import ServerProcess

MODEL = "SmolLM2-135M-Instruct"
CAPITAL = "What is the capital of France?"
QUESTIONS = (
    CAPITAL,
    "Write one sentence about the sea.",
    "Name three colours.",
    "Count from one to ten.",
)
#: About 230 tokens: several KV blocks, so that a second time finds cached ones.
LONG_QUESTION = "Summarise in one sentence. " + " ".join(
    f"On day {day} the crew of the ship measured the long waves and wrote the height down." for day in range(1, 12)
)


def greedy(server: ServerProcess, question: str, max_tokens: int, model: str = MODEL) -> ChatCompletion:
    with server.client() as client:
        return client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0
        )


def greedy_at_once(server: ServerProcess, questions: Sequence[str], max_tokens: int) -> list[ChatCompletion]:
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(lambda question: greedy(server, question, max_tokens), questions))
