"""When requests are sent: the gaps of an arrival process. Pure; knows no requests and no clock."""

import math
import random
from typing import Literal, get_args

ArrivalProcess = Literal["constant", "poisson", "gamma"]
ARRIVAL_PROCESSES: tuple[ArrivalProcess, ...] = get_args(ArrivalProcess)


def send_times(
    count: int, rate: float, process: ArrivalProcess, burstiness: float, generator: random.Random
) -> list[float]:
    """Seconds from the beginning at which each of `count` requests is sent, ascending, the first at 0.

    `rate` is requests a second; `inf` sends everything at once. Gaps of `gamma` have shape `burstiness` and mean
    1 / rate (1 is Poisson, smaller is burstier), as in vLLM's benchmark. Raises ValueError.
    """
    if not rate > 0:
        raise ValueError(f"a request rate is above 0, not {rate}")
    if process == "gamma" and not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValueError(f"burstiness is above 0 and finite, not {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        match process:
            case "constant":
                now += 1 / rate
            case "poisson":
                now += generator.expovariate(rate)
            case "gamma":
                now += generator.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
