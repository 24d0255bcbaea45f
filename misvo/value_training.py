"""Fit RE-Control's value network on many prompts: sample the reference policy, score, fit. Use it with `value=FOLDER`.

network = misvo.train_value(policy, prompts, reward, rollouts=16, max_new_tokens=64)
network.save_pretrained("value")
misvo.steer(policy, prompt, reward, method="re-control", value="value")
"""

from collections.abc import Sequence

from misvo.methods.re_control import episodes_of
from misvo.numbers import as_numbers
from misvo.policy import Policy
from misvo.prompts import Prompt
from misvo.rewards import AnyReward, as_reward, score
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.settings import Settings
from misvo.value import ValueNetwork


def train_value(
    policy: Policy,
    prompts: Sequence[Prompt],
    reward: AnyReward,
    *,
    columns: Sequence[dict] | None = None,
    rollouts: int = 16,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    memory: str | None = None,
) -> ValueNetwork:
    """Sample `rollouts` responses to each prompt, score them, fit V on their states; `budget` says what it took."""
    settings = Settings(
        "re-control",
        rollouts=rollouts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        memory=memory,
    )
    sampler, keep = Sampler(settings.temperature, settings.top_p), Keep(hidden=True)
    called, episodes, count = as_reward(reward), [], 0
    encoded = [tuple(policy.encode(prompt)) for prompt in prompts]
    engine = policy.engine(policy.rows_that_fit(None, settings, longest=max(map(len, encoded), default=0)))
    for index, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        batch = engine.run(Request(tokens, seed, 0, range(rollouts), max_new_tokens, sampler, keep=keep))
        engine.forget(tokens)
        rows = batch.responses()
        values = score(called, prompt, [policy.decode(row) for row in rows], rows, columns[index] if columns else {})
        episodes += episodes_of(batch, as_numbers(values))
        count += int(batch.lengths.sum())
    network = ValueNetwork.fit(episodes, seed, head=policy.head.fingerprint)
    network.budget = {"prompts": len(prompts), "responses": rollouts * len(prompts), "tokens": count}
    return network
