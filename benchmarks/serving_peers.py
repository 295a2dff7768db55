"""Which engines can be measured here, and how each is started: its process, environment and flags. Knows no cases."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.serving_child import PORT, Plan
from benchmarks.serving_goals import HTTP, OFFLINE, OURS

ROOT = Path(__file__).resolve().parents[1]
VLLM, SGLANG, TRANSFORMERS = "vllm", "sglang", "transformers"
ENGINES = (OURS, VLLM, SGLANG, TRANSFORMERS)
#: None of them may reach for the network or phone home; vLLM's optional JIT libraries stay off as in its own figures.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
#: What is imported of an engine when it is asked for, and needs all that the engine needs.
LAZY = {VLLM: ("AsyncEngineArgs",)}
#: Where engines keep what they compile: one empty folder instead of them makes a cold start.
CACHES = {
    "LONGWAVE_CACHE_DIR": "longwave",
    "CUPY_CACHE_DIR": "cupy",
    "CUDA_CACHE_PATH": "cuda",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine as it is measured once."""

    engine: str
    variant: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    import_path: str | None = None  # in front of everything else, for an engine installed in a folder of its own

    def prepared(self, plan: Plan) -> Plan:
        """The plan with this engine's arguments and with what its server understands."""
        mine = replace(plan, engine=self.arguments)
        if self.engine != TRANSFORMERS:
            return mine
        no_end = json.dumps({"do_sample": True, "eos_token_id": -1})
        return replace(mine, prompt_format="text", ignore_eos=False, extra_body={"generation_config": no_end})

    def command(self, driver: str, plan: Plan) -> list[str]:
        module = "serving_http" if driver == HTTP else {OURS: "serving_ours", VLLM: "serving_vllm"}[self.engine]
        return [sys.executable, "-P", "-m", f"benchmarks.{module}", plan.to_json()]

    def can_run(self, driver: str) -> bool:
        return driver == HTTP or self.engine in (OURS, VLLM)

    def environment(self, caches: Path | None) -> dict[str, str]:
        """Of its process. `caches`: a folder that replaces all of its caches."""
        given = os.environ.get("PYTHONPATH", "") if self.import_path is None else self.import_path
        path = os.pathsep.join(part for part in (str(ROOT), given) if part)
        moved = {} if caches is None else {name: str(caches / folder) for name, folder in CACHES.items()}
        return {**os.environ, **QUIET, **moved, "PYTHONPATH": path}

    def server_command(self, plan: Plan) -> list[str]:
        """Its OpenAI-compatible server on 127.0.0.1, with PORT in place of the port."""
        length = str(plan.size.max_model_len)
        python = [sys.executable, "-P", "-m"]
        common = ["--host", "127.0.0.1", "--port", PORT]
        match self.engine:
            case "ours":
                known = ["--load-format", plan.load_format, "--dtype", plan.dtype, "--device", plan.device]
                command = [*python, "server", "serve", plan.model, *common, *known, "--max-model-len", length]
                command += ["--queue-timeout", "3600", "--log-level", "warning"]
                command += ["--no-enable-fine-tuning", "--no-enable-training"]
            case "vllm":
                known = ["--load-format", plan.load_format, "--dtype", plan.dtype, "--max-num-seqs", "256"]
                command = [*python, "vllm.entrypoints.cli.main", "serve", plan.model, *common, *known]
                command += ["--max-model-len", length, "--enable-prefix-caching"]
            case "sglang":
                known = ["--load-format", plan.load_format, "--dtype", plan.dtype, "--context-length", length]
                command = [*python, "sglang.launch_server", "--model-path", plan.model, *common, *known]
            case _:
                command = [*python, "transformers.cli.transformers", "serve", plan.model, *common]
                command += ["--continuous-batching", "--dtype", plan.dtype, "--device", plan.device]
        return command + as_flags(self.arguments)


def as_flags(arguments: dict[str, Any]) -> list[str]:
    """{"max_num_seqs": 4, "enforce_eager": true} -> --max-num-seqs 4 --enforce-eager"""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def is_installed(peer: Peer) -> bool:
    """In the peer's own environment; nothing of it is run."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.engine!r}) is None)"
    return _python(peer, look) is None


def import_error(peer: Peer) -> str | None:
    """What its import ends with where a package that it needs is missing, say; None where it does not fail."""
    names = (peer.engine, *(f"{peer.engine}.{name}" for name in LAZY.get(peer.engine, ())))
    return _python(peer, f"import {'; '.join(names)}")


def _python(peer: Peer, code: str) -> str | None:
    """None, or the last line of what the code failed with."""
    run = [sys.executable, "-P", "-c", code]
    done = subprocess.run(run, env=peer.environment(None), check=False, capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stderr.strip() or "it says nothing").splitlines()[-1]


def why_not(peer: Peer, driver: str, plan: Plan) -> str | None:
    """What keeps a peer from being measured; None when nothing does."""
    if peer.engine != OURS and not is_installed(peer):
        return "it is not installed"
    if not peer.can_run(driver):
        return f"it is measured with --driver {HTTP} only"
    if peer.engine == TRANSFORMERS and plan.load_format == "dummy":
        return "it serves no random weights: give --model-shape bundled or --model"
    if peer.engine in (VLLM, SGLANG) and plan.device == "cpu":
        return "it is measured on a GPU only"
    if peer.engine != OURS and (error := import_error(peer)) is not None:
        return f"it cannot be imported: {error}"
    return None


__all__ = ["ENGINES", "HTTP", "OFFLINE", "OURS", "SGLANG", "TRANSFORMERS", "VLLM", "Peer", "as_flags", "why_not"]
