"""What `longwave doctor` prints in a terminal."""

import pytest

from server.diagnosis import Diagnosis, print_diagnosis

ADVICE = "install longwave[cuda]"


def test_brackets_are_printed_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = Diagnosis(
        longwave="0.1.0",
        python="3.12",
        packages={"cupy-cuda13x": ADVICE},
        cuda={"NVRTC": ADVICE},
        gpus=[],
        cache={"state": ADVICE},
        kernels=[ADVICE],
        model="tiny",
        layers=[],
        fused=ADVICE,
        adapters={"LoRA": ADVICE},
        servable=True,
        problems=[ADVICE],
    )

    print_diagnosis(diagnosis)

    assert capsys.readouterr().out.count(ADVICE) == 7
