"""Which linear layers of a model LoRA learns, in PEFT's terms. Knows no rank and no plan."""

from collections.abc import Collection, Iterable, Iterator, Set
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from models.adapters import find_linears
from models.training.errors import PlanError

#: Names of modules that send rows to experts: where one of them is linear layers inside, these do not learn.
_ROUTERS = frozenset({"gate", "router"})


def peft_targets(base: PreTrainedModel, wanted: tuple[str, ...] | None) -> dict[str, Any]:
    """Those that the server can adapt, as fields of PEFT's LoraConfig; of them the ones of these (last) names.

    Raises PlanError for a name that none of them has.
    """
    linears = {name: layer for name, layer in find_linears(base).items() if _ROUTERS.isdisjoint(name.split(".")[:-1])}
    names = {name.rpartition(".")[2] for name in linears}
    names -= set(_names_of_experts(base, names))
    if not names:
        raise PlanError(f"{type(base).__name__} has no linear layers that LoRA could adapt: tune it fully")
    chosen = chosen_targets("lora.target_modules", wanted, names)
    # PEFT goes by the ends of names, which experts and towers may share with the layers.
    others = [name for name, _ in base.named_modules() if name.rpartition(".")[2] in chosen and name not in linears]
    return {
        "target_modules": sorted(chosen),
        "exclude_modules": others or None,
        "fan_in_fan_out": any(isinstance(layer.module, Conv1D) for layer in linears.values()),  # GPT-2
    }


def chosen_targets(field: str, wanted: Collection[str] | None, names: Set[str]) -> Set[str]:
    """Those of `names` that are wanted, all of them with None. Raises PlanError for others; `field` says where."""
    if unknown := sorted(set(wanted or ()) - names):
        raise PlanError(
            f"{field}: the decoder layers have no linear {', '.join(unknown)} that LoRA could adapt; "
            f"they have {', '.join(sorted(names))}"
        )
    return names if wanted is None else set(wanted)


def _names_of_experts(base: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """In families whose experts were linear layers of these names before transformers 5, PEFT means the experts'
    parameters of today by them, whatever else is called so (dense layers, shared experts): what it trains then is no
    linear layer, and cannot be served."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
    except ImportError:  # before PEFT knew of that
        return
    for name in names:
        config: Any = LoraConfig(target_modules=[name])
        try:
            convert(config, base, None)
        except ValueError:  # with others alone, which have become one parameter with it
            yield name
        else:
            if config.target_parameters:
                yield name
