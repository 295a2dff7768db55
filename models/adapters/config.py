"""adapter_config.json -> each layer's rank and scaling. What would change the mathematics and is not served is refused.

Fields and meanings: peft.LoraConfig. A field that is not known here may only say nothing (null, false, empty).
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

from models.errors import AdapterError

#: How training began, where to apply it (the weights' names say where it was), and remarks.
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
READ = {
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "use_rslora",
}
#: The other ways of starting (pissa, olora, corda, loftq, lora_ga, ...) change the base model's weights as well.
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
#: Names and anchors: patterns come from outside, and one with quantifiers can take for ever to match.
_PLAIN_PATTERN = re.compile(r"[\w.^$\\]{1,512}")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Rank r and alpha, as given for all layers or for some by pattern."""

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    base_model: str | None

    def rank(self, module: str) -> int:
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """alpha / r (Hu et al. 2021), or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023)."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(text: bytes) -> LoraConfig:
    """Raises AdapterError, which names the first field that is wrong or not served."""
    try:
        fields = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"adapter_config.json is no JSON: {error!s:.200}") from None
    if not isinstance(fields, dict):
        raise AdapterError("adapter_config.json holds no object")
    if fields.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {_shown(fields.get('peft_type'))}: only LORA adapters are served")
    if fields.get("bias", "none") != "none":
        raise AdapterError(f"bias is {_shown(fields['bias'])}: adapters that change biases are not served")
    start = fields.get("init_lora_weights", True)
    if not any(start is known or (isinstance(start, str) and start == known) for known in STARTS):
        raise AdapterError(
            f"init_lora_weights is {_shown(start)}: adapters whose start changed the base model's weights are not "
            "served (PEFT can convert them: save_pretrained(path_initial_model_for_weight_conversion=...))"
        )
    for name, value in fields.items():
        if name not in HARMLESS | READ and value not in (None, False, [], {}):
            raise AdapterError(f"{name!s:.100} is {_shown(value)}: only plain LoRA on linear layers is served")
    base = fields.get("base_model_name_or_path")
    return LoraConfig(
        r=_rank(fields.get("r"), "r"),
        alpha=_alpha(fields.get("lora_alpha"), "lora_alpha"),
        use_rslora=_flag(fields.get("use_rslora")),
        rank_pattern={key: _rank(value, "rank_pattern") for key, value in _patterns(fields, "rank_pattern")},
        alpha_pattern={key: _alpha(value, "alpha_pattern") for key, value in _patterns(fields, "alpha_pattern")},
        base_model=base[:4096] if isinstance(base, str) else None,
    )


def _matching(patterns: dict[str, Any], module: str) -> str:
    """As peft.utils.get_pattern_key: the first pattern that the module's name ends in."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _patterns(fields: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{name} is {_shown(patterns)}, not an object")
    for key in patterns:
        try:
            plain = _PLAIN_PATTERN.fullmatch(key) and re.compile(key)
        except re.error:
            plain = None
        if not plain:
            raise AdapterError(f"{name} has the key {_shown(key)}: only names of modules, ^ and $ are read")
    return list(patterns.items())


def _rank(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{name} is {_shown(value)}, not a rank")
    return value


def _alpha(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise AdapterError(f"{name} is {_shown(value)}, not a number")
    return float(value)


def _flag(value: Any) -> bool:
    if value not in (None, True, False):
        raise AdapterError(f"use_rslora is {_shown(value)}, neither true nor false")
    return bool(value)


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.100}"
