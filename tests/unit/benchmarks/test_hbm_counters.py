"""Reading ncu's output without a GPU: units, launches, markers, and what is said when the counters cannot be read."""

import sys
from pathlib import Path

import pytest

from benchmarks.hbm_counters import CountersUnavailableError, Launch, assign, command, in_bytes, launches, measure

# As `ncu --csv` prints it, a row per launch and metric; --print-units base would give byte throughout.
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def line(launch: int, kernel: str, metric: str, unit: str, value: str) -> str:
    return (
        f'"{launch}","4242","python3.12","127.0.0.1","{kernel}","1","7","(384, 1, 1)","(128, 16, 1)","0","9.0",'
        f'"Command line profiler metrics","dram__bytes_{metric}.sum","{unit}","{value}"'
    )


def both(launch: int, kernel: str, read: str, write: str, unit: str = "byte") -> list[str]:
    return [line(launch, kernel, "read", unit, read), line(launch, kernel, "write", unit, write)]


def output(*rows: str) -> str:
    before = [
        "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        '==PROF== Profiling "spin_kernel" - 0: 0%....',
    ]
    return "\n".join([*before, HEADER, *rows, "==PROF== Disconnected from process 4242"]) + "\n"


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        ("67,108,864", "byte", 67_108_864),
        ("1.5", "Kbyte", 1_500),
        ("134.27", "Mbyte", 134_270_000),
        ("2.1", "Gbyte", 2_100_000_000),
        ("12", "B", 12),
        ("3", "MB", 3_000_000),
        ("0", "byte", 0),
    ],
)
def test_every_unit_that_ncu_prints_is_bytes(value: str, unit: str, expected: int) -> None:
    assert in_bytes(value, unit) == pytest.approx(expected)


@pytest.mark.parametrize(("value", "unit"), [("n/a", "byte"), ("", "byte"), ("5", "%"), ("5", ""), ("nan", "byte")])
def test_what_is_no_number_of_bytes_is_refused(value: str, unit: str) -> None:
    with pytest.raises(CountersUnavailableError):
        in_bytes(value, unit)


def test_launches_are_read_between_the_profilers_own_lines() -> None:
    rows = [*both(0, SPIN, "64", "0"), *both(1, "void gemm<float, 128>(int, float*)", "1.25", "0.5", "Mbyte")]

    assert launches(output(*rows)) == [Launch(SPIN, 64, 0), Launch("void gemm<float, 128>(int, float*)", 1.25e6, 5e5)]


def test_launches_past_nine_keep_their_order() -> None:
    rows = [row for i in range(12) for row in both(i, f"kernel_{i}", str(i), "0")]

    assert [launch.read for launch in launches(output(*rows))] == list(range(12))


def test_output_without_a_table_says_what_ncu_said() -> None:
    with pytest.raises(CountersUnavailableError, match="ERR_NVGPUCTRPERM"):
        launches("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Counters")


def test_a_table_of_other_columns_is_refused() -> None:
    with pytest.raises(CountersUnavailableError, match="Metric Unit"):
        launches('"ID","Kernel Name","Metric Name","Metric Value"\n"0","k","dram__bytes_read.sum","1"\n')


def test_a_launch_with_one_counter_is_refused() -> None:
    with pytest.raises(CountersUnavailableError, match="gemm"):
        launches(output(line(0, "gemm", "read", "byte", "1")))


def test_a_call_is_what_lies_between_its_markers_and_what_it_left_in_the_l2() -> None:
    probes = [
        Launch(SPIN, 1, 1),
        Launch("matmul", 100, 10),
        Launch("softmax", 200, 20),
        Launch(SPIN, 1, 1),
        Launch("reduce", 5000, 7),  # reads the flushed buffer: not the call's; writes back what the call left
        Launch("reduce", 1, 0),
        Launch(SPIN, 1, 1),
        Launch("flash", 40, 4),
        Launch(SPIN, 1, 1),
        Launch("reduce", 5000, 3),
    ]

    first, second = assign(probes, 2)

    assert (first.read, first.write, first.total, first.kernels) == (300, 37, 337, 2)
    assert (second.read, second.write, second.kernels) == (40, 7, 1)


def test_markers_that_do_not_fit_the_probes_are_refused() -> None:
    with pytest.raises(CountersUnavailableError, match="2 markers for 2 probes"):
        assign([Launch(SPIN, 0, 0), Launch("a", 1, 1), Launch(SPIN, 0, 0), Launch("b", 1, 1)], 2)


def test_a_call_that_launched_nothing_is_refused() -> None:
    with pytest.raises(CountersUnavailableError, match="without kernels"):
        assign([Launch(SPIN, 0, 0), Launch(SPIN, 0, 0), Launch("reduce", 1, 1)], 1)


def test_the_command_leaves_clocks_and_caches_alone() -> None:
    words = command("ncu", ["hopper:4096:full"])

    assert words[words.index("--clock-control") + 1] == words[words.index("--cache-control") + 1] == "none"
    assert words[words.index("--metrics") + 1] == "dram__bytes_read.sum,dram__bytes_write.sum"
    assert words[words.index("--profile-from-start") + 1] == "off"
    assert words[-1] == "hopper:4096:full"
    assert Path(words[-2]).is_file()


def test_a_missing_ncu_is_said() -> None:
    with pytest.raises(CountersUnavailableError, match="no-such-ncu is not there"):
        measure(["hopper:4096:full"], ncu="no-such-ncu")


def fake_ncu(folder: Path, body: str) -> str:
    """A program in ncu's place."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_failing_ncu_is_said_with_its_last_words(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, "print('==ERROR== LibraryNotLoaded')\nraise SystemExit(9)")

    with pytest.raises(CountersUnavailableError, match=r"(?s)ended with 9.*LibraryNotLoaded"):
        measure(["hopper:4096:full"], ncu)


def test_an_ncu_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(CountersUnavailableError, match="not done in 1 s"):
        measure(["hopper:4096:full"], fake_ncu(tmp_path, "import signal\nsignal.pause()"), timeout_s=1.0)


def test_bytes_come_back_by_probe(tmp_path: Path) -> None:
    rows = [row for i, name in enumerate([SPIN, "flash", SPIN, "reduce"]) for row in both(i, name, "10", "2")]
    ncu = fake_ncu(tmp_path, f"print({output(*rows)!r})")

    found = measure(["hopper:4096:full"], ncu)

    assert {probe: (b.read, b.write) for probe, b in found.items()} == {"hopper:4096:full": (10, 4)}
