"""What benchmarks/faults.py sends to any server: ours refuses each quick fault in OpenAI's shape and goes on."""

import pytest

from benchmarks import faults
from benchmarks.fault_clients import Target
from benchmarks.fault_list import faults as all_faults

from ..conftest import MAX_MODEL_LEN
from ..questions import MODEL
from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_quick_fault_ends_right(server: ServerProcess) -> None:
    target = Target(server.url, MODEL, MAX_MODEL_LEN, server.process)
    quick = [fault for fault in all_faults(faults.SOON_MS) if fault.quick]
    rows = [faults.send(fault, target) for fault in quick]

    assert len(rows) >= 30
    assert [row for row in rows if row["outcome"] != "right" or row["in_openai_shape"] is False] == []
    assert [row["fault"] for row in rows if row["names_field"] is False] == []
    assert sum(row["names_field"] is True for row in rows) >= 17
