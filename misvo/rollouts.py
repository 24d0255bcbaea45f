"""What decoding is asked for and what it gives: the two sides of `misvo.decoding.Engine`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from misvo.head import Shift
from misvo.sampling import RandomStream

# (rollouts, position, hidden states of those rollouts (B, d)) -> vectors to add to them (B, d), or None for none
Intervention = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Request:
    """K rollouts of one prompt. `shift` is Wu, shared by all of them, or `intervene` makes u as decoding goes."""

    prefix: "Prefix"  # noqa: F821 - misvo.policy.Prefix
    stream: RandomStream
    step: int
    rollouts: range
    max_new_tokens: int
    shift: torch.Tensor | Shift | None = None  # T rows of (V,)
    intervene: Intervention | None = None
    keep_scores: bool = True  # the expected rows of the law sampled from: what a score needs
    keep_fisher: str | None = None  # mean law and untruncated expected rows of the "steered" or "reference" law
    pool: torch.Tensor | None = None  # (T, P) weights with which positions share mean laws; None: one law each
    law_dtype: torch.dtype | None = None  # in which mean laws are kept where each position has its own; None: fp32
    keep_hidden: bool = False  # the hidden states themselves: what KL_ref needs


@dataclass
class Rollouts:
    """What decoding a request gave. Everything is zero after a row's end; `lengths` counts tokens with EOS."""

    tokens: torch.Tensor  # (K, T) int64
    lengths: torch.Tensor  # (K,) int64
    kl: torch.Tensor  # (K, T) exact token KL to the reference at each visited prefix, untruncated laws
    logprobs: torch.Tensor  # (K, T) of the sampled token under the steered law, untruncated
    ref_logprobs: torch.Tensor  # (K, T) of the sampled token under the reference law, untruncated
    score_rows: torch.Tensor | None = None  # m of the law sampled from (K, T, d)
    fisher_rows: torch.Tensor | None = None  # m of the untruncated law (K, T, d)
    mean_probs: torch.Tensor | None = None  # p̄ (T, V), or pooled over positions (P, V)
    hidden: torch.Tensor | None = None  # (K, T, d), in the model's precision
    prefix_rewards: torch.Tensor | None = None  # (K, cuts), what the reward says of beginnings; see misvo.credit
    seconds: float = 0.0  # this request's share of the time that decoding took

    @property
    def alive(self) -> torch.Tensor:
        """Which positions hold a token, (K, T) bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def responses(self) -> list[list[int]]:
        """The token ids of each row, up to and with EOS."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]
