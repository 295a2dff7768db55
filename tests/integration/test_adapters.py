"""LoRA adapters through the real server: greedy answers of base and adapters at once are PEFT's own, whatever comes
and goes meanwhile."""

import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from .conftest import FLAGS
from .eager_answers import Answer, EagerAnswers
from .questions import CAPITAL, LONG_QUESTION, MODEL, QUESTIONS, greedy
from .server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 8
#: Three adapters over two slots: another rank, other layers, another scaling. The seeds give no near-ties.
ADAPTERS = {
    "one": (0, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")),
    "team/two": (1, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])),
    "three": (0, LoraConfig(r=8, lora_alpha=8, use_rslora=True, target_modules=["o_proj", "up_proj"])),
}


class PeftAnswers(EagerAnswers):
    """Of the base model and of random adapters on it, by PEFT."""

    def __init__(self, folder: Path, adapters: Path) -> None:
        super().__init__(folder)
        for name, (seed, config) in ADAPTERS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT's own, of transformers
                place = name.replace("/", "-")
                if not isinstance(self._model, PeftModel):
                    self._model = get_peft_model(self._model, config, adapter_name=place)
                else:
                    self._model.add_adapter(place, config)
                torch.manual_seed(seed)
                for parameter_name, parameter in self._model.named_parameters():
                    if f".{place}." in parameter_name:
                        torch.nn.init.normal_(parameter, 0, 0.06)
                self._model.save_pretrained(adapters, selected_adapters=[place])
        self._model.eval()
        self._by_model: dict[str, dict[tuple[str, int], Answer]] = {}

    def of(self, model: str, question: str, max_tokens: int = MAX_TOKENS) -> Answer:
        assert isinstance(self._model, PeftModel)
        self._known = self._by_model.setdefault(model, {})
        if model != MODEL:
            self._model.set_adapter(model.replace("/", "-"))
        with self._model.disable_adapter() if model == MODEL else nullcontext():
            return self.chat(question, max_tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where adapters may be loaded from: one folder for each."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(bundled_model: Path, folder: Path) -> PeftAnswers:
    return PeftAnswers(bundled_model, folder)


@pytest.fixture(scope="module")
def lora_server(expected: PeftAnswers, folder: Path) -> Iterator[ServerProcess]:
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", f"one={folder / 'one'}")
    runtime = ("--allow-runtime-lora-updating", "--lora-dir", str(folder), "--data-dir", str(folder / "data"))
    with ServerProcess(*FLAGS, *lora, *runtime) as process:
        for name in ("team/two", "three"):
            reply = process.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name.replace("/", "-")})
            assert reply.status_code == 200, reply.text
        yield process


def text(server: ServerProcess, model: str, question: str, max_tokens: int = MAX_TOKENS) -> str | None:
    return greedy(server, question, max_tokens, model).choices[0].message.content


def test_base_and_adapters_at_once_answer_what_peft_answers(lora_server: ServerProcess, expected: PeftAnswers) -> None:
    models = [MODEL, *ADAPTERS]
    asked = [(model, question) for question in QUESTIONS for model in models]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda pair: text(lora_server, *pair), asked))
    assert answers == [expected.of(*pair).text for pair in asked]
    assert len({expected.of(model, QUESTIONS[3]).text for model in models}) == 4, "each has its own answer"
    assert lora_server.metrics()["longwave:lora_placements_total"] >= 3
    lora_server.wait_until_idle()


def test_a_prefix_is_shared_within_an_adapter_and_with_nobody_else(
    lora_server: ServerProcess, expected: PeftAnswers
) -> None:
    for model in (MODEL, "one"):
        cached = []
        for _ in range(2):
            completion = greedy(lora_server, LONG_QUESTION, MAX_TOKENS, model)
            assert completion.choices[0].message.content == expected.of(model, LONG_QUESTION).text
            assert completion.usage is not None
            assert completion.usage.prompt_tokens_details is not None
            cached.append(completion.usage.prompt_tokens_details.cached_tokens or 0)
        assert cached[0] < 64 <= cached[1]  # a block


def test_models_are_listed_with_their_parent(lora_server: ServerProcess) -> None:
    with lora_server.client() as client:
        cards = {model.id: model.to_dict() for model in client.models.list().data}
        assert list(cards) == [MODEL, *ADAPTERS]
        assert {card["parent"] for name, card in cards.items() if name != MODEL} == {MODEL}
        assert client.models.retrieve("team/two").id == "team/two"


def test_bad_folders_are_refused_with_the_reason_and_nothing_changes(
    lora_server: ServerProcess, expected: PeftAnswers, folder: Path
) -> None:
    shutil.copytree(folder / "one", folder / "pickled")
    (folder / "pickled" / "adapter_model.safetensors").rename(folder / "pickled" / "adapter_model.bin")
    (folder / "link").symlink_to("/etc")
    for path, reason in {
        "nowhere": "there is no folder nowhere",
        "pickled": "only adapter_model.bin",
        "link": "is not in the folder that adapters may be loaded from",
        "/etc": "is not in the folder that adapters may be loaded from",
        "../..": "is not in the folder that adapters may be loaded from",
    }.items():
        reply = lora_server.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": path})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_adapter")
        assert reason in reply.json()["error"]["message"]
    assert [card["id"] for card in lora_server.get("/v1/models").json()["data"]] == [MODEL, *ADAPTERS]
    assert text(lora_server, "three", CAPITAL) == expected.of("three", CAPITAL).text


def test_unloading_lets_what_runs_finish(lora_server: ServerProcess, expected: PeftAnswers) -> None:
    with lora_server.client() as client:
        stream = client.completions.create(
            model="three", prompt="Once", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = [next(stream)]
        assert lora_server.post("/v1/unload_lora_adapter", {"lora_name": "three"}).status_code == 200
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="three", prompt="Once")
        pieces += stream
    assert pieces[-1].choices[0].finish_reason == "length"
    reply = lora_server.post("/v1/load_lora_adapter", {"lora_name": "three", "lora_path": "three"})
    assert reply.status_code == 200
    assert text(lora_server, "three", CAPITAL) == expected.of("three", CAPITAL).text


@pytest.mark.thorough  # with an engine that computes nothing, it is shown in every run
def test_after_a_crash_of_the_engine_every_adapter_is_there_again(
    lora_server: ServerProcess, expected: PeftAnswers
) -> None:
    pid = lora_server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    (engine,) = map(int, children.read_text().split())
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: lora_server.get("/health/ready").status_code == 503, "the engine is missed")
    wait_until(lambda: lora_server.get("/health/ready").status_code == 200, "the engine is back", 180)
    for model in ("three", "one", MODEL, "team/two"):
        assert text(lora_server, model, CAPITAL) == expected.of(model, CAPITAL).text
