"""What each name stands for that a setting may have, in the words of `misvo list`. Imports no torch.

The classes live where they work, such as misvo.methods and misvo.cost.
"""

METHODS = {
    "misvo": "Algorithm 1: reward gradient minus a KL-shaped penalty, one vector per position",
    "best-of-n": "K·N samples of the reference policy, the best one returned",
    "aisp": "sampling-based control: Gaussian vectors for each response, averaged by exponentiated reward",
    "re-control": "a value network on hidden states, climbed by gradient steps at every token",
    "particles": "rows that promise more are continued more often, block by block: no vectors, the model's own words",
    "blockwise": "the best of a few continuations of each block goes on",
    "lora": "low-rank adapters for each prompt (peft), trained by the same reward gradient",
}
COSTS = {
    "frozen-fisher": "Fisher at zero on reference prefixes (eq:surr-offoff), the paper's choice",
    "prefix-fisher": "Fisher at zero on steered prefixes (eq:surr-onoff)",
    "iterate-fisher": "Fisher at u on steered prefixes (eq:surr-onon)",
    "euclidean": "the identity: squared length of the hidden-space shift",
    "sequence-kl": "the direct gradient of the sequence KL, suffix term included (eq:seqkl-grad)",
    "none": "no penalty at all",
}
TIES = {
    "position": "one vector for each position, as in the paper",
    "shared": "one vector for all positions",
    "smooth": "vectors at positions 0, 1, 2, 4, 8, … and straight lines between them",
}
STEPS = {
    "euler": "the paper's explicit step",
    "proximal": "implicit in the penalty, stable for every learning rate",
    "natural": "a fixed number of nats in the Fisher metric",
    "dual": "the natural direction of all gradients so far, further with every step",
}
CREDITS = {
    "response": "every token of a response earns its whole reward: the paper",
    "prefix": "tokens earn what they add to the score of a prefix: some 16 scores a response instead of one",
    "cheap": "prefix where the reward declares `scores_prefixes`, response elsewhere",
}
SELECTIONS = {
    "best": "the response with the highest reward",
    "ordinary": "the best of those that the reference policy could have said",
}
PROPOSALS = {
    "reference": "the model as it is",
    "steered": "a policy that learns from what survives; weights make up for the difference exactly",
}
POTENTIALS = {
    "auto": "prefix where the reward declares `scores_prefixes`, value elsewhere",
    "prefix": "the reward's own score of a beginning",
    "value": "a line from hidden states to rewards, fitted to the responses so far",
}
REWARD_ERRORS = {
    "raise": "the run ends, with what it has",
    "none": "responses that the reward fails on, one by one, count as not scored",
}
LAW_DTYPES = {"float32": "as computed", "bfloat16": "half the memory; misvo.fisher.Fisher bounds the error"}
ENGINES = {"torch": "the model as transformers loads it, in this process", "vllm": "vLLM, for GPUs (docs/vllm.md)"}
