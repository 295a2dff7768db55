"""Before a model learns: packed sequences through our attention and head give what each gives alone, in eager.

Knows no loss. What would be silently wrong (a family's own head, state that crosses sequences) is refused here.
"""

import torch

from models.attention_sites import attention_implementation
from models.patching import UnsupportedModelError
from models.training import packing
from models.training.examples import Example
from models.training.trainable import TrainableModel

_LENGTHS = (13, 45, 6)
#: Largest relative error of a row's logits (L2), averaged over rows: a mixture of experts may flip single rows.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def check_packed_path(model: TrainableModel) -> None:
    """Raises UnsupportedModelError when the two disagree."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    prompts = [tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()) for n in _LENGTHS]
    examples = [Example(prompt, (True,) * len(prompt)) for prompt in prompts]
    batch = packing.build(examples, tuple(range(len(examples))), model.device)
    model.measure(packing.build(examples[-1:], (0,), model.device))
    with model.evaluating():
        ours = model.head(model.hidden(batch)).float().split(_LENGTHS)
        with attention_implementation(model.base, "eager"):
            for prompt, logits in zip(prompts, ours, strict=True):
                ids = torch.tensor([prompt], device=model.device)
                expected = model.base(input_ids=ids, use_cache=False).logits[0].float()
                error = ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).mean().item()
                if not error <= _TOLERANCE[model.base.dtype]:  # NaN fails too
                    raise UnsupportedModelError(
                        f"{type(model.base).__name__} fails the self-test: packed for training its logits differ from "
                        f"eager attention's by {error:.2g} (relative), more than {_TOLERANCE[model.base.dtype]:g}"
                    )
