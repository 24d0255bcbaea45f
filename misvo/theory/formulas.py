"""Every formula of the paper that a check puts to the test, each in one place.

A check compares a method of this class with a calculation that does not use it. To see that the check can
fail, subclass and override one method (drop a term, change a constant): methods call each other through
`self`, so the mistake reaches whatever rests on the formula. Each body is the paper's right-hand side.

Shapes: V vocabulary, d width, T horizon, N = V**T sequences. Positions count from 0.
"""

from __future__ import annotations

import numpy as np

from .tabular import TabularPolicy, log_partition


class Formulas:
    # -- lemmas of the appendix --------------------------------------------------------------------

    def log_partition_gradient(self, z: np.ndarray) -> np.ndarray:
        """`lem:logpart`: ∇A(z) = softmax(z)."""
        weight = np.exp(z - z.max(-1, keepdims=True))
        return weight / weight.sum(-1, keepdims=True)

    def covariance(self, p: np.ndarray) -> np.ndarray:
        """`eq:softmax-jacobian`: C_p = diag(p) − p pᵀ, which is also ∇²A. (..., V) to (..., V, V)."""
        return p[..., None] * np.eye(p.shape[-1]) - p[..., :, None] * p[..., None, :]

    def covariance_trace(self, p: np.ndarray) -> float:
        """`lem:sigma`: tr C_p = 1 − ‖p‖²."""
        return 1 - p @ p

    def covariance_norm_bound(self) -> float:
        """`lem:sigma`: ‖C_p‖ ≤ 1."""
        return 1.0

    def softmax_l1_bound(self, shift: np.ndarray) -> float:
        """`lem:softmax-lip`: ‖softmax(z + δ) − softmax(z)‖₁ ≤ √V ‖δ‖."""
        return np.sqrt(len(shift)) * np.linalg.norm(shift)

    def softmax_l2_bound(self, shift: np.ndarray) -> float:
        """`lem:softmax-lip`: ‖softmax(z + δ) − softmax(z)‖₂ ≤ ‖δ‖."""
        return np.linalg.norm(shift)

    def covariance_distance_bound(self, p: np.ndarray, q: np.ndarray) -> float:
        """`lem:cov-lip`: ‖C_p − C_q‖ ≤ 3 ‖p − q‖; 1 from the diagonal piece, 2 from the rank-two piece."""
        return 3 * np.linalg.norm(p - q)

    def matrix_distance_bound(self, norm: float, mu: np.ndarray, nu: np.ndarray) -> float:
        """`lem:tv-matrix`: ‖E_μ M − E_ν M‖ ≤ B ‖μ − ν‖₁ where ‖M‖ ≤ B."""
        return norm * np.abs(mu - nu).sum()

    def spectral_norm(self, head: np.ndarray) -> float:
        """σ_max(W)."""
        return np.linalg.norm(head, 2)

    # -- one token at a fixed prefix ---------------------------------------------------------------

    def token_kl(self, z: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """`eq:per-token-kl-exact`: A(z) − A(z+δ) + ⟨softmax(z+δ), δ⟩."""
        steered = self.log_partition_gradient(z + shift)
        return log_partition(z) - log_partition(z + shift) + steered @ shift

    def kl_integrand(self, p: np.ndarray, shift: np.ndarray, tau: float) -> float:
        """`eq:kl-integral`: τ δᵀ C δ with p = softmax(z + τδ), whose integral over [0, 1] is the token KL."""
        return tau * shift @ self.covariance(p) @ shift

    def token_fisher(self, head: np.ndarray, p: np.ndarray) -> np.ndarray:
        """`eq:fisher-u`: F_t = Wᵀ C_p W. (..., V) to (..., d, d)."""
        return head.T @ self.covariance(p) @ head

    def token_quadratic(self, head: np.ndarray, p: np.ndarray, u: np.ndarray) -> np.ndarray:
        """`eq:kl-quadratic`: ½ uᵀ F_t(0) u, with p the reference law. u is (d,)."""
        return 0.5 * np.einsum("d,...de,e->...", u, self.token_fisher(head, p), u)

    def token_remainder_bound(self, head: np.ndarray, u: np.ndarray) -> float:
        """`app:kl-quad-proof`: |KL − ½ uᵀ F_t(0) u| ≤ σ_max(W)³ ‖u‖³."""
        return (self.spectral_norm(head) * np.linalg.norm(u)) ** 3

    def shift_bound(self, head: np.ndarray, u: np.ndarray) -> float:
        """`eq:kl-global-bound`, first half: ½ ‖Wu‖²."""
        return 0.5 * np.linalg.norm(head @ u) ** 2

    def norm_bound(self, head: np.ndarray, u: np.ndarray) -> float:
        """`eq:kl-global-bound`, second half: ½ σ_max(W)² ‖u‖²."""
        return 0.5 * (self.spectral_norm(head) * np.linalg.norm(u)) ** 2

    def token_kl_gradient(self, head: np.ndarray, p: np.ndarray, u: np.ndarray) -> np.ndarray:
        """`eq:inner-grad-Fu`: ∇_u KL = F_t(u) u, with p the steered law. (..., V) to (..., d)."""
        return self.token_fisher(head, p) @ u

    # -- whole sequences ---------------------------------------------------------------------------

    def chain_rule(self, policy: TabularPolicy, u: np.ndarray) -> float:
        """`eq:kl-effort`: the sequence KL as Σ_t E_{y_<t ~ π_u}[token KL]."""
        pairs = zip(policy.prefix_laws(u), policy.token_kls(u), strict=True)
        return sum(law @ kl for law, kl in pairs)

    def scores(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """`eq:seq-score`: S_t(y; u) = Wᵀ(e_{y_t} − π_u^t) for every sequence: (N, T, d)."""
        every = np.arange(policy.sequences)
        columns = []
        for t, law in enumerate(policy.token_laws(u)):
            expected_row = law @ policy.head  # Wᵀp for every prefix: (V**t, d)
            columns.append(policy.head[policy.tokens()[:, t]] - expected_row[policy.prefix_of(every, t)])
        return np.stack(columns, axis=1)

    def suffix_log_ratio(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """ℓ_{>t}(y; u) of Section 4.2 for every sequence and position: (N, T)."""
        ratio = policy.log_factors(u) - policy.log_factors(policy.zero)
        from_here = ratio[:, ::-1].cumsum(1)[:, ::-1]  # Σ_{τ ≥ t}
        return from_here - ratio

    def analytic_term(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """`eq:seqkl-grad`: g_t^an = E_{y_<t ~ π_u}[F_t(u_t)] u_t: (T, d)."""
        return np.einsum("tde,te->td", self.iterate_fisher(policy, u), u)

    def suffix_term(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """`eq:seqkl-grad`: g_t^suffix = E_{y ~ π_u}[S_t ℓ_{>t}]: (T, d)."""
        law, scores, ratio = policy.sequence_law(u), self.scores(policy, u), self.suffix_log_ratio(policy, u)
        return np.einsum("n,ntd,nt->td", law, scores, ratio)

    def sequence_kl_gradient(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """Theorem 1, `eq:seqkl-grad`."""
        return self.analytic_term(policy, u) + self.suffix_term(policy, u)

    def score_covariance(self, policy: TabularPolicy) -> np.ndarray:
        """`eq:hess-is-fisher`: ∇²K(0) = E_ref[S Sᵀ]: (Td, Td)."""
        stacked = self.scores(policy, policy.zero).reshape(policy.sequences, -1)
        return (stacked * policy.sequence_law(policy.zero)[:, None]).T @ stacked

    def block_hessian(self, policy: TabularPolicy) -> np.ndarray:
        """`eq:hess-blkdiag`: ∇²K(0) = blkdiag(F̄_1, …, F̄_T): (Td, Td)."""
        hessian = np.zeros((policy.horizon, policy.width, policy.horizon, policy.width))
        for t, block in enumerate(self.frozen_fisher(policy)):
            hessian[t, :, t, :] = block
        return hessian.reshape(policy.horizon * policy.width, -1)

    # -- the three cost matrices, each (T, d, d) ---------------------------------------------------

    def averaged_fisher(self, policy: TabularPolicy, prefixes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """E_{y_<t}[F_t]: y_<t drawn under the steering `prefixes`, F_t taken at the steering `tokens`."""
        pairs = zip(policy.prefix_laws(prefixes), policy.token_laws(tokens), strict=True)
        return np.stack([np.einsum("n,nde->de", law, self.token_fisher(policy.head, p)) for law, p in pairs])

    def iterate_fisher(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """`eq:surr-onon`: F̃ᵘ."""
        return self.averaged_fisher(policy, u, u)

    def prefix_fisher(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """`eq:surr-onoff`: F̄ᵘ."""
        return self.averaged_fisher(policy, u, policy.zero)

    def frozen_fisher(self, policy: TabularPolicy) -> np.ndarray:
        """`eq:surr-offoff`: F̄, the cost matrix of MISVO."""
        return self.averaged_fisher(policy, policy.zero, policy.zero)

    def steering_before(self, u: np.ndarray) -> np.ndarray:
        """Σ_{τ<t} ‖u_τ‖ for every t: (T,)."""
        sizes = np.linalg.norm(u, axis=-1)
        return sizes.cumsum() - sizes

    def fisher_constant(self, head: np.ndarray) -> float:
        """Theorem 2: C₁ = 3 σ_max(W)³."""
        return 3 * self.spectral_norm(head) ** 3

    def trajectory_constant(self, head: np.ndarray) -> float:
        """`lem:seq-tv`: L_traj = √V σ_max(W)."""
        return np.sqrt(head.shape[0]) * self.spectral_norm(head)

    def drift_constant(self, head: np.ndarray) -> float:
        """Theorem 2: C₂ = √V σ_max(W)³."""
        return np.sqrt(head.shape[0]) * self.spectral_norm(head) ** 3

    def fisher_gradient_bound(self, head: np.ndarray, u: np.ndarray) -> np.ndarray:
        """`eq:taylorApproximationEquivalence`: ‖(F̃ᵘ_t − F̄ᵘ_t)u_t‖ ≤ C₁‖u_t‖²: (T,)."""
        return self.fisher_constant(head) * (u**2).sum(-1)

    def drift_gradient_bound(self, head: np.ndarray, u: np.ndarray) -> np.ndarray:
        """`eq:contextApproximationEquivalence`: ‖(F̄ᵘ_t − F̄_t)u_t‖ ≤ C₂‖u_t‖ Σ_{τ<t}‖u_τ‖: (T,)."""
        return self.drift_constant(head) * np.linalg.norm(u, axis=-1) * self.steering_before(u)

    def sequential_distance_bound(self, policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        """`eq:autoregr-tv`: Σ_{τ<t} E_{y_<τ ~ π_u}‖π_u(· | y_<τ) − π_ref(· | y_<τ)‖₁ for every t: (T,)."""
        steered, reference = policy.token_laws(u), policy.token_laws(policy.zero)
        moved = [np.abs(p - q).sum(-1) for p, q in zip(steered, reference, strict=True)]  # (V**τ,) for each τ
        steps = np.array([law @ move for law, move in zip(policy.prefix_laws(u), moved, strict=True)])
        return steps.cumsum() - steps

    # -- estimators and the objective --------------------------------------------------------------

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """`eq:update`: R_i − R̄_i with the leave-one-out mean R̄_i. (..., K)."""
        others = rewards.sum(-1, keepdims=True) - rewards
        return rewards - others / (rewards.shape[-1] - 1)

    def reward_gradient(self, rewards: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """`eq:update`: g_t^R = (1/K) Σ_i (R_i − R̄_i) S_t(y_i). (..., K) and (..., K, T, d) to (..., T, d)."""
        return np.einsum("...k,...ktd->...td", self.advantages(rewards), scores) / rewards.shape[-1]

    def fisher_estimate(self, fishers: np.ndarray) -> np.ndarray:
        """F̂_t = (1/K) Σ_i F_t(0; y_<t^i) of Section 4.3. (..., K, d, d) to (..., d, d)."""
        return fishers.sum(-3) / fishers.shape[-3]

    def tilted_log_law(self, log_reference: np.ndarray, rewards: np.ndarray, penalty: float) -> np.ndarray:
        """log q★(y) = log π_ref(y) + R(y)/λ − log Z, Section 2."""
        tilted = log_reference + rewards / penalty
        return tilted - log_partition(tilted)

    def optimum_value(self, log_reference: np.ndarray, rewards: np.ndarray, penalty: float) -> float:
        """λ log Z, the value of the regularised objective at q★."""
        return penalty * log_partition(log_reference + rewards / penalty)


PAPER = Formulas()
