"""Batched decoding: many requests in flight, each K rollouts of one prompt under one intervention.

The engine reads like the loop that it is: admit waiting rows, turn hidden states into laws and laws into tokens,
record what the methods need, let ended rows leave the batch, run the body on the rest. Per row and position it
keeps d numbers (the expected head row), never V; laws wait for their product with W until there are enough of them
to make it worth while. What it deliberately leaves out: text, rewards and updates.
"""

import time
import warnings
from collections import deque
from dataclasses import dataclass, field

import torch

from misvo import cache as kv
from misvo.errors import MisvoError
from misvo.head import centred, softmax, token_kl
from misvo.laws import Laws
from misvo.rollouts import Request, Rollouts
from misvo.sampling import Sampler


@dataclass
class _Job:
    """A request under way: its buffers, the keys of its races and how many rows have not ended."""

    request: Request
    rollouts: Rollouts
    keys: torch.Tensor  # (K, T)
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
    _finished: list = field(default_factory=list)
    _laws: Laws = None

    def __post_init__(self):
        self._laws = Laws(self.policy.head)

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

    def advance(self) -> list[Rollouts]:
        """One token for every row in flight; returns the rollouts that this token finished.

        Where memory runs out, the requests in flight begin again with half as many rows at a time.
        """
        started, exhausted = time.perf_counter(), None
        try:
            segments = self._advance()
        except RuntimeError as error:  # what is bound in its frames is let go when this block ends
            if not _out_of_memory(error):
                raise
            exhausted = str(error)
        if exhausted is not None:
            self._begin_again(exhausted)
            segments = []
        elapsed, rows = time.perf_counter() - started, sum(len(segment.rows) for segment in segments)
        for segment in segments:
            segment.job.rollouts.seconds += elapsed * len(segment.rows) / rows
        finished, self._finished = self._finished, []
        return finished

    @torch.no_grad()
    def _advance(self):
        """The loop's one turn; gives the segments that took part in it."""
        self._admit()
        segments = self._segments
        tokens = self._sample()
        ended = self._ends(tokens)
        complete = self._count(ended)
        if complete:
            self._laws.flush()  # before they are told to be finished: where memory runs out here, they begin again
        self._finished += complete
        self._retire(ended)
        if self._segments:
            self._step(tokens[~ended])
        return segments

    def _begin_again(self, reason):
        """Halve the rows and put every request in flight back to its beginning.

        Random numbers have addresses, so the tokens will be the same.
        """
        rows = sum(len(segment.rows) for segment in self._segments or [self._waiting[0]])
        if rows <= 1:
            raise MisvoError(f"there is not enough memory to decode a single row of this prompt ({reason}).")
        self.max_rows = rows // 2
        warnings.warn(f"out of memory with {rows} rows at once: going on with {self.max_rows}.", stacklevel=3)
        jobs = list({id(segment.job): segment.job for segment in self._segments}.values())
        waiting = [segment for segment in self._waiting if all(segment.job is not job for job in jobs)]
        for job in jobs:
            job.unfinished = len(job.request.rollouts)
            if job.rollouts.mean_probs is not None:
                job.rollouts.mean_probs.zero_()
            waiting.append(_Segment(job, torch.arange(job.unfinished)))
        self._waiting = deque(
            _Segment(segment.job, rows) for segment in waiting for rows in segment.rows.split(self.max_rows)
        )
        self._segments, self._cache, self._hidden, self._depths = [], None, None, None
        self._laws = Laws(self.policy.head)
        if self.policy.head.device.type == "cuda":
            torch.cuda.empty_cache()

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
            mean_probs=zeros(laws, head.vocab_size, dtype=request.law_dtype or dtype) if request.keep_fisher else None,
            hidden=zeros(*state, dtype=head.weight.dtype) if request.keep_hidden else None,
        )
        if request.keep_fisher:  # where the score and the Fisher matrix speak of the same law, one buffer serves both
            shared = request.keep_scores and self.sampler.samples_whole_law and request.keep_fisher == "steered"
            rollouts.fisher_rows = rollouts.score_rows if shared else zeros(*state)
        keys = request.stream.keys(request.step, request.rollouts, length).to(device)
        return _Job(request, rollouts, keys, unfinished=rows)

    def _admit(self):
        """Move waiting segments into the batch while there is room for them whole."""
        while self._waiting:
            rows = sum(len(segment.rows) for segment in self._segments)
            segment = self._waiting[0]
            if self._segments and rows + len(segment.rows) > self.max_rows:
                return
            prefix, count = segment.job.request.prefix, len(segment.rows)
            depth = torch.full((count,), prefix.length)
            hidden, room = prefix.hidden.expand(count, -1), segment.job.request.max_new_tokens
            if not self._segments:
                self._cache = self.policy.replicate(prefix, count, room)
                self._hidden, self._depths = hidden, depth
            else:
                kv.join(self._cache, prefix.cache, count, room)
                self._hidden = torch.cat([self._hidden, hidden])
                self._depths = torch.cat([self._depths, depth])
            self._segments = [*self._segments, segment]
            self._waiting.popleft()  # last, so that a segment for which there was no memory still waits

    def _blocks(self):
        """Each segment with the slice of the batch that it occupies."""
        start = 0
        for segment in self._segments:
            yield segment, slice(start, start + len(segment.rows))
            start += len(segment.rows)

    def _sample(self):
        """Draw the next token of every row, and hand each segment its part of what the laws say."""
        head, sampler, rows = self.policy.head, self.sampler, len(self._hidden)
        logits = head.logits(self._hidden)  # (B, V)
        if sampler.temperature != 1.0:
            logits.div_(sampler.temperature)
        logits, probs = centred(logits), self._laws.space(rows)
        shifts = [self._shift(segment, block) for segment, block in self._blocks()]
        laws = [
            self._law(segment, shift, logits[block], probs[block])
            for shift, (segment, block) in zip(shifts, self._blocks(), strict=True)
        ]
        partition, ref_partition, kl = (torch.cat(values) for values in zip(*laws, strict=True))
        keys = torch.cat([s.job.keys[s.rows, s.position] for s in self._segments])
        tokens, kept = sampler.draw(probs, keys)
        chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
        record = {
            "tokens": tokens,
            "kl": kl,
            "logprobs": chosen - partition,
            "ref_logprobs": chosen - self._at(shifts, tokens) - ref_partition,
            "hidden": self._hidden,
        }
        if kept is not None and any(segment.job.request.keep_scores for segment in self._segments):
            record["score_rows"] = head.project(kept) if torch.is_tensor(kept) else head.project_entries(kept)
        wanted = []
        for segment, block in self._blocks():
            wanted += self._record(segment, block, record, probs[block], dense=kept is None)
        self._laws.keep(wanted, rows)
        return tokens

    def _law(self, segment, shift, logits, probs):
        """Add a segment's shift to its logits and write its law to `probs`; gives A, A of the reference law, and KL."""
        _, ref_partition = softmax(logits, out=probs)
        if segment.job.request.keep_fisher == "reference":
            self._keep_mean(segment, probs)
            segment.job.rollouts.fisher_rows[segment.rows, segment.position] = self.policy.head.project(probs)
        if shift is None:
            return ref_partition, ref_partition, torch.zeros_like(ref_partition)
        _, partition = softmax(logits.add_(shift), out=probs)
        return partition, ref_partition, token_kl(ref_partition, partition, probs, shift)

    def _at(self, shifts, tokens):
        """How far the shifts moved the logits of the chosen tokens, (B,)."""
        moved = torch.zeros(len(tokens), dtype=self.policy.head.dtype, device=tokens.device)
        for shift, (_, block) in zip(shifts, self._blocks(), strict=True):
            if shift is not None:
                moved[block] = shift.expand(block.stop - block.start, -1).gather(-1, tokens[block, None]).squeeze(-1)
        return moved

    def _record(self, segment, block, record, law, dense):
        """Write a segment's part of the record, and say which expected rows of its laws are still wanted, and where."""
        request, out, rows, t = segment.job.request, segment.job.rollouts, segment.rows, segment.position
        out.lengths[rows] = t + 1
        for name, value in record.items():
            buffer = getattr(out, name)
            if buffer is not None:
                buffer[rows, t] = value[block].to(buffer.dtype)
        wanted = [out.score_rows] if request.keep_scores and dense else []
        if request.keep_fisher == "steered":
            self._keep_mean(segment, law)
            if out.fisher_rows is not out.score_rows:
                wanted.append(out.fisher_rows)
        return [(block, target, (rows, t)) for target in wanted]

    def _keep_mean(self, segment, law):
        """Add the segment's share to p̄ of its position, or to the laws that positions pool."""
        request, t = segment.job.request, segment.position
        mean = law.sum(0).div_(len(request.rollouts))
        pooled = {t: 1.0} if request.pool is None else dict(enumerate(request.pool[t].tolist()))
        for index, weight in pooled.items():
            if weight:
                segment.job.rollouts.mean_probs[index].add_(mean, alpha=weight)

    def _shift(self, segment, block):
        """Wu/τ of a segment, (V,) when its rows share it, (B, V) when they do not, None for the reference policy."""
        request, t, shift = segment.job.request, segment.position, None
        if request.intervene is not None:
            vectors = request.intervene(segment.rows, t, self._hidden[block])
            shift = None if vectors is None else self.policy.head.shift(vectors)
        elif request.shift is not None and t < len(request.shift):
            shift = request.shift[t]
        return shift if shift is None or self.sampler.temperature == 1.0 else shift / self.sampler.temperature

    def _ends(self, tokens):
        """Which rows have drawn their last token, (B,) bool on the host: the loop's one synchronisation."""
        last = torch.cat(
            [
                torch.full((len(segment.rows),), segment.position + 1 == segment.job.request.max_new_tokens)
                for segment in self._segments
            ]
        )
        return last | torch.isin(tokens, self.policy.eos_tokens.to(tokens.device)).cpu()

    def _count(self, ended):
        """Take ended rows off what their requests wait for; gives the rollouts of requests that are complete."""
        for segment, block in self._blocks():
            segment.job.unfinished -= int(ended[block].sum())
        complete = {id(segment.job): segment.job for segment in self._segments if segment.job.unfinished == 0}
        return [job.rollouts for job in complete.values()]

    def _retire(self, ended):
        """Let ended rows leave the batch."""
        segments = []
        for segment, block in self._blocks():
            stays = ~ended[block]
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
            if not self._waiting:  # all requests are complete, so no law waits for its product either
                self._laws = Laws(self.policy.head)

    def _step(self, tokens):
        """Run the body on the last token of every row that goes on."""
        self._hidden = self.policy.body_step(tokens, self._cache, self._depths)
        self._depths = self._depths + 1


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
