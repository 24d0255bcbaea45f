"""Batched decoding: many requests in flight, each K rollouts of one prompt under one intervention.

The engine reads like the loop that it is: admit waiting rows, turn hidden states into laws and laws into tokens,
record what the methods need, let ended rows leave the batch, run the body on the rest. Per row and position it
keeps d numbers (the expected head row), never V. What it deliberately leaves out: text, rewards and updates.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from misvo import cache as kv
from misvo.head import centred, log_partition, softmax, token_kl
from misvo.sampling import RandomStream, Sampler

# (rollouts, position, hidden states of those rollouts (B, d)) -> vectors to add to them (B, d), or None for none
Intervention = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Request:
    """K rollouts of one prompt. `shift` is Wu (T, V) shared by all of them, or `intervene` makes u as decoding goes."""

    prefix: "Prefix"  # noqa: F821 - misvo.policy.Prefix
    stream: RandomStream
    step: int
    rollouts: range
    max_new_tokens: int
    shift: torch.Tensor | None = None  # (T, V)
    intervene: Intervention | None = None
    keep_scores: bool = True  # the expected rows of the law sampled from: what a score needs
    keep_fisher: str | None = None  # mean law and untruncated expected rows of the "steered" or "reference" law
    pool: torch.Tensor | None = None  # (T, P) weights with which positions share mean laws; None: one law each
    keep_hidden: bool = False  # the hidden states themselves: what KL_ref needs


@dataclass
class Rollouts:
    """What decoding a request gave. Everything is zero after a row's end; `lengths` counts tokens with EOS."""

    tokens: torch.Tensor  # (K, T) int64
    lengths: torch.Tensor  # (K,) int64
    kl: torch.Tensor  # (K, T) exact token KL to the reference at each visited prefix, untruncated laws
    logprobs: torch.Tensor  # (K, T) of the sampled token under the steered law, untruncated
    ref_logprobs: torch.Tensor  # (K, T) of the sampled token under the reference law, untruncated
    score_rows: torch.Tensor | None = None  # m of the law sampled from (K, T, d)
    fisher_rows: torch.Tensor | None = None  # m of the untruncated law (K, T, d)
    mean_probs: torch.Tensor | None = None  # p̄ (T, V), or pooled over positions (P, V)
    hidden: torch.Tensor | None = None  # (K, T, d), in the model's precision
    seconds: float = 0.0  # this request's share of the time that decoding took

    @property
    def alive(self) -> torch.Tensor:
        """Which positions hold a token, (K, T) bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def responses(self) -> list[list[int]]:
        """The token ids of each row, up to and with EOS."""
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]


@dataclass
class _Job:
    """A request under way: its buffers, its uniform numbers and how many rows have not ended."""

    request: Request
    rollouts: Rollouts
    uniforms: torch.Tensor  # (K, T)
    unfinished: int


@dataclass
class _Segment:
    """Adjacent rows of the batch that belong to one job and stand at one position."""

    job: _Job
    rows: torch.Tensor  # indices into the job's buffers
    position: int = 0


@dataclass
class Engine:
    """Decodes requests on a policy, at most `max_rows` rows at a time."""

    policy: "Policy"  # noqa: F821 - misvo.policy.Policy
    max_rows: int
    sampler: Sampler
    _waiting: deque = field(default_factory=deque)
    _segments: list = field(default_factory=list)
    _cache: object = None
    _hidden: torch.Tensor | None = None  # (B, d), the states that the next tokens are drawn from
    _depths: torch.Tensor | None = None  # (B,) tokens that each row has read; the deepest row has no padding

    def submit(self, request: Request) -> Rollouts:
        """Queue a request; its rollouts fill while `advance` is called until it names them finished."""
        job = self._open(request)
        whole = torch.arange(len(request.rollouts))
        self._waiting.extend(_Segment(job, rows) for rows in whole.split(self.max_rows))
        return job.rollouts

    def run(self, request: Request) -> Rollouts:
        """Decode one request to its end."""
        rollouts = self.submit(request)
        while self.busy:
            self.advance()
        return rollouts

    @property
    def load(self) -> int:
        """Rows in flight or waiting to be."""
        return sum(len(segment.rows) for segment in [*self._segments, *self._waiting])

    @property
    def busy(self) -> bool:
        return self.load > 0

    @torch.no_grad()
    def advance(self) -> list[Rollouts]:
        """One token for every row in flight; returns the rollouts that this token finished."""
        started = time.perf_counter()
        self._admit()
        segments, counts = self._segments, [len(segment.rows) for segment in self._segments]
        tokens = self._sample()
        ended = self._ends(tokens)
        finished = self._retire(ended)
        if self._segments:
            self._step(tokens[~ended])
        elapsed = time.perf_counter() - started
        for segment, count in zip(segments, counts, strict=True):
            segment.job.rollouts.seconds += elapsed * count / sum(counts)
        return finished

    def _open(self, request):
        head, rows, length = self.policy.head, len(request.rollouts), request.max_new_tokens
        device, dtype = head.device, head.dtype

        def zeros(*shape, dtype=dtype):
            return torch.zeros(*shape, dtype=dtype, device=device)

        state, laws = (rows, length, head.hidden_size), length if request.pool is None else request.pool.shape[1]
        rollouts = Rollouts(
            tokens=zeros(rows, length, dtype=torch.long),
            lengths=zeros(rows, dtype=torch.long),
            kl=zeros(rows, length),
            logprobs=zeros(rows, length),
            ref_logprobs=zeros(rows, length),
            score_rows=zeros(*state) if request.keep_scores else None,
            mean_probs=zeros(laws, head.vocab_size) if request.keep_fisher else None,
            hidden=zeros(*state, dtype=head.weight.dtype) if request.keep_hidden else None,
        )
        if request.keep_fisher:  # where the score and the Fisher matrix speak of the same law, one buffer serves both
            shared = request.keep_scores and self.sampler.samples_whole_law and request.keep_fisher == "steered"
            rollouts.fisher_rows = rollouts.score_rows if shared else zeros(*state)
        uniforms = request.stream.uniforms(request.step, request.rollouts, length).to(device)
        return _Job(request, rollouts, uniforms, unfinished=rows)

    def _admit(self):
        """Move waiting segments into the batch while there is room for them whole."""
        while self._waiting:
            rows = sum(len(segment.rows) for segment in self._segments)
            segment = self._waiting[0]
            if self._segments and rows + len(segment.rows) > self.max_rows:
                return
            self._waiting.popleft()
            prefix, count = segment.job.request.prefix, len(segment.rows)
            depth = torch.full((count,), prefix.length)
            cache, hidden = kv.replicate(prefix.cache, count), prefix.hidden.expand(count, -1)
            if not self._segments:
                self._cache, self._hidden, self._depths = cache, hidden, depth
            else:
                self._cache = kv.merge([self._cache, cache])
                self._hidden = torch.cat([self._hidden, hidden])
                self._depths = torch.cat([self._depths, depth])
            self._segments = [*self._segments, segment]

    def _blocks(self):
        """Each segment with the slice of the batch that it occupies."""
        start = 0
        for segment in self._segments:
            yield segment, slice(start, start + len(segment.rows))
            start += len(segment.rows)

    def _sample(self):
        """Draw the next token of every row, and hand each segment its part of what the laws say."""
        head, sampler = self.policy.head, self.sampler
        logits = centred(head.logits(self._hidden).div_(sampler.temperature))  # (B, V)
        shift, record, reference = self._shifts(), {}, None
        if shift is None:
            probs, partition = softmax(logits)
            reference, ref_partition = probs, partition
        else:
            if any(segment.job.request.keep_fisher == "reference" for segment in self._segments):
                reference, ref_partition = softmax(logits)
            else:
                ref_partition = log_partition(logits)
            logits += shift
            probs, partition = softmax(logits)
            record["kl"] = token_kl(ref_partition, partition, probs, shift)
        uniforms = torch.cat([s.job.uniforms[s.rows, s.position] for s in self._segments])
        tokens, kept = sampler.draw(probs, uniforms)
        chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
        unshifted = chosen if shift is None else chosen - shift.gather(-1, tokens[:, None]).squeeze(-1)
        record |= {
            "tokens": tokens,
            "logprobs": chosen - partition,
            "ref_logprobs": unshifted - ref_partition,
            "hidden": self._hidden,
        }
        if any(segment.job.request.keep_scores for segment in self._segments):
            record["score_rows"] = head.project(probs) if kept is None else head.project_sparse(kept)
        for segment, block in self._blocks():
            law = reference if segment.job.request.keep_fisher == "reference" else probs
            self._record(segment, {name: value[block] for name, value in record.items()}, law[block])
        return tokens

    def _record(self, segment, record, law):
        request, out, rows, t = segment.job.request, segment.job.rollouts, segment.rows, segment.position
        out.lengths[rows] = t + 1
        if request.keep_fisher:
            mean = law.sum(0) / len(request.rollouts)
            pooled = {t: 1.0} if request.pool is None else dict(enumerate(request.pool[t].tolist()))
            for index, weight in pooled.items():
                if weight:
                    out.mean_probs[index].add_(mean, alpha=weight)
            if out.fisher_rows is not out.score_rows:
                record["fisher_rows"] = self.policy.head.project(law)
        for name, value in record.items():
            buffer = getattr(out, name)
            if buffer is not None:
                buffer[rows, t] = value.to(buffer.dtype)

    def _shifts(self):
        """Wu/τ of every row, (B, V), or None while the whole batch samples from the reference policy."""
        parts = [self._shift(segment, block) for segment, block in self._blocks()]
        if all(part is None for part in parts):
            return None
        width = self.policy.head.vocab_size
        blank = torch.zeros(width, dtype=self.policy.head.dtype, device=self.policy.head.device)
        parts = [blank if part is None else part for part in parts]
        rows = [part.expand(len(segment.rows), width) for part, segment in zip(parts, self._segments, strict=True)]
        return torch.cat(rows).div_(self.sampler.temperature)

    def _shift(self, segment, block):
        """Wu of a segment, (V,) when its rows share it, (B, V) when they do not, None for the reference policy."""
        request, t = segment.job.request, segment.position
        if request.intervene is not None:
            vectors = request.intervene(segment.rows, t, self._hidden[block])
            return None if vectors is None else self.policy.head.shift(vectors)
        if request.shift is not None and t < len(request.shift):
            return request.shift[t]
        return None

    def _ends(self, tokens):
        """Which rows have drawn their last token, (B,) bool on the host: the loop's one synchronisation."""
        last = torch.cat(
            [
                torch.full((len(segment.rows),), segment.position + 1 == segment.job.request.max_new_tokens)
                for segment in self._segments
            ]
        )
        return last | torch.isin(tokens, self.policy.eos_tokens.to(tokens.device)).cpu()

    def _retire(self, ended):
        """Let ended rows leave the batch; name the requests that have none left."""
        finished, segments = [], []
        for segment, block in self._blocks():
            stays = ~ended[block]
            segment.job.unfinished -= int((~stays).sum())
            if segment.job.unfinished == 0:
                finished.append(segment.job.rollouts)
            if stays.any():
                segments.append(_Segment(segment.job, segment.rows[stays], segment.position + 1))
        self._segments = segments
        if ended.any() and segments:
            keep = torch.nonzero(~ended).squeeze(-1)
            kv.select(self._cache, keep)
            columns, self._depths = int(self._depths.max()), self._depths[keep]
            if spare := columns - int(self._depths.max()):
                kv.trim(self._cache, spare)
        elif not segments:
            self._cache = self._hidden = self._depths = None
        return finished

    def _step(self, tokens):
        """Run the body on the last token of every row that goes on."""
        self._hidden = self.policy.body_step(tokens, self._cache, self._depths)
        self._depths = self._depths + 1
