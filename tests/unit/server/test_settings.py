import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from server.client_settings import ClientSettings
from server.configuration import ConfigurationError, load_settings, unknown_variables
from server.engine.config import EngineConfig
from server.schemas.wire import ModelName
from server.settings import Settings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("LONGWAVE_")]:
        monkeypatch.delenv(name)


def problems(**flags: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as error:
        load_settings(flags)
    assert error.value.exit_code == 3
    return error.value.problems


def test_the_default_is_the_bundled_model_on_localhost() -> None:
    settings = load_settings({})
    assert (settings.model, settings.host, settings.port) == ("SmolLM2-135M-Instruct", "127.0.0.1", 8000)
    assert settings.api_key == ()


def test_all_problems_are_listed_at_once() -> None:
    listed = problems(port=70_000, gpu_memory_utilization=2, block_size=5, kv_cache_dtype="fp4", nonsense=1)
    assert len(listed) == 5
    for name in ("port:", "gpu-memory-utilization:", "block-size:", "kv-cache-dtype:", "nonsense:"):
        assert any(line.startswith(name) for line in listed), name


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        ("", ()),
        ("[]", ()),
        ("*", ("*",)),
        ('["*"]', ("*",)),
        ("https://Chat.example, http://localhost:3000", ("https://chat.example", "http://localhost:3000")),
        (' ["http://[::1]:8080"]', ("http://[::1]:8080",)),
    ],
)
def test_origins_are_a_list_of_vllms_or_between_commas(given: str, origins: tuple[str, ...]) -> None:
    assert load_settings({"allowed_origins": given}).allowed_origins == origins


@pytest.mark.parametrize(
    "given",
    [
        "chat.example",
        "https://chat.example/",
        "https://a.b/c",
        "ws://a.b",
        "null",
        '["https://a.b"',
        "[1]",
        "[[]]",
        "a,,",
    ],
)
def test_what_is_no_origin_of_a_page_is_refused(given: str) -> None:
    assert all(line.startswith("allowed-origins") for line in problems(allowed_origins=given))


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "nvfp4", "int8", ""])
def test_unserved_kv_dtypes_name_what_is_served(dtype: str) -> None:
    (line,) = problems(kv_cache_dtype=dtype)
    assert "auto, bfloat16, float16, float32, fp8, fp8_e4m3" in line


@pytest.mark.parametrize("key", ["", "changeme", "a,,b", "with space", "ta\tb", "ключ", "x" * 513])
def test_empty_and_placeholder_keys_are_refused_without_being_shown(key: str) -> None:
    (line,) = problems(api_key=key)
    assert line.startswith("api-key:")
    if len(key) > 10:
        assert key not in line


def test_one_key_or_several() -> None:
    settings = load_settings({"api_key": "key-1,key-2"})
    assert [key.get_secret_value() for key in settings.api_key] == ["key-1", "key-2"]
    assert "key-1" not in repr(settings)


def test_misspelt_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGWAVE_MAX_MODEL_LENGTH", "5")
    monkeypatch.setenv("LONGWAVE_PORT", "8000")
    assert "LONGWAVE_MAX_MODEL_LENGTH" in unknown_variables()
    assert not {"LONGWAVE_PORT", "LONGWAVE_KERNEL_IMAGE_DIR"} & set(unknown_variables())


def test_a_port_that_kubernetes_has_set_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGWAVE_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ConfigurationError, match=r"port: .* enableServiceLinks: false"):
        load_settings({})
    assert load_settings({"port": 8001}).port == 8001


def test_flags_come_before_variables_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PORT": "9000", "MAX_NUM_SEQS": "8", "BLOCK_SIZE": "32", "API_KEY": "a,b",
                        "ENABLE_PREFIX_CACHING": "false"}.items():  # fmt: skip
        monkeypatch.setenv(f"LONGWAVE_{name}", value)
    settings = load_settings({"port": 9001})
    assert (settings.port, settings.max_num_seqs, settings.block_size) == (9001, 8, 32)
    assert len(settings.api_key) == 2
    assert settings.enable_prefix_caching is False
    assert ClientSettings().key == "a"


@pytest.mark.parametrize("given", ['{"enable_thinking": false, "a": {"b": [1, null]}}', "", "{}"])
def test_variables_of_the_chat_template_are_json(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads(given or "{}")
    assert load_settings({"default_chat_template_kwargs": given}).default_chat_template_kwargs == expected
    monkeypatch.setenv("LONGWAVE_DEFAULT_CHAT_TEMPLATE_KWARGS", given)
    assert load_settings({}).default_chat_template_kwargs == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("enable_thinking=false", "it is no JSON"),
        ('{"a": NaN}', "it is no JSON: NaN is no JSON value"),
        ('{"a": 1, "a": 2}', "it is no JSON: an object has a key twice"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "valid dictionary"),
        ("null", "valid dictionary"),
        ('{"1a": 1}', "should match pattern"),
        ('{"messages": []}', "'messages' is set by the server itself"),
        ('{"a": 1, "eos_token": "x"}', "'eos_token' is set by the server itself"),
        (json.dumps({"a": "x" * 16_384}), "more than 16384 characters and values"),
        (json.dumps({f"v{at}": 1 for at in range(65)}), "at most 64 items"),
        ('{"a": ' + "[" * 9 + "]" * 9 + "}", "nested more than 8 deep"),
    ],
)
def test_what_can_be_no_variables_of_a_chat_template_is_refused(
    given: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = problems(default_chat_template_kwargs=given)
    assert line.startswith("default-chat-template-kwargs:")
    assert said in line
    monkeypatch.setenv("LONGWAVE_DEFAULT_CHAT_TEMPLATE_KWARGS", given)
    assert problems() == [line]


def test_the_engines_own_rules_are_checked_here_too() -> None:
    (line,) = problems(max_num_seqs=4000, max_num_batched_tokens=2048)
    assert line == "max-num-batched-tokens must be at least max-num-seqs"  # by their flags' names


def test_the_engine_gets_every_field_it_shares_with_settings() -> None:
    settings = load_settings({"max_model_len": 100, "num_gpu_blocks_override": 7, "kv_cache_memory_bytes": 2**30})
    config = settings.engine_config()
    for field in dataclasses.fields(EngineConfig):
        if field.name == "enable_lora":
            assert config.enable_lora is settings.serves_adapters is True, "fine-tuned models are adapters"
        elif field.name in Settings.model_fields:
            assert getattr(config, field.name) == getattr(settings, field.name), field.name


def test_adapters_are_served_where_somebody_asked_for_them(tmp_path: Path) -> None:
    nobody = {"enable_fine_tuning": False, "enable_training": False}
    assert not load_settings(nobody).engine_config().enable_lora
    assert load_settings({**nobody, "enable_training": True}).engine_config().enable_lora
    settings = load_settings(
        {"enable_lora": True, "enable_fine_tuning": False, "lora_modules": f"a={tmp_path},b/c=x=y"}
    )
    assert settings.engine_config().enable_lora
    assert settings.lora_folders == {"a": tmp_path, "b/c": Path("x=y").absolute()}


@pytest.mark.parametrize("share", [0, -0.5, 0.009, 1.01, float("nan"), "much"])
def test_training_has_a_share_of_the_time_and_no_more_than_all(share: Any) -> None:
    (line,) = problems(training_gpu_share=share)
    assert line.startswith("training-gpu-share:")


@pytest.mark.parametrize("wanted", [True, False])
def test_trainers_know_whether_jobs_have_to_repeat(wanted: bool) -> None:
    assert load_settings({"fine_tuning_deterministic": wanted}).trainer_config().deterministic is wanted


@pytest.mark.parametrize("share", [0.01, 0.5, 1])
def test_every_trainer_gets_its_share(share: float) -> None:
    settings = load_settings({"training_gpu_share": share})
    assert settings.trainer_config().gpu_share == settings.training_config().gpu_share == share


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"served_model_name": "a,b,a"}, "a name is given twice"),
        ({"model": "/" * 257}, "at most 256 characters; this one has 257: give a shorter name with --served"),
        ({"lora_modules": "a=b"}, "need enable-lora"),
        ({"allow_runtime_lora_updating": True, "lora_dir": "/a"}, "need enable-lora"),
        ({"enable_lora": True, "allow_runtime_lora_updating": True}, "needs lora-dir"),
        ({"enable_lora": True, "lora_modules": "a"}, "is not name=folder"),
        ({"enable_lora": True, "lora_modules": "a="}, "is not name=folder"),
        ({"enable_lora": True, "lora_modules": "=b"}, "is not name=folder"),
        ({"enable_lora": True, "lora_modules": "a b=c"}, "is not name=folder"),
        ({"enable_lora": True, "lora_modules": "a=b,a=c"}, "a name is given twice"),
        ({"enable_lora": True, "lora_modules": "ft:x=b"}, "begins with ft:"),
        ({"enable_lora": True, "lora_modules": "longwave://x=b"}, "begins with ft: or longwave://"),
        ({"enable_lora": True, "lora_modules": "SmolLM2-135M-Instruct=b"}, "is the base model"),
        ({"enable_lora": True, "max_loras": 8, "max_cpu_loras": 4}, "max-cpu-loras must be at least max-loras"),
        ({"prompt_lookup_min": 5}, "prompt-lookup-min must be at least 1 and at most prompt-lookup-max"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, Any], reason: str) -> None:
    (line,) = problems(**flags)
    assert reason in line


@pytest.mark.parametrize("flags", [{"model": "/" * 256}, {"model": "/" * 4096, "served_model_name": "x" * 256}])
def test_a_model_is_served_under_a_name_that_requests_can_give(flags: dict[str, Any]) -> None:
    """Every completion would be refused otherwise."""
    (name,) = load_settings(flags).model_names
    assert TypeAdapter(ModelName).validate_python(name) == name
    with pytest.raises(ValidationError):
        TypeAdapter(ModelName).validate_python(name + "x")


def test_folders_reach_the_engine_as_absolute_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGWAVE_CACHE_DIR", "cache")
    monkeypatch.setenv("LONGWAVE_MODEL_IMAGE_DIR", "/opt/models")
    config = load_settings({}).engine_config()
    assert (config.cache_dir, config.model_image_dir) == (str(tmp_path / "cache"), "/opt/models")
    assert load_settings({"cache_dir": Path("/elsewhere")}).engine_config().cache_dir == "/elsewhere"


def test_an_empty_cache_folder_is_none_and_not_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGWAVE_CACHE_DIR", "")
    assert load_settings({}).engine_config().cache_dir is None


def is_number(annotation: Any) -> bool:
    """Or may be one."""
    return bool({int, float} & {annotation, *get_args(annotation)})


NUMBERS = sorted(name for name, field in Settings.model_fields.items() if is_number(field.annotation))


def test_every_number_is_bounded() -> None:
    assert {"port", "training_gpu_share", "max_model_len", "tpot_target_ms"} <= set(NUMBERS)
    for name in NUMBERS:
        bounds = {type(rule).__name__ for rule in Settings.model_fields[name].metadata}
        assert bounds & {"Ge", "Gt"}, name
        assert bounds & {"Le", "Lt"}, name


@hypothesis_settings(suppress_health_check=list(HealthCheck), max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(NUMBERS), st.one_of(st.integers(), st.floats(), st.text(), st.none())))
@example({"prompt_lookup_min": 5})  # more than prompt_lookup_max
def test_any_configuration_is_accepted_or_refused_with_reasons(flags: dict[str, Any]) -> None:
    names = [name.replace("_", "-") for name in NUMBERS]
    try:
        load_settings(flags)
        problems = None
    except ConfigurationError as error:
        problems = error.problems
    assert problems is None or problems
    assert all(any(name in line for name in names) for line in problems or ())
