"""Logits to tokens, batched: penalties, filters, seeded noise, log probabilities. Knows no model and no text."""

from models.sampling.launched import LaunchedSample
from models.sampling.prompt_scores import PromptScores
from models.sampling.sampler import Sampler

__all__ = ["LaunchedSample", "PromptScores", "Sampler"]
