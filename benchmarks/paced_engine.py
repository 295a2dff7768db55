"""The engine, but its steps only take time, about as much as those of an 8B model on an H200: the stand-in for a GPU
where the way between the engine and its clients is measured. All else is what serves: scheduler, process, messages.

    python -m benchmarks.paced_engine --model FOLDER --port 8000     the whole server in front of it

FOLDER has a config.json, a tokenizer and pace.json, {"slower": 4} for steps that take four times as long.
"""

import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from models.batch import SamplingParams, StepBatch, StepOutput
from models.shared_runs import SharingLimits
from models.stages import Stages
from server.engine.config import EngineConfig
from server.engine.runner import LoadedRunner
from server.engine.step_time import StepTimeModel, work_of
from server.engine.tpot_target import TpotTarget

PACE = "pace.json"
RUNNER = "benchmarks.paced_engine:load"
NUM_BLOCKS = 13_843  # of an 8B model beside its weights on an H200
BLOCK_SIZE = 64
STEP_TOKENS = 8192
TPOT_TARGET = 0.025
FIRST_TOKEN = 10  # below it tokenizers keep their special tokens


class PacedStep:
    def __init__(self, output: StepOutput, ends: float) -> None:
        self._output = output
        self._ends = ends

    def is_done(self) -> bool:
        return time.monotonic() >= self._ends

    def collect(self) -> StepOutput:
        time.sleep(max(0.0, self._ends - time.monotonic()))
        return self._output


class PacedRunner:
    """Steps run one after the other, each from its launch or from the end of the one before it. Tokens are drawn."""

    adapters = None
    sharing_limits: SharingLimits | None = None
    num_blocks = NUM_BLOCKS
    block_size = BLOCK_SIZE

    def __init__(self, vocab_size: int, slower: float) -> None:
        self.kernels = {"full_attention": "none"}
        self._slower = slower
        self._model = StepTimeModel()
        self._tokens = random.Random(0).choices(range(FIRST_TOKEN, vocab_size), k=65_536)
        self._drawn = 0
        self._free_at = 0.0  # when the last of the launched steps ends

    def warm_up(self, *, all_graphs: bool = True) -> None:
        pass

    def add_request(self, slot: int, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        pass

    def append_known(self, slot: int, token_ids: Sequence[int]) -> None:
        pass

    def remove_request(self, slot: int) -> None:
        pass

    def launch(self, batch: StepBatch) -> PacedStep:
        work = work_of([(seq.num_computed, len(seq.token_ids)) for seq in batch.seqs])
        self._free_at = max(self._free_at, time.monotonic()) + self._slower * self._model.predict(work)
        count = sum(seq.sample for seq in batch.seqs)
        begin = self._drawn % (len(self._tokens) - count)
        self._drawn += count
        output = StepOutput(self._tokens[begin : begin + count], [None] * count, [True] * count)
        return PacedStep(output, self._free_at)


def load(config: EngineConfig, _stages: Stages) -> LoadedRunner:
    """The factory for EngineConfig.runner."""
    folder = Path(config.model)
    described = json.loads((folder / "config.json").read_text())
    slower = json.loads((folder / PACE).read_text())["slower"]
    return LoadedRunner(
        runner=PacedRunner(described["vocab_size"], slower),
        model=folder.name,
        device="none",
        dtype="none",
        max_model_len=described["max_position_embeddings"],
        max_num_batched_tokens=STEP_TOKENS,
        vocab_size=described["vocab_size"],
        eos_token_ids=(2,),
        tpot_target=TpotTarget(TPOT_TARGET * slower, 3),
        overlaps=True,
    )


def engine_config(config: EngineConfig) -> EngineConfig:
    """Without guesses: what is drawn does not repeat itself."""
    return replace(config, runner=RUNNER, num_speculative_tokens=0)


def main(model: Annotated[Path, typer.Option()], port: Annotated[int, typer.Option()]) -> None:
    from models import registry
    from models.descriptions import load_tokenizer
    from server import process
    from server.app import create_app
    from server.configuration import load_settings
    from server.engine.client import EngineClient
    from server.lifecycle import Lifecycle

    logging.basicConfig(level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    settings = load_settings({"model": str(model), "port": port, "device": "cpu", "data_dir": str(model / "data")})
    listener = process.listen(settings.host, settings.port)
    client = EngineClient(engine_config(settings.engine_config()))
    lifecycle = Lifecycle(settings, client, lambda: load_tokenizer(registry.resolve(str(model))))
    process.end(process.serve(lambda: create_app(lifecycle), lifecycle, listener, lambda: None))


if __name__ == "__main__":
    typer.run(main)
