"""What drafts by prompt lookup are worth: the engine's loop with them and without, tokens a second while it decodes.

    python -m benchmarks.drafting --out benchmarks/results/drafting.json
    python -m benchmarks.drafting --device cpu --clock cpu --threads 1      # on a machine with other work to do
    python -m benchmarks.drafting --shape-8b                                # random weights, on a GPU

Texts are the bundled model's: asked to repeat a text it quotes, asked for a story it does not. Answers must be the same
(near ties apart, which bfloat16 has). Random weights have nothing to say, so there a bias makes every token one and the
same (all guesses are right), or one of two by chance (half of them are wrong)."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import machine, model_folder
from benchmarks.arguments import write_out
from benchmarks.list_link import ListLink
from models import bundled, registry
from models.batch import SamplingParams
from models.descriptions import load_tokenizer
from models.stages import Stages
from server.engine.config import EngineConfig
from server.engine.core import EngineCore
from server.engine.messages import AddRequest, TokenDelta
from server.engine.runner import LoadedRunner, load
from server.engine.token_ids import TokenIds
from server.engine.worker import make_scheduler

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
TEXT = Path(__file__).parent.parent / "docs" / "kernels.md"
REPEAT = "Repeat the following text exactly:\n\n"
STORY = "Write a short story about a fox who learns to swim."
TOPICS = ("Paris", "whales", "steel", "tea", "the moon", "rivers", "bread")

Cases = dict[str, list[tuple[list[int], SamplingParams]]]


def texts(model: str, count: int) -> Cases:
    tokenizer: Any = load_tokenizer(registry.resolve(model))

    def ask(text: str) -> tuple[list[int], SamplingParams]:
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids, SamplingParams(count, temperature=0.0)

    document = TEXT.read_text()
    repeat = [ask(REPEAT + document[2000 + 100 * i : 3300 + 100 * i]) for i in range(8)]
    chats = [ask(f"Tell me about {topic}.") for topic in TOPICS]
    return {
        "1 repeats": repeat[:1],
        "1 story": [ask(STORY)],
        "4 repeat": repeat[:4],
        "8 repeat": repeat,
        "1 repeats, 7 chats": repeat[:1] + chats,
    }


def biased(count: int) -> Cases:
    prompt = torch.randint(10, 100_000, (1024,), generator=torch.Generator().manual_seed(0)).tolist()
    right = SamplingParams(count, seed=0, ignore_eos=True, logit_bias={1000: 100.0})
    chance = replace(right, logit_bias={1000: 100.0, 1001: 100.0})
    plain = SamplingParams(count, seed=0, ignore_eos=True)
    return {
        f"{rows} {name}": [(prompt, sampling)] * rows
        for rows in (1, 4, 16)
        for name, sampling in (("all right", right), ("by chance", chance), ("no match", plain))
    }


def run(
    loaded: LoadedRunner,
    config: EngineConfig,
    asked: list[tuple[list[int], SamplingParams]],
    clock: Callable[[], float],
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Answers by request, and what happened once all had begun to decode."""
    scheduler = make_scheduler(config, loaded)
    scheduler.clock = clock
    link = ListLink()
    core = EngineCore(loaded, scheduler, link)
    link.inbox = [AddRequest(str(number), TokenIds(ids), sampling) for number, (ids, sampling) in enumerate(asked)]
    core.turn()
    while any(request.num_generated == 0 for request in scheduler.open.by_id.values()):
        core.turn()
    before, steps, start = scheduler.generation_tokens, 0, clock()
    while core.has_work:
        core.turn()
        steps += 1
    seconds = clock() - start
    answers: dict[str, list[int]] = {}
    for message in link.sent:
        if isinstance(message, TokenDelta):
            answers.setdefault(message.request_id, []).extend(message.token_ids)
    drafts = {} if scheduler.drafter is None else asdict(scheduler.drafter.stats)
    return answers, {"tok_s": (scheduler.generation_tokens - before) / seconds, "turns": steps, **drafts}


def main(
    model: Annotated[str, typer.Option(help="As of `longwave serve`.")] = bundled.NAME,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    shape_8b: Annotated[bool, typer.Option(help="Random weights of Llama-3.1-8B's shape instead.")] = False,
    count: Annotated[int, typer.Option(help="Tokens of an answer.")] = 160,
    threads: Annotated[int | None, typer.Option(help="Of torch, on a CPU.")] = None,
    clock: Annotated[str, typer.Option(help="wall, or cpu: of this process.")] = "wall",
    out: Annotated[Path | None, typer.Option(help="Write the results there, as JSON.")] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded where there is no git.")] = None,
) -> None:
    """Measures drafts."""
    if threads is not None:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        if shape_8b:
            model_folder.write(Path(folder), max_position_embeddings=131_072)
        config = EngineConfig(
            model=folder if shape_8b else model, load_format="dummy" if shape_8b else "auto", device=device,  # type: ignore[arg-type]
            max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=2048, enable_prefix_caching=False,
            num_gpu_blocks_override=16 * 32 + 1,
        )  # fmt: skip
        loaded = load(config, Stages())
    loaded.runner.warm_up()
    without = replace(config, num_speculative_tokens=0)
    results = {}
    for name, asked in (biased(count) if shape_8b else texts(model, count)).items():
        pair = [run(loaded, one, asked, CLOCKS[clock]) for one in (without, config)]
        (plain, before), (drafted, after) = pair
        same = sum(plain[key] == drafted[key] for key in plain)
        results[name] = {"without": before, "with": after, "same_answers": same, "answers": len(plain)}
        drafts = f"{after['num_accepted_tokens']} of {after['num_draft_tokens']} drafts right"
        typer.echo(
            f"{name}: {before['tok_s']:.1f} -> {after['tok_s']:.1f} tok/s, "
            f"{before['turns']} -> {after['turns']} turns, "
            f"{drafts}, {same} of {len(plain)} answers the same"
        )
    if out is not None:
        write_out(out, json.dumps({"machine": machine.facts(commit), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
