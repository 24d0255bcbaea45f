"""Algorithm 1 of the paper, written literally and for small models only: the oracle of the replay tests.

Full forward passes without a cache, K×T×V probabilities, explicit d×d Fisher matrices, fp64 throughout. It shares
no code with the package: it takes tokens and rewards, and rebuilds the vectors.
"""

import copy

import torch


def effective_head(model):
    """W and b of logits = W h + b, with any scalar on the logits folded in."""
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    scale = 1.0
    if model.config.model_type == "granite":
        scale = 1 / config.logits_scaling
    if model.config.model_type == "cohere":
        scale = config.logit_scale
    return layer.weight.detach().double() * scale


def truncate(p, top_p=1.0, top_k=0, min_p=0.0):
    """What top-k, then top-p, then min-p leave of one distribution, by sorting all of it."""
    order = p.argsort(descending=True)
    order = order[:top_k] if top_k else order
    out, mass, held = torch.zeros_like(p), 0.0, p[order].sum().item()
    for token in order:
        if mass >= top_p * held or p[token] < min_p * p.max():
            break
        out[token] = p[token]
        mass += p[token].item()
    return out / out.sum()


class Literal:
    def __init__(self, model, prompt_tokens, T, temperature=1.0, cut=None, held_back=0, ends=()):
        """`cut` are the arguments of `truncate`; the first `held_back` tokens are none of `ends`."""
        self.model = copy.deepcopy(model).double()
        self.W = effective_head(model)
        self.prompt, self.T, self.tau, self.cut = list(prompt_tokens), T, temperature, cut
        self.held_back, self.ends = held_back, list(ends)

    @torch.no_grad()
    def logits(self, tokens):
        """Reference logits at every position of a response, (length, V)."""
        ids = torch.tensor([self.prompt + list(tokens)])
        logits = self.model(input_ids=ids).logits[0, len(self.prompt) - 1 : -1].double()
        for t in range(min(self.held_back, len(logits))):
            logits[t, self.ends] = -torch.inf
        return logits

    def sampled(self, z, u):
        """The law that a token is drawn from."""
        law = self.law(z, u)
        return law if self.cut is None else truncate(law, **self.cut)

    def law(self, z, u):
        return torch.softmax((z + self.W @ u) / self.tau, dim=-1)

    def kl(self, tokens, u):
        """KL(π_u ‖ π_ref) at every prefix of a response, by its definition."""
        z = self.logits(tokens)
        before = (z / self.tau).log_softmax(-1)
        after = ((z + u[: len(z)] @ self.W.T) / self.tau).log_softmax(-1)
        return (after.exp() * (after - before)).nan_to_num().sum(-1)  # what is held back has no probability in either

    def logprobs(self, tokens, u):
        """log π_u of every token of a response."""
        z = self.logits(tokens)
        after = ((z + u[: len(z)] @ self.W.T) / self.tau).log_softmax(-1)
        return after.gather(-1, torch.tensor(tokens)[:, None])[:, 0]

    def fisher(self, p):
        return self.W.T @ (torch.diag(p) - torch.outer(p, p)) @ self.W / self.tau**2

    def run(self, candidates, steps, K, cost, eta, penalty, basis=None):
        """Algorithm 1; with a basis B (T, r) the free vectors c of u = B c take the step, by Bᵀ of the gradient."""
        basis = torch.eye(self.T, dtype=torch.float64) if basis is None else basis.double()
        c = torch.zeros(basis.shape[1], self.W.shape[1], dtype=torch.float64)
        sigma = None
        for n in range(steps):
            rows = [candidate for candidate in candidates if candidate.step == n]
            if n == 0:
                sigma = self.cost_matrices(cost, rows, [self.logits(row.tokens) for row in rows], K)
            u = basis @ c
            c = c + eta * basis.T @ (self.reward_gradient(rows, u) - penalty * torch.einsum("tde,te->td", sigma, u))
        return basis @ c

    def reward_gradient(self, rows, u):
        """g_t of eq:update, one rollout and one position at a time, from a step's candidates."""
        K, g = len(rows), torch.zeros_like(u)
        rewards = torch.tensor([c.reward for c in rows], dtype=torch.float64)
        for i, c in enumerate(rows):
            baseline = (rewards.sum() - rewards[i]) / (K - 1)
            for t, z in enumerate(self.logits(c.tokens)):
                p = self.sampled(z, u[t])
                e = torch.zeros_like(p)
                e[c.tokens[t]] = 1.0
                g[t] += (rewards[i] - baseline) * (self.W.T @ (e - p)) / self.tau / K
        return g

    def cost_matrices(self, cost, rows, logits, K):
        d = self.W.shape[1]
        sigma = torch.zeros(self.T, d, d, dtype=torch.float64)
        if cost == "euclidean":
            return sigma + torch.eye(d, dtype=torch.float64)
        if cost == "frozen-fisher":
            for z, c in zip(logits, rows, strict=True):
                for t in range(len(c.tokens)):
                    sigma[t] += self.fisher(torch.softmax(z[t] / self.tau, dim=-1)) / K
        return sigma

    def run_on_policy(self, candidates, steps, K, cost, eta, penalty):
        """Algorithm 1 where the cost is estimated anew from each step's own rollouts."""
        u = torch.zeros(self.T, self.W.shape[1], dtype=torch.float64)
        for n in range(steps):
            rows = [c for c in candidates if c.step == n]
            logits = [self.logits(c.tokens) for c in rows]
            rewards = torch.tensor([c.reward for c in rows], dtype=torch.float64)
            suffix = torch.zeros(K, self.T + 1, dtype=torch.float64)  # sum of log-ratios from t on
            for i, c in enumerate(rows):
                for t in reversed(range(len(c.tokens))):
                    suffix[i, t] = suffix[i, t + 1] + self.deviation(logits[i][t], u[t], c.tokens[t])
            u_next = u.clone()
            for t in range(self.T):
                direction = torch.zeros(self.W.shape[1], dtype=torch.float64)
                for i, c in enumerate(rows):
                    if t >= len(c.tokens):
                        continue
                    z, y = logits[i][t], c.tokens[t]
                    score = (self.W[y] - self.W.T @ self.sampled(z, u[t])) / self.tau
                    advantage = rewards[i] - (rewards.sum() - rewards[i]) / (K - 1)
                    at = self.law(z, 0 * u[t]) if cost == "prefix-fisher" else self.law(z, u[t])
                    direction += advantage * score / K - penalty * self.fisher(at) @ u[t] / K
                    if cost == "sequence-kl":
                        later = suffix[:, t + 1]
                        direction -= penalty * score * (later[i] - (later.sum() - later[i]) / (K - 1)) / K
                u_next[t] = u[t] + eta * direction
            u = u_next
        return u

    def deviation(self, z, u, token):
        """What position t adds to a suffix: the log-ratio of its token, or its exact KL where sampling is truncated."""
        after, before = self.law(z, u).log(), self.law(z, 0 * u).log()
        return (after - before)[token] if self.cut is None else (after.exp() * (after - before)).nan_to_num().sum()


def replay(model, prompt_tokens, result, basis=None):
    """The vectors of a run, rebuilt from its settings, its tokens and its rewards."""
    s, ends = result.settings, model.generation_config.eos_token_id
    cut = {"top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
    cut = None if cut == {"top_p": 1.0, "top_k": 0, "min_p": 0.0} else cut
    literal = Literal(model, prompt_tokens, s.max_new_tokens, s.temperature, cut, s.min_new_tokens, ends)
    algorithm = (result.candidates, s.steps, s.rollouts, s.cost, s.learning_rate, s.penalty)
    if s.cost in ("frozen-fisher", "euclidean", "none"):
        return literal.run(*algorithm, basis)
    assert basis is None
    return literal.run_on_policy(*algorithm)
