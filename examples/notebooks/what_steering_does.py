# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # What steering does
#
# One prompt, one reward, pictures: how the rewards of a step move, how far the model moves, and where.
# Open this file in Jupyter with jupytext, or run it: `python examples/notebooks/what_steering_does.py`.

# %%
import matplotlib.pyplot as plt
import numpy as np

import misvo

policy = misvo.Policy.from_pretrained("smollm2-135m")
prompt = "Give me one tip for sleeping better."

# %% [markdown]
# A run samples K responses in each of N steps. The first step is the model as it is; each further one samples from the
# model with a vector u on its hidden state, which the rewards so far have moved.

# %%
result = misvo.steer(policy, prompt, "sentiment", rollouts=6, steps=4, max_new_tokens=16, seed=42, kl_ref=True)
print(result.summary())

# %% [markdown]
# ## Rewards by step
# Each dot is a response. The line is the mean of a step: what a sample of the steered model earns.

# %%
frame = result.to_pandas()
rewards, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.scatter(frame["step"] + 1, frame["reward"], alpha=0.5)
axes.plot([row["step"] + 1 for row in result.trace], [row["mean"] for row in result.trace], marker="o")
axes.set(xlabel="step", ylabel="reward", title="responses and their mean")

# %% [markdown]
# ## How far the model moved
# KL by position, in nats: 0 is the model as it is. `auto` holds the mean over a response at 0.1 nats a token.

# %%
moved, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for row in result.trace:
    axes.plot(np.arange(1, len(row["kl_per_position"]) + 1), row["kl_per_position"], label=f"step {row['step'] + 1}")
axes.set(xlabel="position", ylabel="KL, nats", title="how far from itself")
axes.legend()

# %% [markdown]
# ## Which tokens it promoted
# At the positions that moved most: probability before and after.

# %%
for place in result.moved[:3]:
    words = ", ".join(f"{text!r} {before:.3f} → {after:.3f}" for text, before, after in place.tokens[:3])
    print(f"position {place.position}, {place.kl:.3f} nats: {words}")

# %% [markdown]
# ## How strong is enough?
# The same noise at every strength: where the texts are equal, steering changed nothing.

# %%
strengths = {strength: policy.generate(prompt, result, strength=strength, seed=7) for strength in (0.0, 0.5, 1.0, 2.0)}
for strength, text in strengths.items():
    print(f"{strength}: {text}")
