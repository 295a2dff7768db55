import time

from models.stages import Stages


def test_stages_follow_each_other_without_gaps() -> None:
    begin = time.monotonic()
    stages = Stages(begin)
    for name in ("weights", "graphs", "weights"):
        stages.end(name)
    assert list(stages.seconds) == ["weights", "graphs"]
    assert all(seconds >= 0 for seconds in stages.seconds.values())
    assert 0 <= sum(stages.seconds.values()) <= time.monotonic() - begin


def test_stages_are_written_with_tenths_of_seconds() -> None:
    stages = Stages()
    stages.seconds = {"weights": 1.26, "graphs": 0.04}
    assert str(stages) == "weights 1.3, graphs 0.0"
