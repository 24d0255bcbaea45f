"""What decoding is asked for and what it gives: plain data, the same for every engine and across processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch

from misvo.adapter import Adapter
from misvo.far import Far
from misvo.interventions import Intervention
from misvo.sampling import Sampler

Law = Literal["steered", "reference"]


@dataclass(frozen=True)
class Keep:
    """What is to be recorded beside tokens, log-probabilities and KLs."""

    scores: bool = False  # the expected head rows of the law sampled from: what a gradient of the reward needs
    fisher: Law | None = None  # mean law and untruncated expected rows of one of the laws
    pool: torch.Tensor | None = None  # (T, P) weights with which positions share mean laws; None: one law each
    law_dtype: torch.dtype | None = None  # in which mean laws are kept where each position has its own; None: fp32
    hidden: bool = False  # the hidden states themselves: what budgets, KL_ref and value networks need


@dataclass(frozen=True)
class Request:
    """K rollouts of one prompt under one intervention; random numbers are those of (seed, prompt, step, rollout).

    A rollout may have a beginning: tokens behind the prompt that it goes on from. It then draws what it would have
    drawn had it come to these tokens by itself, and nothing is recorded of them.
    """

    prompt: tuple[int, ...]  # token ids
    seed: int
    step: int
    rollouts: Sequence[int]  # by their numbers
    max_new_tokens: int  # with the tokens of a beginning
    sampler: Sampler = field(default_factory=Sampler)
    intervention: Intervention | None = None  # None: the reference policy
    keep: Keep = field(default_factory=Keep)
    stop: tuple[str, ...] = ()  # texts that end a response, where they stand in it
    anchored: bool = False  # cut the steered law where the reference is cut, and record the log-ratio of the two
    beginnings: tuple[tuple[int, ...], ...] = ()  # of each rollout; none: all of them begin behind the prompt
    resumable: bool = False  # rows that are cut off will be continued: an engine does well to keep what it read

    def beginning(self, row: int) -> tuple[int, ...]:
        return self.beginnings[row] if self.beginnings else ()

    adapter: Adapter | None = None  # low-rank weights, on engines that say `adapts`; None: the model as it is


@dataclass
class Rollouts:
    """What decoding a request gave. Everything is zero after a row's end; `lengths` counts tokens with EOS."""

    tokens: torch.Tensor  # (K, T) int64
    lengths: torch.Tensor  # (K,) int64
    kl: torch.Tensor  # (K, T) exact token KL to the reference at each visited prefix, untruncated laws
    logprobs: torch.Tensor  # (K, T) of the sampled token under the steered law, untruncated
    ref_logprobs: torch.Tensor  # (K, T) of the sampled token under the reference law, untruncated
    ended: torch.Tensor | None = None  # (K,) bool, whether a row ended by itself and was not cut off
    changed: torch.Tensor | None = None  # (K, T) bool, where the reference law draws another token from the same race
    score_rows: torch.Tensor | None = None  # m of the law sampled from (K, T, d)
    fisher_rows: torch.Tensor | None = None  # m of the untruncated law (K, T, d)
    mean_probs: torch.Tensor | Far | None = None  # p̄ (T, V), or pooled over positions (P, V); far with fisher_rows
    hidden: torch.Tensor | Far | None = None  # (K, T, d), of the model as it is, in its precision
    squares: torch.Tensor | None = None  # (K, T) ‖u‖² where each row has a vector of its own
    log_ratios: torch.Tensor | None = (
        None  # (K, T) log π_ref/π of the sampled token, truncated laws; of anchored requests
    )
    drawn: int = 0  # tokens that were sampled: beginnings are not, and what was dropped on the way is
    seconds: float = 0.0  # this request's share of the time that decoding took
    prefill_seconds: float = 0.0  # what reading its prompt took, where this was the first to ask for it

    def __repr__(self) -> str:
        kept = [one.name for one in fields(self) if isinstance(getattr(self, one.name), torch.Tensor)]
        return f"Rollouts({', '.join(f'{name} {_shape(getattr(self, name))}' for name in kept)})"

    @property
    def alive(self) -> torch.Tensor:
        """Which positions hold a token, (K, T) bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def states(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The hidden states at these places, (n, d), also where they stayed with the engine."""
        if isinstance(self.hidden, Far):
            return self.hidden.run(_states, rows, positions)
        assert self.hidden is not None
        return self.hidden[rows, positions]

    def states_of(self, rows: list[int]) -> list[torch.Tensor]:
        """The hidden states of each of these rows, (length, d)."""
        lengths = [self.lengths[row].item() for row in rows]
        if not rows:
            return []
        positions = torch.cat([torch.arange(length) for length in lengths])
        return list(self.states(torch.tensor(rows).repeat_interleave(torch.tensor(lengths)), positions).split(lengths))

    def chosen(self, rows: torch.Tensor) -> "Rollouts":
        """Some of these rows, in this order."""
        return self._changed(lambda tensor: tensor[rows.to(tensor.device)])

    def widened(self, width: int) -> "Rollouts":
        """The same with room for so many positions."""

        def pad(tensor):
            if tensor.dim() == 1:
                return tensor
            return torch.cat([tensor, tensor.new_zeros(len(tensor), width - tensor.shape[1], *tensor.shape[2:])], 1)

        return self._changed(pad)

    def continued(self, block: "Rollouts", going_on: torch.Tensor, start: int) -> "Rollouts":
        """With what was decoded from position `start` on: rows `going_on` (n,) of these are the n rows of `block`."""
        end, rows = block.tokens.shape[1], self._changed(torch.clone)
        for name, new in block._tensors().items():
            whole = getattr(rows, name)
            if whole.dim() == 1:
                whole[going_on.to(whole.device)] = new
            else:
                whole[going_on.to(whole.device), start:end] = new[:, start:]
        added = {name: getattr(rows, name) + getattr(block, name) for name in ("drawn", "seconds", "prefill_seconds")}
        return replace(rows, **added)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What has a row for each rollout; laws that rows share have not."""
        kept = ((one.name, getattr(self, one.name)) for one in fields(self) if one.name != "mean_probs")
        return {name: value for name, value in kept if isinstance(value, torch.Tensor)}

    def _changed(self, change) -> "Rollouts":
        changed = {name: change(value) for name, value in self._tensors().items()}
        return replace(self, **{**changed, "mean_probs": None})

    def responses(self) -> list[list[int]]:
        """The token ids of each row, up to and with EOS."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]


def _states(_, rollouts: Rollouts, rows, positions) -> torch.Tensor:
    return rollouts.states(rows, positions)


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape))
