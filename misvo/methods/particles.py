"""Particles: sequential Monte Carlo toward q ∝ π_ref·exp(R/λ), for rewards that are sparse or made of parts.

K rows are written side by side. At every pause each row is worth what its beginning promises (`misvo.potential`); what
it has gained since the last pause is its weight, exp((r_j − r_{j−1})/λ), and rows are drawn again by these weights, so
that good beginnings are continued more often. The gains add up to the reward, so whatever beginnings promise, the
weighted rows of a round follow q as K grows, and the product of the mean weights estimates Z = E_ref[exp(R/λ)].

λ is `penalty`; without one it is set at every pause so that `target_ess` rows count, and no unit of the reward is left.
With `proposal="steered"` a policy that learns from the survivors writes the rows, and weights hold its log-ratio too.
"""

import math
from dataclasses import dataclass, field

import torch

from misvo.methods.pausing import Pausing
from misvo.sampling import RandomStream
from misvo.weights import effective_sample_size, log_weights, systematic, temperature_for

MOST_NATS = 5.0  # between the best and the worst at a pause: where many are equally good, others are not wiped out


@dataclass
class _Cloud:
    """The rows of a round under way."""

    promised: torch.Tensor  # (K,) at the last pause
    ratios: torch.Tensor  # (K,) log π_ref/π of all that was written until then
    gathered: torch.Tensor  # (K,) the logarithms of the weights that led to each row
    first: torch.Tensor  # (K,) the row that each descends from
    log_z: float = 0.0
    temperature: float = 0.0
    sizes: list[float] = field(default_factory=list)  # effective sample sizes


class Particles(Pausing):
    def __init__(self, context):
        super().__init__(context)
        self._clouds: dict[int, _Cloud] = {}
        self._widest = 0.0  # the largest difference between two rows at a pause so far

    def regroup(self, step, rollouts, scores):
        cloud, weights = self._weigh(step, rollouts, self.promised(rollouts, scores))
        generator = RandomStream(self.settings.seed, self.context.prompt).generator(step, self._pause(cloud))
        ancestors = systematic(weights, generator.random())
        if self.guide is not None:
            self.guide.part(step, rollouts, ancestors)
        for name in ("promised", "ratios", "gathered", "first"):
            setattr(cloud, name, getattr(cloud, name)[ancestors])
        return ancestors

    def update(self, step, rollouts, scores):
        self.potential.learn(rollouts, scores.rewards)
        if self.only_learns(step):
            return self.learn(step, rollouts, scores, None)
        cloud, weights = self._weigh(step, rollouts, scores.rewards, last=True)
        del self._clouds[step]
        update = self.learn(step, rollouts, scores, weights)
        counted = weights > 0
        columns: dict[str, float | str | list[float] | None] = {
            "lambda": cloud.temperature,
            "ess": min(cloud.sizes),
            "ess_per_pause": cloud.sizes,
            "ancestors": float(len(cloud.first[counted].unique())),
            "log_z": cloud.log_z,
            "kl_target": (weights * cloud.gathered)[counted].sum().item() - cloud.log_z,
            "weights": weights.tolist(),
        }
        update.columns.update(columns)
        return update

    def _weigh(self, step, rollouts, promised, last=False):
        """What rows have gained since the last pause, as weights (K,) that add up to 1."""
        count = len(promised)
        none = torch.zeros(count, dtype=torch.float64)
        cloud = self._clouds.setdefault(step, _Cloud(none, none, none, torch.arange(count)))
        promised = torch.where(promised.isnan() & (not last), cloud.promised, promised)  # no word on it: no gain
        ratios = none if rollouts.log_ratios is None else rollouts.log_ratios.double().sum(1).cpu()
        gained, corrected = promised - cloud.promised, ratios - cloud.ratios
        cloud.temperature = self._temperature(gained, corrected)
        logs = log_weights(gained, corrected, cloud.temperature)
        known = gained[~gained.isnan()]
        logs = logs + known.max() / cloud.temperature  # back to exp(gain/λ) itself, of which log Z is the mean
        cloud.gathered = cloud.gathered + logs
        cloud.log_z += (torch.logsumexp(logs, 0) - math.log(count)).item()
        cloud.promised, cloud.ratios = promised, ratios
        weights = torch.softmax(logs, 0)
        cloud.sizes.append(effective_sample_size(weights))
        return cloud, weights

    def _temperature(self, gained, corrected) -> float:
        settings = self.settings
        if settings.penalty:
            return settings.penalty
        known = gained[~gained.isnan()]
        if known.max() == known.min():
            return 1.0  # nothing to tell rows apart by
        self._widest = max(self._widest, (known.max() - known.min()).item())  # what is small beside it counts little
        wanted = settings.target_ess or len(gained) / 4
        return max(temperature_for(gained, corrected, wanted), self._widest / MOST_NATS)

    def _pause(self, cloud) -> int:
        """A number for the random numbers of a pause, behind those of all rollouts."""
        return len(cloud.first) + len(cloud.sizes)
