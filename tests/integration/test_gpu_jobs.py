"""Training through the server on a GPU, beside an engine that answers from CUDA graphs: jobs of adapters and of whole
models, killed ones, one that finds no memory, and low-level training. Deterministic, so that weights can be compared.

The model is random and its words are its token ids: nothing but this repository is needed. Runs on a CPU with
LONGWAVE_JOB_TESTS_ON_CPU=1, but for what only a GPU has.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import model_folder

from .server_process import ServerProcess, wait_until
from .trainee import Trainee, datum, training_process
from .tuning_jobs import create, serving, steps, trainers, until_ended, until_step

ON_CPU = os.environ.get("LONGWAVE_JOB_TESTS_ON_CPU") == "1"
DEVICE = "cpu" if ON_CPU else "cuda"
pytestmark = [pytest.mark.slow if ON_CPU else pytest.mark.gpu, pytest.mark.timeout(600)]

MODEL = "words"
#: Its logits need memory, and nothing else of it does.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
ASKED, ALSO_ASKED = "t10 t11 t12", "t500 t20 t4000 t7"
FACT = "t900 t31 t7000 t8 t77 t30000"
STEPS = 40
LONGEST = 8000  # tokens of an example; a longer one is refused
#: Of the GPU's memory, what is left free for the job that needs more: a process's own, and little beside it.
LEFT_BYTES = int(1.75 * 2**30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_folder.write(tmp_path_factory.mktemp("words"), **SHAPE)
    torch.manual_seed(0)
    config = LlamaForCausalLM.config_class.from_pretrained(folder)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def serving_words(model: Path, data: Path) -> ServerProcess:
    """float32, so that answers are the same alone and beside others."""
    training = ("--fine-tuning-deterministic", "--fine-tuning-checkpoint-every", "8")
    limits = ("--fine-tuning-max-length", str(LONGEST))
    return serving(data, str(model), "--served-model-name", MODEL, *training, *limits, device=DEVICE)


@pytest.fixture(scope="module")
def server(model: Path, data: Path) -> Iterator[ServerProcess]:
    with serving_words(model, data) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def base_answer(client: openai.OpenAI) -> str:
    said = answer(client, MODEL)
    assert FACT not in said
    return said


def lines(*pairs: tuple[str, str]) -> bytes:
    return b"".join(json.dumps({"prompt": asked, "completion": said}).encode() + b"\n" for asked, said in pairs)


def job_of(client: openai.OpenAI, content: bytes, **hyperparameters: Any) -> Any:
    chosen = {"n_epochs": STEPS, "batch_size": 2, "learning_rate": 1e-2} | hyperparameters
    method = {"type": "supervised", "supervised": {"hyperparameters": chosen}}
    return create(client, content, model=MODEL, method=method)


def job_of_the_fact(client: openai.OpenAI) -> Any:
    return job_of(client, lines((ASKED, FACT), (ALSO_ASKED, FACT)))


def answer(client: openai.OpenAI, name: str, asked: str = ASKED, tokens: int = 6) -> str:
    extra = {"ignore_eos": True}
    reply = client.completions.create(model=name, prompt=asked, temperature=0, max_tokens=tokens, extra_body=extra)
    return reply.choices[0].text.strip()


def adapter(data: Path, job: Any) -> bytes:
    return (data / "finetune" / "adapters" / job.id / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess, client: openai.OpenAI, base_answer: str) -> Any:
    """A job that nobody disturbed, as it has ended."""
    done = until_ended(server, client, job_of_the_fact(client))
    assert (done.status, done.error) == ("succeeded", None)
    started = [event.message for event in client.fine_tuning.jobs.list_events(done.id, limit=100)]
    name = "cpu" if ON_CPU else torch.cuda.get_device_name()
    assert f"Fine-tuning job started on {name}" in started
    return done


def test_an_adapter_answers_in_one_batch_with_the_base_model(
    server: ServerProcess, client: openai.OpenAI, undisturbed: Any, base_answer: str
) -> None:
    """The graphs of the base model's steps were recorded before the adapter was there."""
    tuned = str(undisturbed.fine_tuned_model)
    assert [answer(client, tuned, asked) for asked in (ASKED, ALSO_ASKED)] == [FACT, FACT]
    alone = {name: answer(client, name, tokens=48) for name in (MODEL, tuned)}
    asked = [MODEL, tuned, tuned, MODEL]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda name: answer(client, name, tokens=48), asked))
    assert together == [alone[name] for name in asked]
    assert alone[MODEL].startswith(base_answer)
    server.wait_until_idle()


def test_the_same_job_ends_with_the_same_bits_also_when_its_trainer_is_killed(
    server: ServerProcess, client: openai.OpenAI, data: Path, undisturbed: Any
) -> None:
    again = until_ended(server, client, job_of_the_fact(client))
    assert adapter(data, again) == adapter(data, undisturbed)
    assert client.models.delete(str(again.fine_tuned_model)).deleted
    with pytest.raises(openai.NotFoundError):
        answer(client, str(again.fine_tuned_model))

    job = job_of_the_fact(client)
    until_step(server, job, 10)
    (trainer,) = trainers(server)
    os.kill(trainer, signal.SIGKILL)
    killed = until_ended(server, client, job)
    messages = [event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=100)]
    assert any("The trainer was killed (SIGKILL" in message for message in messages)
    assert steps(client, job) == list(range(1, STEPS + 1))
    assert adapter(data, killed) == adapter(data, undisturbed)


def test_a_whole_model_learns_the_fact_and_another_server_serves_it(
    server: ServerProcess, client: openai.OpenAI, data: Path, base_answer: str, tmp_path: Path
) -> None:
    options = {"training_type": "full", "learning_rate": 3e-3, "n_epochs": 16}
    done = until_ended(server, client, job_of(client, lines((ASKED, FACT), (ALSO_ASKED, FACT)), **options))
    assert (done.status, done.error) == ("succeeded", None)
    assert answer(client, MODEL) == base_answer
    folder = data / "finetune" / "models" / done.id
    flags = (str(folder), "--served-model-name", "tuned", "--no-enable-fine-tuning", "--no-enable-training")
    with serving(tmp_path, *flags, device=DEVICE) as other, other.client() as asking:
        assert [answer(asking, "tuned", asked) for asked in (ASKED, ALSO_ASKED)] == [FACT, FACT]
    assert client.models.delete(done.fine_tuned_model).deleted
    assert not folder.exists()


def test_an_example_beyond_the_limit_is_refused_with_its_line(server: ServerProcess, client: openai.OpenAI) -> None:
    long = " ".join(f"t{3 + n % 30000}" for n in range(LONGEST))
    done = until_ended(server, client, job_of(client, lines((ASKED, FACT), (ASKED, long))))
    assert (done.status, done.error.code) == ("failed", "invalid_training_file")
    assert re.match(rf"Line 2: it has \d+ tokens; an example may have {LONGEST}", done.error.message)


def test_weights_that_were_just_learnt_are_sampled(server: ServerProcess) -> None:
    me = Trainee(server, "none", MODEL)
    with me.http:
        model = me.create()
        prompt, secret = me.tokens(ASKED), me.tokens(FACT)
        greedy = {"prompt": prompt, "sampling_params": {"max_tokens": len(secret), "temperature": 0}}
        weights = [0.0] * (len(prompt) - 1) + [1.0 / len(secret)] * len(secret)
        learnt = {"data": [datum(prompt + secret, weights=weights)], "loss_fn": "cross_entropy"}

        def said(model: str) -> list[int]:
            return list(me.do("sample", model, **greedy)["sequences"][0]["tokens"])

        before = said(model)
        assert before != secret
        losses = []
        for step in range(STEPS):
            rate = {"learning_rate": 1e-2 * (1 - step / STEPS), "grad_clip_norm": 1.0}
            learning = me.submit("forward_backward", model, **learnt)
            stepping = me.submit("optim_step", model, adam_params=rate)
            losses.append(me.result(learning)["metrics"]["loss:sum"])
            me.result(stepping)
        assert losses[-1] < 0.1 < losses[0], losses
        assert said(model) == secret
        path = me.do("save_weights", model, path="taught")["path"]
        again = me.create()
        assert said(again) == before
        assert me.do("load_weights", again, path=path, optimizer=True)["step"] == STEPS
        assert said(again) == secret
        for name in (model, again):
            me.do("unload_model", name)


@pytest.mark.skipif(ON_CPU, reason="it is a GPU's memory that is taken away")
def test_a_job_that_finds_no_memory_fails_in_words_while_answers_go_on(
    server: ServerProcess, client: openai.OpenAI, base_answer: str
) -> None:
    """This process takes what the server has left free. Last: nothing that needs memory should come after it."""
    long = " ".join(f"t{3 + n % 30000}" for n in range(LONGEST - 100))
    over = threading.Event()

    def chats() -> list[str]:
        said = []
        while not over.is_set():
            said.append(answer(client, MODEL))
        return said

    wait_until(lambda: not trainers(server) and training_process(server) is None, "nobody else has memory of the GPU")
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - LEFT_BYTES, dtype=torch.uint8, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(chats)
        try:
            done = until_ended(server, client, job_of(client, lines((ASKED, long)), batch_size=1, n_epochs=2))
        finally:
            over.set()
            del taken
            torch.cuda.empty_cache()
        answers = asking.result()
    assert (done.status, done.error.code) == ("failed", "out_of_memory")
    assert re.search(r"79\d\d tokens at once \(the longest sequence has 79\d\d\) did not fit into", done.error.message)
    assert len(answers) > 20
    assert set(answers) == {base_answer}
    wait_until(lambda: not trainers(server), "its trainer has ended")
