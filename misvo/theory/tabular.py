"""A language model small enough to enumerate: every law, expectation and divergence is a finite sum.

The hidden state is a table with one row per prefix, so h_t(y_<t) is an arbitrary function of the prefix, as
in Section 2 of the paper. Prefixes and sequences stand in lexicographic order, so that summing over
continuations is a reshape and not a search.

Left out: prompts (one policy is one prompt), EOS (the paper fixes the horizon T), temperature and top-p.

Positions count from 0 here and from 1 in the paper. `u` has shape (..., T, d) and may be complex: the
complex-step derivatives of `misvo.theory.derivatives` go through these very definitions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def log_partition(z: np.ndarray) -> np.ndarray:
    """A(z) = log Σ exp z over the last axis; the shift is real, so it stays analytic for complex z."""
    shift = z.real.max(-1, keepdims=True)
    return shift[..., 0] + np.log(np.exp(z - shift).sum(-1))


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - log_partition(z)[..., None]


def kl_divergence(log_q: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """KL(q ‖ p) over the last axis, by definition."""
    return (np.exp(log_q) * (log_q - log_p)).sum(-1)


@dataclass(frozen=True)
class TabularPolicy:
    head: np.ndarray  # W (V, d)
    bias: np.ndarray  # b (V,)
    hidden: tuple[np.ndarray, ...]  # hidden[t] (V**t, d): a row for each prefix of length t

    @classmethod
    def random(
        cls, rng: np.random.Generator, vocabulary: int, horizon: int, width: int, spread: float = 1.0
    ) -> TabularPolicy:
        """Gaussian W, b and hidden states; `spread` scales W, so that laws run from flat to peaked."""
        head = spread * rng.normal(size=(vocabulary, width))
        bias = 0.5 * rng.normal(size=vocabulary)
        hidden = tuple(rng.normal(size=(vocabulary**t, width)) for t in range(horizon))
        return cls(head, bias, hidden)

    @property
    def vocabulary(self) -> int:
        return self.head.shape[0]

    @property
    def width(self) -> int:
        return self.head.shape[1]

    @property
    def horizon(self) -> int:
        return len(self.hidden)

    @property
    def sequences(self) -> int:
        return self.vocabulary**self.horizon

    @property
    def zero(self) -> np.ndarray:
        """The steering of the reference policy."""
        return np.zeros((self.horizon, self.width))

    def tokens(self) -> np.ndarray:
        """Every sequence, in order: (V**T, T)."""
        shape = (self.vocabulary,) * self.horizon
        return np.stack(np.unravel_index(np.arange(self.sequences), shape), axis=-1)

    def prefix_of(self, sequence: np.ndarray, t: int) -> np.ndarray:
        """The index of the length-t prefix of each sequence index."""
        return sequence // self.vocabulary ** (self.horizon - t)

    def logits(self, t: int) -> np.ndarray:
        """Reference logits W h + b after every prefix of length t: (V**t, V)."""
        return self.hidden[t] @ self.head.T + self.bias

    def token_log_laws(self, u: np.ndarray) -> list[np.ndarray]:
        """log π_u(· | prefix) = log softmax(W(h + u_t) + b) for each t: (..., V**t, V)."""
        shift = u @ self.head.T  # (..., T, V)
        return [log_softmax(self.logits(t) + shift[..., t, None, :]) for t in range(self.horizon)]

    def token_laws(self, u: np.ndarray) -> list[np.ndarray]:
        return [np.exp(log_law) for log_law in self.token_log_laws(u)]

    def log_factors(self, u: np.ndarray) -> np.ndarray:
        """log π_u(y_t | y_<t) of every sequence and position: (..., V**T, T)."""
        columns = []
        for t, log_law in enumerate(self.token_log_laws(u)):
            flat = log_law.reshape(*log_law.shape[:-2], -1)  # (..., V**(t+1))
            columns.append(np.repeat(flat, self.vocabulary ** (self.horizon - t - 1), axis=-1))
        return np.stack(columns, axis=-1)

    def sequence_log_law(self, u: np.ndarray) -> np.ndarray:
        """log π_u(y): (..., V**T)."""
        return self.log_factors(u).sum(-1)

    def sequence_law(self, u: np.ndarray) -> np.ndarray:
        return np.exp(self.sequence_log_law(u))

    def prefix_laws(self, u: np.ndarray) -> list[np.ndarray]:
        """π_u(y_<t) for each t, by marginalising the sequence law: (..., V**t)."""
        law = self.sequence_law(u)
        return [law.reshape(*law.shape[:-1], self.vocabulary**t, -1).sum(-1) for t in range(self.horizon)]

    def sequence_kl(self, u: np.ndarray) -> np.ndarray:
        """KL(π_u ‖ π_ref) over whole sequences, by definition and not by the chain rule."""
        return kl_divergence(self.sequence_log_law(u), self.sequence_log_law(self.zero))

    def token_kls(self, u: np.ndarray) -> list[np.ndarray]:
        """KL(π_u(· | prefix) ‖ π_ref(· | prefix)) by definition: (..., V**t) for each t."""
        pairs = zip(self.token_log_laws(u), self.token_log_laws(self.zero), strict=True)
        return [kl_divergence(steered, reference) for steered, reference in pairs]

    def sample(self, u: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` rollouts of π_u, one token after another by inverse CDF: (count, T)."""
        prefix = np.zeros(count, dtype=int)
        rollouts = np.empty((count, self.horizon), dtype=int)
        for t, law in enumerate(self.token_laws(u)):
            cdf = law.cumsum(-1)[prefix]  # (count, V)
            draw = rng.random((count, 1)) * cdf[:, -1:]  # the sum may miss 1 by rounding
            rollouts[:, t] = (draw >= cdf).sum(-1)
            prefix = prefix * self.vocabulary + rollouts[:, t]
        return rollouts
