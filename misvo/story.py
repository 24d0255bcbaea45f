"""What happened in a run, in plain sentences, for people who read no traces."""

import math

from misvo import selection

WARM = 0.4  # nats at which a token is tinted by two thirds
ALIKE = 0.1  # nats per token that nobody would notice
LITTLE_TO_LEARN = 0.5  # the share of steps with equal rewards from which on advice is due
ADVICE = (
    "Try more rollouts, so that one may earn more than the rest; a higher temperature, so that they differ more; or a "
    "reward that also pays for coming closer, in place of all or nothing."
)


def story(result) -> list[str]:
    """How reward and model moved, why this response was returned, and what to do where nothing could be learned."""
    trace = result.trace
    if not trace or all(candidate.reward is None for candidate in result.candidates):
        return []
    rewards = {candidate.reward for candidate in result.candidates if candidate.reward is not None}
    if len(rewards) == 1 and len(result.candidates) > 1:
        return [_all_equal(result, *rewards)]
    sentences = [_course(result), _against_sampling(result), _passed_over(result), _nothing_to_learn(result)]
    return [sentence for sentence in sentences if sentence]


def nats_per_token(row: dict, rollouts: int) -> float:
    """How far the model was moved at a step, by the length of its responses."""
    return row["kl"] * rollouts / max(1, row["tokens"])


def warmth(nats: float) -> float:
    """How strongly a token is tinted where the model was moved so far, from 0 to 1."""
    return 1 - math.exp(-max(0.0, nats) / WARM)


def _learns(result):
    """Whether the run moved the model toward the reward."""
    return result.steering is not None or result.settings.method == "lora"


def _course(result):
    first, last = result.trace[0], result.trace[-1]
    if len(result.trace) == 1 or not _learns(result):
        return None
    rose = "rose" if last["mean"] > first["mean"] else "went"
    moved = f"the model moved {nats_per_token(last, result.settings.rollouts):.2f} nats per token"
    course = f"The mean reward {rose} from {first['mean']:.3g} to {last['mean']:.3g}; {moved}"
    own = [c.ref_logprob for c in result.candidates if c.step == 0 and c.ref_logprob is not None]
    answer = result.best.ref_logprob
    if not result.settings.starts_at_reference or not own or answer is None:
        return f"{course}."
    usual = sum(own) / len(own)
    likely = "likelier than" if answer > usual else "less likely than"
    compared = f"finds the answer {'as likely as' if abs(answer - usual) < ALIKE else likely} its own"
    return f"{course}; the model as it was {compared} ({answer:.2f} and {usual:.2f} nats a token)."


def _against_sampling(result):
    """Beside the best of plain sampling: the first step's responses."""
    plain, best = result.unsteered, result.best
    if plain is None or not _learns(result):
        return None
    count = sum(candidate.step == 0 for candidate in result.candidates)
    if best.step == 0:
        return f"The answer is one of the first {count} responses, before any steering: nothing better came after it."
    return f"Without steering, the best of the first {count} responses earned {plain.reward:.3g}."


def _passed_over(result):
    """Why the response with the highest reward was not returned, where it was not."""
    best, highest = result.best, result.highest
    if highest.reward <= best.reward:
        return None
    reference = [candidate for candidate in result.candidates if candidate.step == 0]
    why = selection.why_not(highest, reference) or "others read better"
    return f"A response with reward {highest.reward:.3g} was passed over: {why}."


def _all_equal(result, reward):
    """Of a run that no response stands out of."""
    steered = ", so there was nothing to steer toward" if _learns(result) else ""
    told = f"All {len(result.candidates)} responses earned {reward:.3g}: none is better than another{steered}"
    return f"{told}. {ADVICE}"


def _nothing_to_learn(result):
    trace = result.trace
    quiet = sum(row.get("spread") == 0 for row in trace)
    if not _learns(result) or quiet < LITTLE_TO_LEARN * len(trace):
        return None
    return (
        f"In {quiet} of {len(trace)} steps all responses earned the same: none was better than another, so those steps "
        f"had nothing to steer toward. {ADVICE}"
    )
