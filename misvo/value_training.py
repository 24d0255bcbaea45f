"""Fit RE-Control's value network on many prompts: sample the reference policy, score, fit. Use it with `value=FOLDER`.

network = misvo.train_value(policy, prompts, reward, rollouts=16, max_new_tokens=64)
network.save_pretrained("value")
misvo.steer(policy, prompt, reward, method="re-control", value="value")
"""

from misvo.methods.re_control import episodes_of
from misvo.numbers import as_numbers
from misvo.policy import as_policy
from misvo.prompts import shown
from misvo.rewards import as_reward, score
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.settings import Settings
from misvo.value import ValueNetwork


def train_value(policy, prompts, reward, *, columns=None, rollouts=16, max_new_tokens=512, seed=0, **options):
    """Sample `rollouts` responses to each prompt, score them, fit V on their states; `budget` says what it took.

    `options` are temperature, top_p, raw and chat_template_kwargs, as in `misvo.steer`.
    """
    policy = as_policy(policy)
    settings = Settings("re-control", rollouts=rollouts, max_new_tokens=max_new_tokens, seed=seed, **options)
    sampler, keep = Sampler(settings.temperature, settings.top_p), Keep(hidden=True)
    reward, engine, episodes, count = as_reward(reward), policy.engine(policy.rows_that_fit(None, settings)), [], 0
    for index, prompt in enumerate(prompts):
        tokens = tuple(policy.encode(prompt, raw=settings.raw, chat_template_kwargs=settings.chat_template_kwargs))
        batch = engine.run(Request(tokens, seed, 0, range(rollouts), max_new_tokens, sampler, keep=keep))
        engine.forget(tokens)
        rows = batch.responses()
        texts, seen = [policy.decode(row) for row in rows], shown(prompt, policy.decode)
        values = score(reward, seen, texts, rows, columns[index] if columns else {})
        episodes += episodes_of(batch, as_numbers(values))
        count += int(batch.lengths.sum())
    network = ValueNetwork.fit(episodes, seed, head=policy.head.fingerprint)
    network.budget = {"prompts": len(prompts), "responses": rollouts * len(prompts), "tokens": count}
    return network
