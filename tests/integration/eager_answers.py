"""The truth of the integration tests: transformers' own `generate` with eager attention in float32. No code of ours."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

#: Below this gap between the two likeliest tokens, another order of float32 sums could choose the other one.
CLEAR_MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    token_ids: list[int]
    logprobs: list[float]  # of each chosen token
    num_prompt_tokens: int
    finish_reason: str


class EagerAnswers:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()
        self._known: dict[tuple[str, int], Answer] = {}

    def chat(self, question: str, max_tokens: int) -> Answer:
        """The greedy answer to one user message. Asserts that the question is a fair one: no near-tie on the way."""
        key = (question, max_tokens)
        if key not in self._known:
            self._known[key] = self._generate(question, max_tokens)
        return self._known[key]

    @torch.inference_mode()
    def log_probabilities(self, token_ids: list[int]) -> torch.Tensor:
        """Of every token at each place after the first: `[len(token_ids) - 1, vocab_size]`."""
        logits = self._model(torch.tensor([token_ids])).logits[0, :-1]
        return torch.Tensor(logits.log_softmax(-1))

    @torch.inference_mode()
    def _generate(self, question: str, max_tokens: int) -> Answer:
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = self._model.generate(
            **prompt, max_new_tokens=max_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        length = prompt["input_ids"].shape[1]
        token_ids = output.sequences[0, length:].tolist()
        logits = torch.cat(output.logits)  # [num_new_tokens, vocab_size]
        best = logits.topk(2).values
        margin = (best[:, 0] - best[:, 1]).min().item()
        assert margin > CLEAR_MARGIN, f"{question!r} is a near-tie (margin {margin:.1e}): choose another question"
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
        stopped = token_ids[-1] == self.tokenizer.eos_token_id
        return Answer(
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
            token_ids=token_ids,
            logprobs=logprobs,
            num_prompt_tokens=length,
            finish_reason="stop" if stopped else "length",
        )
