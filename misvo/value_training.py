"""Fit RE-Control's value network on many prompts: sample the reference policy, score, fit. Use it with `value=FOLDER`.

network = misvo.train_value(policy, prompts, reward, rollouts=16, max_new_tokens=64)
network.save_pretrained("value")
misvo.steer(policy, prompt, reward, method="re-control", value="value")
"""

from collections.abc import Sequence

from misvo.methods.re_control import episodes_of
from misvo.numbers import as_numbers
from misvo.policy import Policy, as_policy
from misvo.prompts import Prompt, shown
from misvo.rewards import AnyReward, as_reward, insisting, score
from misvo.rollouts import Keep, Request
from misvo.sampling import sampler_of
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
    seed: int = 0,
    memory: str | None = None,
    **options,
) -> ValueNetwork:
    """Sample `rollouts` responses to each prompt, score them, fit V on their states; `budget` says what it took.

    `options` are those of sampling, of templates and of rewards that fail, as in `misvo.steer`; the sampler is as the
    model came.
    """
    policy = as_policy(policy)
    sizes = {"rollouts": rollouts, "max_new_tokens": max_new_tokens, "seed": seed, "memory": memory}
    settings = Settings.from_preset(method="re-control", **sizes, **options).for_model(policy.own_sampler)
    called = insisting(as_reward(reward), settings.on_reward_error, settings.reward_retries)
    template, episodes, count = {"raw": settings.raw, "chat_template_kwargs": settings.chat_template_kwargs}, [], 0
    encoded = [tuple(policy.encode(prompt, **template)) for prompt in prompts]
    engine = policy.engine(policy.rows_that_fit(None, settings, longest=max(map(len, encoded), default=0)))
    drawn, keep, stop = sampler_of(settings, policy.ends), Keep(hidden=True), settings.stop or ()
    for index, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        batch = engine.run(Request(tokens, seed, 0, range(rollouts), max_new_tokens, drawn, keep=keep, stop=stop))
        engine.forget(tokens)
        rows = batch.responses()
        texts, seen = [policy.decode(row) for row in rows], shown(prompt, policy.decode)
        values = score(called, seen, texts, rows, columns[index] if columns else {})
        episodes += episodes_of(batch, as_numbers(values))
        count += int(batch.lengths.sum())
    network = ValueNetwork.fit(episodes, seed, head=policy.head.fingerprint)
    network.budget = {"prompts": len(prompts), "responses": rollouts * len(prompts), "tokens": count}
    return network
