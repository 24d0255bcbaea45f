"""Every record of rollouts, recomputed by teacher forcing: one plain forward pass of transformers over each response.

It knows nothing of engines, batches or caches. What it takes from misvo is the sampler (tests/test_sampling.py) and the
numbers that have addresses. `check` raises where a record is off by more than rounding, where a token is not the one
that the race of its law names and no near tie excuses that, and where a row does not end where it should.
"""

from dataclasses import dataclass

import torch

from misvo.interventions import Climb, Noise, Vectors
from misvo.race import FLOOR, OTHERS, exponentials
from misvo.rollouts import Request, Rollouts
from misvo.sampling import RandomStream

# fp32: a unit of 6e-8, sums of some thousand terms, some ten layers one behind the other.
NUMBERS = 5e-4
TIE = 2e-3  # nats: two errors of NUMBERS on each side of a race
SUM = 1e-4  # of probabilities


@dataclass
class Found:
    draws: int = 0
    ties: int = 0  # draws that are excused as near ties
    worst: float = 0.0  # the largest error of a record, as a share of what is allowed


@torch.no_grad()
def check(policy, request: Request, rollouts: Rollouts) -> Found:
    """Hold all records of a request to what transformers says of its responses."""
    found, prompt, T = Found(), list(request.prompt), request.max_new_tokens
    head, sampler, keep, count = policy.head, request.sampler, request.keep, len(request.rollouts)
    keys = RandomStream(request.seed, request.prompt).keys(request.step, request.rollouts, T)
    laws, pool = torch.zeros(T, head.vocab_size, dtype=torch.float64), keep.pool
    states = None
    if keep.hidden:
        rows, positions = torch.nonzero(rollouts.alive).unbind(1)
        states = torch.zeros(*rollouts.tokens.shape, head.hidden_size)
        states[rows, positions] = rollouts.states(rows, positions).float()

    def near(name, index, got, expected, allowed=NUMBERS):
        scale = max(1.0, expected.abs().max().item())
        error = (got.double() - expected.double()).abs().max().item() / (allowed * scale)
        found.worst = max(found.worst, error)
        assert error <= 1, f"{name} of row {index} is off by {error:.3g} times what rounding allows"

    for index, response in enumerate(rollouts.responses()):
        length, begun = len(response), len(request.beginning(index))
        assert tuple(response[:begun]) == request.beginning(index)
        own = slice(begun, length)  # the positions that were drawn
        _check_end(policy, request, rollouts, index, response)
        ids = torch.tensor([prompt + response])
        hidden = policy.body(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        drawn = torch.tensor(response)
        logits = sampler.tempered(head.logits(hidden), torch.arange(length)).double()
        shift = torch.zeros_like(logits)
        u = shifts(request, request.rollouts[index], length, hidden)
        if u is not None:
            shift = head.shift(u.float()).double() / sampler.temperature
        reference, steered = logits.log_softmax(-1), (logits + shift).log_softmax(-1)
        place = torch.arange(length)
        near("logprobs", index, rollouts.logprobs[index, own], steered[place, drawn][own])
        near("ref_logprobs", index, rollouts.ref_logprobs[index, own], reference[place, drawn][own])
        kl = (steered.exp() * (steered - reference).nan_to_num(0.0)).sum(-1)
        near("kl", index, rollouts.kl[index, own], kl[own])
        probs = steered.exp().float()
        plain, ref_kept = sampler.draw(reference.exp().float(), keys[index, :length])
        within = ref_kept if request.anchored and u is not None else None
        redrawn, kept = sampler.draw(probs, keys[index, :length], within)
        law = probs if kept is None else kept if torch.is_tensor(kept) else kept.dense()
        found.draws += length - begun
        for t in [t for t in torch.nonzero(redrawn != drawn)[:, 0].tolist() if t >= begun]:
            excuse = gap(probs[t], keys[index, t], sampler, response[t], None if within is None else law[t] > 0)
            assert excuse <= TIE, f"row {index} at {t}: the race is {excuse:.3g} nats from naming {response[t]}"
            found.ties += 1
        if keep.scores:
            near("score_rows", index, rollouts.score_rows[index, own], head.project(law)[own], 2 * NUMBERS)
        if rollouts.changed is not None:
            differ = rollouts.changed[index, :length] != (drawn != plain)
            for t in [t for t in torch.nonzero(differ)[:, 0].tolist() if t >= begun]:  # ties of the reference's race
                names = [drawn[t].item()] if not rollouts.changed[index, t] else []
                assert all(gap(reference[t].exp().float(), keys[index, t], sampler, name) <= TIE for name in names)
                found.ties += 1
        if rollouts.squares is not None and u is not None:
            near("squares", index, rollouts.squares[index, own], u.square().sum(-1)[own])
        if rollouts.log_ratios is not None and u is not None:
            before = reference.exp() if ref_kept is None else ref_kept.dense()
            ratios = (before[place, drawn].log() - law[place, drawn].log())[own]
            near("log_ratios", index, rollouts.log_ratios[index, own], ratios)
        if states is not None:
            near("hidden", index, states[index, own], hidden[own])
        for name in ("kl", "logprobs", "ref_logprobs", "score_rows", "tokens", "changed", "squares", "log_ratios"):
            buffer = getattr(rollouts, name)
            assert buffer is None or not buffer[index, length:].any(), f"{name} goes on behind the end of row {index}"
            outside = buffer is None or name == "tokens" or not buffer[index, :begun].any()
            assert outside, f"{name} speaks of the beginning of row {index}"
        laws[own] += (reference if keep.fisher == "reference" else steered).exp()[own] / count
    assert rollouts.drawn == found.draws
    if keep.fisher is not None:
        mean, rows = laws_of(rollouts)
        expected = laws if pool is None else pool.double().T @ laws
        allowed = SUM * (1.0 if pool is None else pool.sum(0).max().item())
        error = (mean.double() - expected).abs().max().item() / allowed
        found.worst = max(found.worst, error)
        assert error <= 1, f"the mean law is off by {error:.3g} times what rounding allows"
        near("the mass of the mean law", "all", mean.double().sum(-1), expected.sum(-1), SUM)
        weighted = head.project(laws.float())
        near("fisher_rows", "all", rows.sum(0) / count, weighted, 2 * NUMBERS)
    return found


def shifts(request: Request, rollout: int, length: int, hidden: torch.Tensor) -> torch.Tensor | None:
    """u of every position of one rollout, (length, d), from what the intervention is by definition."""
    how = request.intervention
    if how is None:
        return None
    u = torch.zeros(length, hidden.shape[-1])
    if isinstance(how, Vectors):
        whole = how.free if how.tie.basis is None else how.tie.basis.to(how.free) @ how.free
        reach = min(length, len(whole))
        u[:reach] = whole[:reach]
    elif isinstance(how, Noise):
        reach = min(length, how.window)
        generator = RandomStream(how.seed, how.prompt).generator(how.step, rollout)
        noise = generator.standard_normal((how.tie.size, how.centre.shape[1]), dtype="float32")
        moved = how.centre + torch.from_numpy(noise) * how.sigma2**0.5
        whole = moved if how.tie.basis is None else how.tie.basis.to(moved) @ moved
        u[:reach] = whole[:reach]
    elif isinstance(how, Climb):
        u = how.value.climb(hidden, how.iterations, how.step_size)
    return u


def gap(probs: torch.Tensor, key: torch.Tensor, sampler, token: int, only=None) -> float:
    """How many nats the law would have to move for its race to name this token; infinite where nothing helps.

    `only` (V,) bool are the tokens that may be drawn, where it is not the sampler that says so.
    """
    if sampler.greedy:
        return (probs.max().log() - probs[token].log()).item()
    if only is not None or sampler.samples_whole_law:
        allowed, optional = probs > 0 if only is None else only, torch.zeros_like(probs, dtype=torch.bool)
    else:
        least = sampler.truncation._least(probs[None])[0]
        allowed = probs >= least * (1 - TIE)
        optional = allowed & (probs <= least * (1 + TIE))
    times = exponentials(key, torch.arange(len(probs))) / probs.double()
    if not allowed[token]:
        return float("inf")
    rivals = allowed & ~optional
    rivals[token] = False
    if only is None and sampler.samples_whole_law:
        alone = (probs > FLOOR) | (torch.arange(len(probs)) == token)
        others = exponentials(key, OTHERS) / probs[~alone].double().sum()
        fastest = torch.minimum(times[rivals & alone].min(), others)
        if probs[token] <= FLOOR * (1 + TIE):  # named by the second race, if the others win the first one
            second = times[rivals & ~(probs > FLOOR)].min()
            first = times[probs > FLOOR].min()
            return max((times[token] / second).log().item(), (others / first).log().item())
    else:
        fastest = times[rivals].min() if rivals.any() else torch.tensor(torch.inf)
    return (times[token] / fastest).log().item()


def laws_of(rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean law and the rows of the Fisher estimate, brought here from wherever they are."""
    if torch.is_tensor(rollouts.mean_probs):
        return rollouts.mean_probs, rollouts.fisher_rows
    return rollouts.mean_probs.run(_whole_laws)


def _whole_laws(head, rollouts):
    laws = rollouts.mean_probs.float()
    return head._whole(laws) if head.split else laws, rollouts.fisher_rows


def _check_end(policy, request, rollouts, index, response):
    """A row ends at an end, at a stop text or at its last position, and nowhere before."""
    assert 0 < len(response) <= request.max_new_tokens
    assert not any(token in policy.ends for token in response[:-1])
    stopped = response[-1] in policy.ends or any(stop in policy.decode(response) for stop in request.stop)
    assert stopped or len(response) == request.max_new_tokens
    assert bool(rollouts.ended[index]) == stopped
    if request.stop:
        assert not any(stop in policy.decode(response[:-1]) for stop in request.stop)
