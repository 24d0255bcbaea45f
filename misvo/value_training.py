"""Fit RE-Control's value network on many prompts: sample the reference policy, score, fit. Use it with `value=FOLDER`.

network = misvo.train_value(policy, prompts, reward, rollouts=16, max_new_tokens=64)
network.save_pretrained("value")
misvo.steer(policy, prompt, reward, method="re-control", value="value")
"""

import math

import torch

from misvo.decoding import Engine
from misvo.loop import sampler
from misvo.methods.re_control import episodes_of
from misvo.rewards import as_reward, score
from misvo.rollouts import Request
from misvo.sampling import RandomStream
from misvo.settings import Settings
from misvo.value import ValueNetwork


def train_value(policy, prompts, reward, *, columns=None, rollouts=16, max_new_tokens=512, seed=0, **options):
    """Sample `rollouts` responses to each prompt, score them, fit V on their states; `budget` says what it took.

    `options` are temperature, top_p and value_target, as in `misvo.steer`.
    """
    settings = Settings("re-control", rollouts=rollouts, max_new_tokens=max_new_tokens, seed=seed, **options)
    reward, episodes, tokens = as_reward(reward), [], 0
    for index, prompt in enumerate(prompts):
        prefix = policy.prefill(policy.encode(prompt), max_new_tokens)
        engine = Engine(policy, policy.rows_that_fit(prefix, settings), sampler(settings))
        stream = RandomStream(seed, prefix.tokens)
        request = Request(prefix, stream, 0, range(rollouts), max_new_tokens, keep_scores=False, keep_hidden=True)
        batch = engine.run(request)
        rows = batch.responses()
        texts = [policy.decode(row) for row in rows]
        values = score(reward, prompt, texts, rows, columns[index] if columns else {})
        values = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
        episodes += episodes_of(batch, values)
        tokens += int(batch.lengths.sum())
    network = ValueNetwork.fit(episodes, settings.value_target, seed, head=policy.head.fingerprint)
    network.budget = {"prompts": len(prompts), "responses": rollouts * len(prompts), "tokens": tokens}
    return network
