"""Tokens by a race: every token of a law runs for a time E_v / p_v with E_v ~ Exp(1), and the first to arrive is drawn.

The winner is v with probability p_v / Σ p (the Gumbel maximum in another dress). What the race buys is calm: two laws
whose log-probabilities differ by ε choose different tokens with a probability of about ε, while an inverse CDF has as
many borders as tokens and crosses one of them hundreds of times as often. And since the time of each token has an
address of its own, a steered law and its reference can run the same race: where they differ, steering made it so.

In a whole law only tokens above FLOOR run by themselves. All others run as one, with their summed probability, and
should they win, a second race among them alone names the token; its times were not used before, so the law stays exact.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

FLOOR = 2.0**-16  # at most 2¹⁶ tokens run by themselves; on real laws some hundreds, and the others win 1 race in 100
HEAT = 2**15  # entries that are worked on at once on a CPU
OTHERS = -1  # the runner that stands for all tokens below the floor

# SplitMix64 (Steele, Lea and Flood, 2014): the golden ratio's step and the two multipliers, as signed numbers.
GAMMA, FIRST, SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def exponentials(keys: torch.Tensor, tokens: torch.Tensor | int) -> torch.Tensor:
    """E of each token in the race with this key, fp64: SplitMix64 seeded with the key, at the token's place."""
    bits = keys + (tokens + 1) * GAMMA  # integers wrap around, as they should
    bits = (bits ^ _shifted(bits, 30)) * FIRST
    bits = (bits ^ _shifted(bits, 27)) * SECOND
    bits = bits ^ _shifted(bits, 31)
    return _shifted(bits, 11).double().add_(0.5).mul_(2.0**-53).log_().neg_()


def _shifted(bits, places):
    """Shifted to the right with zeros coming in, as if the numbers were unsigned."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


@dataclass(frozen=True)
class Entries:
    """Some entries of a matrix of probabilities (B, V), row by row: what a CPU keeps of laws that are mostly zeros."""

    shape: tuple[int, int]
    rows: torch.Tensor  # (n,) rising
    tokens: torch.Tensor  # (n,)
    mass: torch.Tensor  # (n,)

    @classmethod
    def where(cls, chosen: np.ndarray, probs: torch.Tensor) -> "Entries":
        """Those that `chosen` (B, V) marks. NumPy looks for them three times as fast as PyTorch does."""
        places = torch.from_numpy(np.flatnonzero(chosen))
        mass, rows = probs.reshape(-1)[places], places // probs.shape[1]
        return cls(tuple(probs.shape), rows, places.remainder_(probs.shape[1]), mass)

    def only(self, chosen: torch.Tensor) -> "Entries":
        """Those that `chosen` (n,) marks."""
        return Entries(self.shape, self.rows[chosen], self.tokens[chosen], self.mass[chosen])

    def rows_of(self, block: slice) -> "Entries":
        """Those of some rows that lie side by side."""
        first, last = torch.searchsorted(self.rows, torch.tensor([block.start, block.stop])).tolist()
        shape = block.stop - block.start, self.shape[1]
        return Entries(shape, self.rows[first:last] - block.start, self.tokens[first:last], self.mass[first:last])

    def reweighed(self, probs: torch.Tensor) -> "Entries":
        """What another law (B, V) gives the same tokens, as laws."""
        return Entries(self.shape, self.rows, self.tokens, probs[self.rows, self.tokens]).normalised()

    def normalised(self) -> "Entries":
        """With rows that sum to 1."""
        sums, mass = self.row_sums(), torch.empty_like(self.mass)
        for heat in self._heats():
            mass[heat] = self.mass[heat] / sums[self.rows[heat]]
        return Entries(self.shape, self.rows, self.tokens, mass)

    @classmethod
    def join(cls, parts: list["Entries"]) -> "Entries":
        """The rows of several matrices, one below the other."""
        starts = [0, *itertools.accumulate(part.shape[0] for part in parts)]
        rows = torch.cat([part.rows + start for part, start in zip(parts, starts[:-1], strict=True)])
        tokens, mass = torch.cat([part.tokens for part in parts]), torch.cat([part.mass for part in parts])
        return cls((starts[-1], parts[0].shape[1]), rows, tokens, mass)

    def dense(self) -> torch.Tensor:
        return self.mass.new_zeros(self.shape).index_put_((self.rows, self.tokens), self.mass)

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mass of one token of each row, (B,); 0 where it has no entry."""
        named = self.tokens == tokens[self.rows]
        return self.mass.new_zeros(self.shape[0]).index_add_(0, self.rows[named], self.mass[named])

    def row_sums(self) -> torch.Tensor:
        """(B,) in fp64."""
        sums = torch.zeros(self.shape[0], dtype=torch.float64)
        for heat in self._heats():
            sums.index_add_(0, self.rows[heat], self.mass[heat].double())
        return sums

    def race(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The winner of each row and its time, (B,) each; the time is infinite in a row without entries."""
        first, winners = torch.full((self.shape[0],), torch.inf, dtype=torch.float64), torch.zeros_like(keys)
        for heat in self._heats():
            rows, tokens = self.rows[heat], self.tokens[heat]
            times = exponentials(keys[rows], tokens).div_(self.mass[heat])
            first.scatter_reduce_(0, rows, times, "amin")
            arrived = times == first[rows]
            winners[rows[arrived]] = tokens[arrived]
        return winners, first

    def _heats(self) -> list[slice]:
        """Parts of bounded size: what is made of entries in fp64 takes several times their memory."""
        return [slice(start, start + HEAT) for start in range(0, len(self.rows), HEAT)]


def race(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The winner of each row of whole laws, (B, V) and (B,) keys -> (B,) tokens."""
    if probs.device.type != "cpu":
        return race_with_all_times(probs, keys, FLOOR)
    chosen = probs.numpy() > np.float32(FLOOR)
    if len(probs) > 1 and np.count_nonzero(chosen) > HEAT:  # many rows or flat laws: the two halves, one by one
        half = len(probs) // 2
        return torch.cat([race(probs[:half], keys[:half]), race(probs[half:], keys[half:])])
    likely = Entries.where(chosen, probs)
    winners, first = likely.race(keys)
    others = probs.sum(-1).double() - likely.row_sums()
    for row in torch.nonzero(exponentials(keys, OTHERS) < first * others).view(-1).tolist():
        winners[row] = _first_of_others(probs[row], keys[row], winners[row])
    return winners


def _first_of_others(law: torch.Tensor, key: torch.Tensor, winner: torch.Tensor) -> torch.Tensor:
    """The token that arrives first of those of a law (V,) that do not run by themselves; `winner` if there are none."""
    first = torch.tensor(torch.inf, dtype=torch.float64)
    for start in range(0, len(law), HEAT):
        mass = law[start : start + HEAT]
        times = exponentials(key, torch.arange(start, start + len(mass))).div_(mass)
        time, place = times.masked_fill_(mass > FLOOR, torch.inf).min(-1)
        if time < first:
            first, winner = time, start + place
    return winner


def race_with_all_times(probs: torch.Tensor, keys: torch.Tensor, floor: float = 0.0) -> torch.Tensor:
    """The same with a time for every token: a GPU makes them quickly, and choosing among them would stop it."""
    likely = probs > floor
    times = exponentials(keys[:, None], torch.arange(probs.shape[-1], device=probs.device)).div_(probs)
    first, winners = times.masked_fill(~likely, torch.inf).min(-1)
    time, token = times.masked_fill(likely, torch.inf).min(-1)
    others = probs.masked_fill(likely, 0.0).sum(-1, dtype=torch.float64)
    take = (exponentials(keys, OTHERS) < first * others) & torch.isfinite(time)  # infinite: there are no others
    return torch.where(take, token, winners)
