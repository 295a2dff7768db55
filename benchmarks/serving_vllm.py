"""vLLM's AsyncLLM under the serving cases, in process and without HTTP. Started by benchmarks/serving.py with vLLM's
own import path; imports nothing of ours but the cases."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from benchmarks.serving_cases import timed
from benchmarks.serving_child import Opened, Plan, main


@asynccontextmanager
async def open_engine(plan: Plan) -> AsyncIterator[Opened]:
    import vllm
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    fields = {
        "model": plan.model,
        "load_format": plan.load_format,
        "skip_tokenizer_init": True,
        "dtype": plan.dtype,
        "max_model_len": plan.size.max_model_len,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "seed": 0,
        "max_num_seqs": 256,
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**fields | plan.engine))
    numbers = count()

    async def generate(prompt: list[int], out: int) -> AsyncGenerator[int, None]:
        sampling = SamplingParams(
            temperature=1.0, ignore_eos=True, max_tokens=out, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        inputs = {"prompt_token_ids": prompt}
        async for output in engine.generate(inputs, sampling, request_id=f"bench-{next(numbers)}"):
            yield len(output.outputs[0].token_ids)

    try:
        yield Opened(timed(generate), {"version": vllm.__version__})
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(open_engine)
