"""Tokens through pages, batches and chunks equal transformers' own, and nothing around a request changes them."""

from typing import Any

import pytest
import torch
from batch_driver import GREEDY, eager_tokens, generate
from tiny_models import as_loaded, random_model, tiny_config
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from attention_backend import dispatch
from attention_backend.jit import launch
from models.batch import IN_FLIGHT, SamplingParams, ScheduledSeq, StepBatch
from models.descriptions import load_tokenizer
from models.host import HostMemoryError
from models.kv_pool import MemoryBudget, PoolTooSmallError
from models.loader import LoadedModel
from models.registry import ModelSource
from models.runner import ModelRunner
from models.shared_runs import Levels, SharedRun, StepSharing
from models.step_rows import StepRows
from models.zeroed_memory import ZeroedMemory

PROMPTS = ["What is the capital of France?", "Count to ten.", "Hi", "Who wrote Hamlet? Explain what the play is about."]
TOKENS = 8


@pytest.fixture(scope="module")
def runner(bundled_model: LoadedModel) -> ModelRunner:
    return ModelRunner(
        bundled_model, block_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=80
    )


@pytest.fixture(scope="module")
def prompts(bundled_source: ModelSource) -> list[list[int]]:
    tokenizer: Any = load_tokenizer(bundled_source)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]


@pytest.fixture(scope="module")
def expected(bundled_source: ModelSource, prompts: list[list[int]]) -> list[list[int]]:
    """By a model that nothing of ours has touched."""
    model = AutoModelForCausalLM.from_pretrained(
        bundled_source.fetch(), dtype=torch.float32, attn_implementation="eager"
    )
    return [eager_tokens(model, prompt, TOKENS) for prompt in prompts]


UNTIL_THE_END = SamplingParams(temperature=0.0, min_tokens=TOKENS)


def test_the_bundled_model_alone_answers_what_transformers_answers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generate(runner, [prompt], TOKENS, sampling=UNTIL_THE_END)[0].tokens == tokens


def test_samples_that_are_padded_are_the_same(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, of steps that are launched kernel by kernel."""
    monkeypatch.setattr(runner._inputs, "_sample_sizes", [3, 6])
    answers = generate(runner, prompts, TOKENS, sampling=UNTIL_THE_END, budget=48)
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("budget", [256, 48, 7])
def test_the_bundled_model_batched_and_chunked_answers_the_same(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    answers = generate(runner, prompts, TOKENS, sampling=UNTIL_THE_END, budget=budget)
    assert [answer.tokens for answer in answers] == expected


def test_the_bundled_model_preempted_answers_the_same(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    answers = generate(runner, prompts[:2], TOKENS, sampling=UNTIL_THE_END, budget=64, preempt_every=6)
    assert [answer.tokens for answer in answers] == expected[:2]


_SMALL: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WITHOUT_HEAD_DIM = {name: size for name, size in _SMALL.items() if name != "head_dim"}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": tiny_config(),
    "mistral": MistralConfig(**_SMALL, sliding_window=8),
    "qwen3": Qwen3Config(**_SMALL),
    "gemma2": Gemma2Config(**_SMALL, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(
        **_SMALL, sliding_window=8, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gpt_oss": GptOssConfig(**_SMALL, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
    "llama4": Llama4TextConfig(
        **_SMALL, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=16, floor_scale=7, attn_scale=1.0
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **_WITHOUT_HEAD_DIM,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "phimoe": PhimoeConfig(
        **_WITHOUT_HEAD_DIM,
        sliding_window=8,
        num_local_experts=4,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64,  # more than any answer here, less than what may come
            "short_mscale": 1.1,
            "long_mscale": 1.4,
        },
    ),
    "gpt2": GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2),
    "deepseek_v3": DeepseekV3Config(
        vocab_size=120,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_what_transformers_answers(family: str) -> None:
    model = random_model(FAMILIES[family])
    runner = ModelRunner(
        as_loaded(model), block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_blocks=40
    )
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 120, (n,), generator=generator).tolist() for n in (5, 33, 18, 50)]
    wanted = [eager_tokens(model, prompt, 10) for prompt in prompts]
    answers = generate(runner, prompts, 10, sampling=SamplingParams(temperature=0.0, min_tokens=10), budget=24)
    assert [answer.tokens for answer in answers] == wanted


def test_window_layers_and_full_layers_are_told_apart() -> None:
    runner = ModelRunner(
        as_loaded(random_model(FAMILIES["gemma3"])),
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    assert {key.partition("/")[0] for key in runner.kernels} == {"sliding_attention", "full_attention"}
    assert set(runner.kernels.values()) == {"cpu_reference"}


SAMPLED = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=20, frequency_penalty=0.8),
    SamplingParams(seed=4, min_p=0.02, repetition_penalty=1.3),
    SamplingParams(seed=5, presence_penalty=1.0, logprobs=3),
]
RANDOM_PROMPTS = [[7, 8, 9], [20] * 30, list(range(3, 60)), [5], [99, 98, 97, 96]]


def test_sampled_tokens_do_not_depend_on_batch_chunks_slots_or_preemption(tiny_runner: ModelRunner) -> None:
    together = [out.tokens for out in generate(tiny_runner, RANDOM_PROMPTS, 15, sampling=SAMPLED)]
    alone = [
        generate(tiny_runner, [prompt], 15, sampling=[params])[0].tokens
        for prompt, params in zip(RANDOM_PROMPTS, SAMPLED, strict=True)
    ]
    chunked = generate(tiny_runner, RANDOM_PROMPTS, 15, sampling=SAMPLED, budget=7, first_slot=9)
    preempted = generate(tiny_runner, RANDOM_PROMPTS, 15, sampling=SAMPLED, preempt_every=12)
    assert together == alone
    assert together == [out.tokens for out in chunked]
    assert together == [out.tokens for out in preempted]


def test_logprobs_come_with_the_tokens_of_the_requests_that_asked(tiny_runner: ModelRunner) -> None:
    outputs = generate(tiny_runner, RANDOM_PROMPTS, 4, sampling=SAMPLED)
    assert [[entry is not None for entry in out.logprobs] for out in outputs] == [[False] * 4] * 4 + [[True] * 4]
    for entry in outputs[4].logprobs:
        assert entry is not None
        assert len(entry.top) == 3
        assert entry.logprob <= entry.top[0][1] <= 0
        assert (entry.rank == 1) == (entry.logprob == entry.top[0][1])
    assert all(out.finite == [True] * 4 for out in outputs)


def test_a_step_in_which_no_prompt_ends_gives_no_tokens(tiny_runner: ModelRunner) -> None:
    tiny_runner.add_request(0, GREEDY, [1] * 20)
    output = tiny_runner.execute(StepBatch((ScheduledSeq(0, [1] * 5, 0, [1], False),)))
    tiny_runner.remove_request(0)
    assert output.token_ids == []


def test_warming_up_changes_no_answer(tiny_runner: ModelRunner) -> None:
    before = generate(tiny_runner, RANDOM_PROMPTS, 5, sampling=SAMPLED)
    tiny_runner.warm_up()
    assert generate(tiny_runner, RANDOM_PROMPTS, 5, sampling=SAMPLED) == before


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [64, 16])
def test_a_gpu_that_lags_behind_the_host_answers_what_transformers_answers(budget: int) -> None:
    """Chunks of a long prompt sample nothing, so the host is several steps ahead. float32: the CPU's very tokens."""
    model = random_model(tiny_config())
    sampling = SamplingParams(temperature=0.0, min_tokens=6)
    prompts = torch.randint(3, 120, (2, 200), generator=torch.Generator().manual_seed(3)).tolist()
    expected = [eager_tokens(model, prompt, 6) for prompt in prompts]
    gpu_runner = ModelRunner(
        as_loaded(model.to("cuda:0")),  # type: ignore[arg-type]
        block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_blocks=64,
    )  # fmt: skip
    gpu_runner.warm_up()
    for together in ([0], [1], [0, 1]):
        torch.cuda._sleep(1_000_000_000)
        answers = generate(gpu_runner, [prompts[i] for i in together], 6, sampling=sampling, budget=budget)
        assert [answer.tokens for answer in answers] == [expected[i] for i in together]


def gpu_runner_of(loaded: LoadedModel, *, enforce_eager: bool = False, all_graphs: bool = True) -> ModelRunner:
    made = ModelRunner(
        loaded, block_size=16, max_num_seqs=12, max_num_batched_tokens=256, max_model_len=512, num_blocks=400,
        enforce_eager=enforce_eager, max_drafts=7,
    )  # fmt: skip
    made.warm_up(all_graphs=all_graphs)
    return made


@pytest.mark.gpu
def test_replayed_decode_steps_answer_what_steps_without_graphs_answer() -> None:
    """Every number of rows, every way to sample; the graphs were recorded with one key a row. float32."""
    loaded = as_loaded(random_model(tiny_config(max_position_embeddings=512)).to("cuda:0"))  # type: ignore[arg-type]
    eager, replayed = gpu_runner_of(loaded, enforce_eager=True), gpu_runner_of(loaded)
    rng = torch.Generator().manual_seed(4)
    ways = [
        SamplingParams(temperature=0.0, min_tokens=9), SamplingParams(temperature=0.9, seed=1, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.8, seed=2, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=5, frequency_penalty=0.5, seed=3, ignore_eos=True),
    ]  # fmt: skip
    for count in (1, 2, 3, 5, 12):
        prompts = [torch.randint(3, 120, (20 + 33 * i,), generator=rng).tolist() for i in range(count)]
        sampling = [ways[i % 4] for i in range(count)]
        answers = [generate(r, prompts, 9, sampling=sampling, budget=256) for r in (eager, replayed)]
        assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
        assert all(all(a.finite) for a in answers[1])


@pytest.mark.gpu
def test_attention_calls_of_replayed_steps_are_counted() -> None:
    loaded = as_loaded(random_model(tiny_config(max_position_embeddings=512)).to("cuda:0"))  # type: ignore[arg-type]
    made = gpu_runner_of(loaded)
    before = sum(dispatch.calls().values())
    generate(made, [[5, 6, 7]], 9, sampling=SamplingParams(temperature=0.0, ignore_eos=True), budget=256)
    assert sum(dispatch.calls().values()) - before >= 9 * loaded.config.num_hidden_layers


@pytest.mark.gpu
def test_steps_that_are_recorded_when_they_come_or_in_between_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where there is no memory for graphs. float32."""
    loaded = as_loaded(random_model(tiny_config(max_position_embeddings=512)).to("cuda:0"))  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 120, (20 + 33 * i,), generator=rng).tolist() for i in range(5)]

    def tokens(runner: ModelRunner) -> list[list[int]]:
        return [answer.tokens for answer in generate(runner, prompts, 6, sampling=SAMPLED)]

    wanted = tokens(gpu_runner_of(loaded, enforce_eager=True))
    made = gpu_runner_of(loaded, all_graphs=False)
    assert made._graphs is not None
    assert not made._graphs._recorded
    assert tokens(made) == wanted
    assert 0 < len(made._graphs._recorded) < len(made._graphs._shapes)
    assert made.prepare()
    assert tokens(made) == wanted
    while made.prepare():
        pass
    assert set(made._graphs._recorded) == set(made._graphs._keys)
    assert tokens(made) == wanted

    without = gpu_runner_of(loaded, all_graphs=False)
    assert without._graphs is not None
    full = lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError)  # noqa: E731
    monkeypatch.setattr(without._graphs._recorder, "record", full)
    assert tokens(without) == wanted
    while without.prepare():
        pass
    assert not without._graphs._recorded


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [0, 70], ids=["decodes", "beside a prompt"])
def test_replayed_steps_read_shared_pages_once_and_answer_the_same(chunk: int) -> None:
    loaded = as_loaded(random_model(tiny_config(max_position_embeddings=512)).to("cuda:0", torch.bfloat16))  # type: ignore[arg-type]
    made = gpu_runner_of(loaded)
    prompt = torch.randint(3, 120, (320,), generator=torch.Generator().manual_seed(5)).tolist()
    made.add_request(0, GREEDY, prompt)
    made.execute(StepBatch((ScheduledSeq(0, prompt[:256], 0, list(range(1, 17)), False),)))
    made.execute(StepBatch((ScheduledSeq(0, prompt[256:], 256, list(range(1, 21)), False),)))
    for slot in range(1, 9):
        made.add_request(slot, GREEDY, prompt)
    beside = (ScheduledSeq(8, prompt[:chunk], 0, list(range(30, 35)), True),) if chunk else ()
    for count in (2, 5, 7):
        rows = tuple(ScheduledSeq(s, [3 + s], 320, [*range(1, 21), 20 + s], True) for s in range(1, 1 + count))
        sharings: list[Levels] = [(), ((SharedRun(0, count, 0, 20),),), ((SharedRun(0, 2, 0, 16),),)]
        if count > 2:  # the second replay of one graph has other groups than the first
            sharings += [((SharedRun(0, count, 0, 7),), (SharedRun(0, 2, 7, 20), SharedRun(2, count, 7, 19)))]
            sharings += [((SharedRun(0, count - 1, 0, 12),), (SharedRun(1, count - 1, 12, 20),))]
        outputs = []
        for levels in sharings:
            batch = StepBatch((*rows, *beside), StepSharing(levels))
            assert made._graphs is not None
            key = made._graphs.key_of(batch, StepRows.of(batch))
            assert key is not None
            assert key.levels == len(levels)
            output = made.execute(batch)
            outputs.append(made._graphs._recorded[key].output.logits[: len(batch.seqs)].float())
            assert all(output.finite)
        for other in outputs[1:]:
            assert (other - outputs[0]).norm() < 0.02 * outputs[0].norm()


@pytest.mark.gpu
def test_replayed_steps_of_prompts_and_drafts_answer_the_same() -> None:
    """float32. Sizes around those of graphs, decodes beside prompts, drafts of any number."""
    loaded = as_loaded(random_model(tiny_config(max_position_embeddings=512)).to("cuda:0"))  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(8)
    prompts = [torch.randint(3, 120, (300,), generator=rng).tolist() for _ in range(12)]
    #: (slot, computed, tokens, drafts); drafts None: nothing is sampled
    steps: list[list[tuple[int, int, int, int | None]]] = [
        [(0, 0, 64, None)], [(0, 64, 63, 0)], [(1, 0, 1, 0)], [(1, 1, 70, None), (2, 0, 66, 0), (3, 0, 20, None)],
        [(0, 127, 1, 0), (1, 71, 1, 0), (2, 66, 40, 0), (3, 20, 90, None)], [(0, 128, 1, 0), (4, 0, 250, 0)],
        [(0, 129, 8, 7)], [(1, 72, 1, 0), (0, 137, 3, 2), (2, 106, 8, 7), (4, 250, 5, 4)],
        [(slot, 0, 15 + slot, None) for slot in range(5, 12)],
        [(1, 73, 1, 0), *((slot, 15 + slot, 4, 3) for slot in range(5, 12))],
    ]  # fmt: skip
    found = []
    for enforce_eager in (True, False):
        made = gpu_runner_of(loaded, enforce_eager=enforce_eager)
        for slot, prompt in enumerate(prompts):
            made.add_request(slot, SamplingParams(temperature=0.8, seed=slot, ignore_eos=True), prompt)
        tokens: list[list[int]] = []
        for step in steps:
            seqs = [
                ScheduledSeq(
                    slot, prompts[slot][at : at + count], at, list(range(1 + 30 * slot, 31 + 30 * slot)),
                    drafts is not None, num_drafts=drafts or 0,
                )
                for slot, at, count, drafts in step
            ]  # fmt: skip
            batch = StepBatch(tuple(seqs))
            if made._graphs is not None:
                assert made._graphs.key_of(batch, StepRows.of(batch)) is not None
            output = made.execute(batch)
            assert all(output.finite)
            tokens.append(output.token_ids)
        found.append(tokens)
    assert found[0] == found[1]


@pytest.mark.gpu
def test_a_step_may_name_tokens_that_only_the_device_knows() -> None:
    loaded = as_loaded(random_model(tiny_config(max_position_embeddings=512)).to("cuda:0"))  # type: ignore[arg-type]
    for made in (gpu_runner_of(loaded, enforce_eager=True), gpu_runner_of(loaded)):
        prompts = torch.randint(3, 120, (3, 40), generator=torch.Generator().manual_seed(6)).tolist()
        wanted = generate(made, prompts, 6, sampling=SamplingParams(temperature=0.0, ignore_eos=True))
        blocks = [[1 + 4 * i, 2 + 4 * i, 3 + 4 * i] for i in range(3)]
        for slot, prompt in enumerate(prompts):
            made.add_request(slot, SamplingParams(temperature=0.0, ignore_eos=True), prompt)
        torch.cuda._sleep(1_000_000_000)
        steps = [made.launch(StepBatch(tuple(ScheduledSeq(i, p, 0, blocks[i], True) for i, p in enumerate(prompts))))]
        for n in range(5):
            rows = tuple(ScheduledSeq(i, [IN_FLIGHT], 40 + n, blocks[i], True) for i in range(3))
            steps.append(made.launch(StepBatch(rows)))
            if n:
                steps[n - 1].collect()
        got = [step.collect().token_ids for step in steps]
        assert list(map(list, zip(*got, strict=True))) == [answer.tokens for answer in wanted]


@pytest.mark.gpu
def test_no_kernel_is_compiled_after_warming_up() -> None:
    """A compilation in the middle of serving would stop every running answer for seconds."""
    for config in (tiny_config(), tiny_config(num_key_value_heads=1), tiny_config(num_key_value_heads=4)):
        loaded = as_loaded(random_model(config).to("cuda:0", torch.bfloat16))  # type: ignore[arg-type]
        gpu_runner = ModelRunner(
            loaded, block_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=40
        )
        gpu_runner.warm_up()
        known = set(launch._loaded)
        for length in (*range(1, 70), 100, 200):
            gpu_runner.add_request(0, GREEDY, [1] * length)
            blocks = list(range(1, 2 + length // 16))
            gpu_runner.execute(StepBatch((ScheduledSeq(0, [1] * length, 0, blocks, True),)))
            gpu_runner.remove_request(0)
        for rows in (3, 20, 40):
            gpu_runner.add_request(0, GREEDY, [1] * 200)
            gpu_runner.add_request(1, GREEDY, [1] * 200)
            seqs = tuple(ScheduledSeq(slot, [1] * rows, 160, list(range(1, 14)), True) for slot in (0, 1))
            gpu_runner.execute(StepBatch(seqs, StepSharing(prefills=((SharedRun(0, 2, 0, 10),),))))
            gpu_runner.remove_request(0)
            gpu_runner.remove_request(1)
        assert set(launch._loaded) == known


@pytest.mark.gpu
def test_what_steps_take_is_this_process_s_from_the_start() -> None:
    """Or a trainer beside it would fill what is free, and answers would fail."""
    model = random_model(tiny_config(intermediate_size=8192))
    made = ModelRunner(
        as_loaded(model.to("cuda:0", torch.bfloat16)),  # type: ignore[arg-type]
        block_size=16, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=256,
        memory_budget=MemoryBudget(kv_cache_memory_bytes=8 << 20),
    )  # fmt: skip
    reserved = torch.cuda.memory_reserved()
    assert made._step_bytes > 2048 * 8192 * 2
    taken = torch.empty(made._step_bytes, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.memory_reserved() == reserved
    del taken


def test_the_pool_is_sized_by_the_budget_unless_blocks_are_given() -> None:
    loaded = as_loaded(random_model(tiny_config()))
    limits: dict[str, Any] = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    block_bytes = 3 * 2 * (16 + 16) * 16 * 4
    budget = MemoryBudget(kv_cache_memory_bytes=10 * block_bytes)
    assert ModelRunner(loaded, **limits, memory_budget=budget).num_blocks == 10
    assert ModelRunner(loaded, **limits, memory_budget=budget, num_blocks=7).num_blocks == 7
    assert ModelRunner(loaded, **limits).num_blocks == 4 * 4 + 1
    with pytest.raises(PoolTooSmallError, match="max_model_len = 64"):
        ModelRunner(loaded, **limits, memory_budget=MemoryBudget(kv_cache_memory_bytes=4 * block_bytes))


def test_pages_lie_in_memory_that_was_taken_before_as_far_as_it_reaches() -> None:
    loaded = as_loaded(random_model(tiny_config()))
    limits: dict[str, Any] = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    pages = 7 * 2 * 16 * 16 * 4  # bytes of a layer's keys, or values
    for room, inside in ((100 * pages, 6), (5 * pages, 5), (pages - 1, 0)):
        memory = ZeroedMemory(room)
        begin = torch.frombuffer(memory._memory, dtype=torch.uint8).data_ptr()
        caches = ModelRunner(loaded, **limits, num_blocks=7, pool_memory=memory)._kv_caches
        tensors = [tensor for pages_of_layer in caches for tensor in pages_of_layer]
        assert sum(begin <= tensor.data_ptr() < begin + room for tensor in tensors) == inside
        assert all(tensor.shape == (7, 2, 16, 16) and not tensor.any() for tensor in tensors)


def test_a_pool_larger_than_the_host_is_refused_before_it_is_taken() -> None:
    loaded = as_loaded(random_model(tiny_config()))
    limits: dict[str, Any] = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    with pytest.raises(HostMemoryError, match=r"the KV cache would take .* GiB of memory, and .* GiB are free"):
        ModelRunner(loaded, **limits, num_blocks=10**10)
