"""What ncu runs for hbm_counters.py: each probe's call once, between markers, with a cold L2.

    python benchmarks/hbm_probe.py METHOD:SEQLEN:MASK ...        (such as hopper:4096:full)

Every call runs once before, unprofiled: what is compiled, loaded and allocated is not what is counted.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks.roofline_methods import METHODS, random_tensors
from benchmarks.roofline_ours import Call

_FLUSH_BYTES = 512 * 1024 * 1024  # several times any L2


def prepare(probe: str, device: torch.device) -> Call:
    """The probe's call. Raises ValueError for what is no probe."""
    name, seqlen, mask = probe.split(":")
    if name not in METHODS or mask not in ("full", "causal"):
        raise ValueError(f"{probe!r} is no probe: METHOD:SEQLEN:full or METHOD:SEQLEN:causal")
    shape = METHODS[name].shape(int(seqlen), mask == "causal")
    return METHODS[name].make(shape, random_tensors(shape, device))


def profile(call: Call, flushed: torch.Tensor) -> None:
    """Reading `flushed` leaves nothing of it to be written back, unlike writing it."""
    call()
    flushed.sum()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    out = call()
    torch.cuda._sleep(1)
    flushed.sum()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    del out


def main(probes: list[str]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    flushed = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    for probe in probes:
        profile(prepare(probe, device), flushed)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
