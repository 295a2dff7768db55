"""Which modules are a model's decoder layers: by their names, of any family."""

from torch import nn


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The members of the decoder's lists, and not those of lists within them (experts, for example)."""
    found = []
    for name, module in decoder.named_modules():
        *parents, last = name.split(".")
        if last.isdecimal() and not any(part.isdecimal() for part in parents):
            found.append(module)
    return found
