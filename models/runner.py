"""A loaded model made ready for steps: kernels, self-test, pages, graphs. Knows no queue and no text, and not how a
step is run (step_launcher.py)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from transformers import PreTrainedModel

from attention_backend.heuristics.decode import DECODE_ROWS
from attention_backend.preparation import StepLayer, make_ready, step_kernels
from models.adapters import AdapterSlots, LoraLimits, find_linears
from models.attention_sites import find_attention_sites
from models.batch import NO_ADAPTER
from models.chosen_kernels import chosen_kernels, copied_pages
from models.copies import reserve_pinned
from models.cpu_pool import cpu_pool_bytes
from models.fingerprint import fingerprint
from models.forward import PagedForward
from models.graphs import StepGraphs
from models.inputs import StepInputs
from models.kv_offload import KVOffload, buffer_bytes
from models.kv_pool import (
    FP8,
    KVCaches,
    MemoryBudget,
    allocate,
    bytes_per_block,
    count_blocks,
    cuda_pool_bytes,
    fill,
    hold,
    holding,
    kv_cache_dtype,
)
from models.kv_scales import calibrate
from models.loader import LoadedModel
from models.patching import UnsupportedModelError, check_supported_for_serving, fix_longrope, fix_temperature
from models.prefix_groups import sharing_limits
from models.rehearsals import Rehearsals
from models.sampling import Sampler
from models.self_test import check_engine_path
from models.stages import Stages
from models.step_launcher import StepLauncher
from models.step_shapes import CHUNKS, StepShape, chunk_shapes, decode_shapes, decode_sizes, draft_shapes
from models.zeroed_memory import ZeroedMemory


class ModelRunner(StepLauncher):
    """`num_blocks` counts block 0, the dummy page, which no request may own: the engine has 1 .. num_blocks - 1."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int | None = None,
        memory_budget: MemoryBudget | None = None,
        lora: LoraLimits | None = None,
        enforce_eager: bool = False,
        kv_offload_bytes: int = 0,
        kv_dtype: str = "auto",
        max_drafts: int = 0,
        stages: Stages | None = None,
        pool_memory: ZeroedMemory | None = None,
    ) -> None:
        """Raises UnsupportedModelError for a model that cannot be served exactly, PoolTooSmallError when not even one
        request of max_model_len tokens fits, HostMemoryError for more than a CPU has, KVCacheDtypeError for `kv_dtype`.

        `num_blocks` (num_gpu_blocks_override) replaces the measured size of the pool. With `lora`, `adapters` is there,
        and its memory is taken before the pool is measured. `enforce_eager`: no CUDA graphs. `max_drafts`: guesses of a
        sequence in a step, for which there are graphs, too. `stages` are told of what takes long. `pool_memory`: of a
        CPU, for the pool, which takes more where that is not enough.
        """
        self._stages = stages or Stages()
        self.block_size = block_size
        self.device = loaded.device
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_drafts = max_drafts
        self._dtype = loaded.dtype
        self._use_graphs = self.device.type == "cuda" and not enforce_eager and loaded.capturable
        check_supported_for_serving(loaded.model)
        fix_longrope(loaded.model, max_model_len)
        fix_temperature(loaded.model)
        self._sites = find_attention_sites(loaded.model)
        self._kv_dtype = kv_cache_dtype(kv_dtype, self._dtype, self._sites, self.device)
        layers = [
            StepLayer(
                site.head_dim,
                site.head_dim_v,
                site.num_heads // site.num_kv_heads,
                softcap=site.softcap != 0.0,
                left_bounds=site.window > 0 or site.chunk_size > 0,
            )
            for site in self._sites
        ]
        forward = PagedForward(loaded.model)
        attention = step_kernels(
            layers, self._dtype, self.device, page_size=block_size, fp8_kv=self._kv_dtype == FP8,
            most_keys=self._blocks_for(max_model_len) * block_size,
        )  # fmt: skip
        make_ready([*attention, *forward.kernels(fp8_kv=self._kv_dtype == FP8)], self.device)
        self._stages.end("kernels")
        check_engine_path(loaded.model, self._sites, block_size=block_size)
        self._kv_scales = calibrate(loaded.model, self._sites, block_size=block_size) if self._kv_dtype == FP8 else None
        if self._kv_scales is not None:
            check_engine_path(loaded.model, self._sites, block_size=block_size, scales=self._kv_scales)
        self._stages.end("self-test")
        adapters = None if lora is None else self._make_adapter_slots(loaded.model, lora)
        #: When prefixes that requests share are worth passes of their own; None: no layer could.
        self.sharing_limits = sharing_limits(self._sites, self._kv_dtype, block_size, self.device.type)
        inputs = StepInputs(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_blocks_per_seq=self._blocks_for(max_model_len),
            block_size=block_size,
            device=self.device,
            max_group_rows=0 if self.sharing_limits is None else self.sharing_limits.max_group_rows,
            sample_sizes=decode_sizes(max_num_seqs) if self._use_graphs else (),
        )
        sampler = Sampler(
            max_num_seqs=max_num_seqs,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            device=self.device,
        )
        super().__init__(forward, inputs, sampler, adapters, on_cpu=self.device.type == "cpu")
        self._offloads, self._warm = kv_offload_bytes > 0, False
        self._step_bytes = 0  # that steps take beside what is there, as far as that was measured
        if num_blocks is None:
            num_blocks = self._measure_num_blocks(memory_budget or MemoryBudget(), pool_memory)
        self.num_blocks = num_blocks
        self._kv_caches = self._allocate(num_blocks, pool_memory)
        hold(self._step_bytes, self.device)
        reserve_pinned(self.device)
        self.kernels = chosen_kernels(self._sites, self._kv_caches, self._dtype, max_model_len)
        #: Host memory for blocks that the engine gives up, if `kv_offload_bytes` are to be taken for it.
        self.host_memory = KVOffload(self._kv_caches, kv_offload_bytes) if self._offloads else None
        self._stages.end("KV cache")
        self.fingerprint = partial(fingerprint, loaded.model, self._kv_caches, max_model_len=max_model_len)

    @property
    def fused(self) -> str:
        """Which layers are fused, and why others are not, in words."""
        return str(self._forward.fused)

    def warm_up(self, *, all_graphs: bool = True) -> None:
        """Everything that a first request would have to wait for: kernels exist, steps are recorded. Once. Without
        `all_graphs` a step is recorded when `prepare` comes to it, or when there is one."""
        self._rehearse_all()
        if self._use_graphs and self._graphs is None:
            self._graphs = self._make_graphs(partial(holding, self.device))
            if all_graphs:
                self._graphs.capture()
                self._stages.end("graphs")

    def prepare(self) -> bool:
        """Records one kind of steps more (0.1 s), for moments without requests. False: nothing is to be done now."""
        return self._graphs is not None and self._graphs.record_one()

    def fill_blocks(self, count: int) -> None:
        """Random keys and values in the first `count` blocks after the dummy page; nobody may have them yet."""
        fill(self._kv_caches, count)

    def missing_graphs(self) -> int:
        """Kinds of steps that are not recorded for want of memory."""
        return 0 if self._graphs is None else self._graphs.num_missing

    def _make_graphs(self, around_recordings: Callable[[], AbstractContextManager[None]] = nullcontext) -> StepGraphs:
        return StepGraphs(
            self._logits,
            self._inputs,
            self._graph_shapes(),
            max_model_len=self._max_model_len,
            max_levels=0 if self.sharing_limits is None else self.sharing_limits.max_levels,
            device=self.device,
            adapters=self.adapters,
            around_recordings=around_recordings,
        )

    def _graph_shapes(self) -> list[StepShape]:
        """Where float8 pages are copied only those that a decode kernel serves: no graph knows how many pages a step's
        longest context has."""
        attends = self._forward.attends_in_chains and self._kv_dtype != FP8
        shapes = decode_shapes(self._max_num_seqs, self._max_model_len if attends else 0)
        rows = [site.num_heads // site.num_kv_heads * (self._max_drafts + 1) for site in self._sites]
        copied = self._copied_pages(CHUNKS[-1]) > 0
        if not copied or max(rows) <= DECODE_ROWS:
            shapes += draft_shapes(self._max_num_seqs, self._max_drafts)
        if not copied:
            shapes += chunk_shapes(self._max_num_seqs, self._max_tokens)
        return shapes

    def _rehearse_all(self) -> None:
        """Once."""
        if self._warm:
            return
        rehearsals = Rehearsals(
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_tokens,
            max_model_len=self._max_model_len,
            block_size=self.block_size,
            on_gpu=self.device.type == "cuda",
            shares=self.sharing_limits is not None,
            copied_pages=self._copied_pages(self._max_tokens),
            adapter_slot=NO_ADAPTER if self.adapters is None else self.adapters.limits.max_loras - 1,
        )
        with nullcontext() if self.adapters is None else self.adapters.rehearsing():
            for batch in rehearsals.steps():
                self._rehearse(batch)
        self._warm = True
        self._stages.end("rehearsals")

    def _copied_pages(self, rows: int) -> int:
        return copied_pages(self._sites, self._kv_caches, self._dtype, rows, self._max_model_len)

    def _make_adapter_slots(self, model: PreTrainedModel, lora: LoraLimits) -> AdapterSlots:
        linears = find_linears(model)
        if not linears:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no linear layers that an adapter could change: serve it with "
                "--no-enable-fine-tuning --no-enable-training and without --enable-lora"
            )
        return AdapterSlots(
            linears, lora, max_num_batched_tokens=self._max_tokens, dtype=self._dtype, device=self.device
        )

    def _allocate(self, num_blocks: int, memory: ZeroedMemory | None = None) -> KVCaches:
        return allocate(self._sites, num_blocks, self.block_size, self._kv_dtype, self.device, self._kv_scales, memory)

    def _measure_num_blocks(self, budget: MemoryBudget, memory: ZeroedMemory | None) -> int:
        on_cpu, asked = self.device.type == "cpu", budget.kv_cache_memory_bytes
        pool = cpu_pool_bytes(asked, memory) if on_cpu else self._measure_cuda_pool(budget)
        return count_blocks(
            pool,
            bytes_per_block(self._sites, self.block_size, self._kv_dtype),
            block_size=self.block_size,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
        )

    def _measure_cuda_pool(self, budget: MemoryBudget) -> int:
        """Runs the steps that need most memory on a pool of one page, which every block table names over and over."""
        self._kv_caches = self._allocate(1)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._rehearse_all()
        self._step_bytes = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        outside_torch = total - free - torch.cuda.memory_reserved(self.device)
        peak = outside_torch + torch.cuda.max_memory_allocated(self.device) + self._graph_bytes()
        self._kv_caches = []
        torch.cuda.empty_cache()
        if self._offloads:
            peak += buffer_bytes(bytes_per_block(self._sites, self.block_size, self._kv_dtype))
        return cuda_pool_bytes(budget, total=total, peak=peak)

    def _graph_bytes(self) -> int:
        """What the recorded steps keep: the memory of the largest of them serves the smaller ones."""
        if not self._use_graphs:
            return 0
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        graphs = self._make_graphs()
        graphs.capture(graphs.largest())
        taken = torch.cuda.memory_reserved(self.device) - before
        self._use_graphs = graphs.refusal is None
        graphs.drop()
        return taken

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
