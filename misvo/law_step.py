"""Hidden states to token distributions, distributions to tokens and records: one decoding step of the LM head.

It knows nothing of caches, prompts or schedules, so that every engine can run it where its hidden states are. Per row
and position it keeps d numbers (the expected head row), never V; distributions wait for their product with W until
there are enough of them to make it worth while (`misvo.projection`).
"""

from dataclasses import dataclass
from itertools import compress, groupby

import torch

from misvo.errors import MisvoError
from misvo.head import Head, Shift, centred, softmax, token_kl
from misvo.interventions import Vectors
from misvo.projection import Projection
from misvo.race import Entries
from misvo.rollouts import Request, Rollouts
from misvo.sampling import RandomStream, Sampler

LARGEST = 1e37  # of Wu/τ: beyond it, sums are no longer numbers in fp32
TOO_STRONG = "steering is so strong that probabilities are no longer numbers: take smaller steps or less noise."


@dataclass
class Job:
    """A request under way: its buffers, the keys of its races, Wu where all of its rows share it."""

    request: Request
    rollouts: Rollouts
    keys: torch.Tensor  # (K, T)
    numbers: torch.Tensor  # (K,) of its rollouts
    shift: Shift | None
    unfinished: int  # rows that have not ended

    def ended(self, rows: torch.Tensor) -> None:
        """Rows that have ended by themselves."""
        assert self.rollouts.ended is not None
        self.rollouts.ended[rows] = True


@dataclass
class Group:
    """Rows of one job that stand at one position, and lie side by side in the batch."""

    job: Job
    rows: torch.Tensor  # indices into the job's buffers
    position: int = 0


@dataclass(frozen=True)
class _Laws:
    """What one step found for the rows of a group."""

    shift: torch.Tensor | None  # Wu/τ, (V,) or (B, V)
    partition: torch.Tensor  # A of the law, (B,)
    ref_partition: torch.Tensor
    kl: torch.Tensor
    ref_tokens: torch.Tensor | None  # what the reference law draws from the same races, (B,), where it is another law
    ref_kept: torch.Tensor | Entries | None = None  # what anchored rows draw from, where that is not all of the law


class LawStep:
    def __init__(self, head: Head):
        self.head, self.projection = head, Projection(head)

    def open(self, request: Request) -> Job:
        """Make the buffers of a request."""
        head, keep, rows, length = self.head, request.keep, len(request.rollouts), request.max_new_tokens
        state, laws = (rows, length, head.hidden_size), length if keep.pool is None else keep.pool.shape[1]
        columns = head.part.stop - head.part.start
        shared = request.intervention if isinstance(request.intervention, Vectors) else None
        if shared is not None and not self._reach(request, shared) < LARGEST:  # NaN is not, either
            raise MisvoError(TOO_STRONG)

        def zeros(*shape, dtype=head.dtype):
            return torch.zeros(*shape, dtype=dtype, device=head.device)

        rollouts = Rollouts(
            tokens=zeros(rows, length, dtype=torch.long),
            lengths=zeros(rows, dtype=torch.long),
            kl=zeros(rows, length),
            logprobs=zeros(rows, length),
            ref_logprobs=zeros(rows, length),
            ended=zeros(rows, dtype=torch.bool),
            changed=None if request.intervention is None else zeros(rows, length, dtype=torch.bool),
            score_rows=zeros(*state) if keep.scores else None,
            mean_probs=zeros(laws, columns, dtype=keep.law_dtype or head.dtype) if keep.fisher else None,
            hidden=zeros(*state, dtype=head.weight.dtype) if keep.hidden else None,
            squares=None if request.intervention is shared else zeros(rows, length),  # both may be None
            log_ratios=zeros(rows, length) if request.anchored else None,
        )
        for row, beginning in enumerate(request.beginnings):
            rollouts.tokens[row, : len(beginning)] = torch.tensor(beginning, dtype=torch.long)
            rollouts.lengths[row] = len(beginning)
        if keep.fisher:  # where the score and the Fisher matrix speak of the same law, one buffer serves both
            same = keep.scores and request.sampler.samples_whole_law and keep.fisher == "steered"
            rollouts.fisher_rows = rollouts.score_rows if same else zeros(*state)
        keys = RandomStream(request.seed, request.prompt).keys(request.step, request.rollouts, length).to(head.device)
        shift = None if shared is None else Shift(head, shared.free, shared.tie)
        return Job(request, rollouts, keys, torch.tensor(list(request.rollouts)), shift, unfinished=rows)

    def _reach(self, request: Request, vectors: Vectors) -> float:
        """A bound of |Wu/τ|. What is beyond all numbers is refused here: later it would stop its batch mates too."""
        norms = torch.linalg.vector_norm(vectors.free, dim=-1, dtype=torch.float64)  # squares overflow before sums do
        return norms.max().item() * self.head.longest_row / request.sampler.temperature

    def begin_again(self, job: Job) -> None:
        """Forget what a job has gathered; all else is written over as its rows are decoded once more."""
        job.unfinished = len(job.request.rollouts)
        job.rollouts.drawn = 0
        if job.rollouts.ended is not None:
            job.rollouts.ended.zero_()
        if isinstance(job.rollouts.mean_probs, torch.Tensor):
            job.rollouts.mean_probs.zero_()

    def forget(self) -> None:
        """Drop distributions that wait for their product."""
        self.projection = Projection(self.head)

    def draw(self, groups: list[Group], hidden: torch.Tensor) -> torch.Tensor:
        """The next token of every row, (B,), from the states (B, d) of all groups in their order; records the rest."""
        logits = self.head.logits(hidden)  # (B, V)
        Shift.make([(group.job.shift, group.position) for group in groups if group.job.shift is not None])
        probs, tokens, wanted, start = self.projection.space(len(hidden)), [], [], 0
        for sampler, run in groupby(groups, key=lambda group: group.job.request.sampler):
            alike = list(run)
            block = slice(start, start + sum(len(group.rows) for group in alike))
            drawn, rows = self._draw_alike(sampler, alike, hidden[block], logits[block], probs[block])
            tokens.append(drawn)
            wanted += [(slice(start + part.start, start + part.stop), *where) for part, *where in rows]
            start = block.stop
        self.projection.keep(wanted, len(hidden))
        return torch.cat(tokens)

    def flush(self) -> None:
        """Bring all records up to date; to be called before rollouts are handed out."""
        self.projection.flush()

    def _draw_alike(self, sampler: Sampler, groups, hidden, logits, probs):
        """Tokens of groups that share a sampler, and which expected rows of their laws are still wanted, and where."""
        blocks = _blocks(groups)
        positions = torch.cat([torch.full((len(group.rows),), group.position) for group in groups])
        logits = centred(sampler.tempered(logits, positions))
        keys = torch.cat([group.job.keys[group.rows, group.position] for group in groups])
        _, ref_partition = softmax(logits, out=probs)
        self._keep_reference(groups, blocks, probs)
        shifts = self._shifts(sampler, groups, blocks, hidden)
        draws = _reference_draws(sampler, groups, blocks, shifts, probs, keys)
        laws = [
            _steer(shift, logits[block], probs[block], ref_partition[block], *drawn)
            for block, shift, drawn in zip(blocks, shifts, draws, strict=True)
        ]
        if probs[:, 0].isnan().any():  # one logit that is not finite makes all of its row NaN
            raise MisvoError(TOO_STRONG)
        tokens, kept = self._draw(sampler, blocks, laws, probs, keys)
        chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
        rows = None  # the expected rows of a law that is not the whole one
        if kept is not None and any(group.job.request.keep.scores for group in groups):
            rows = self.head.project(kept) if torch.is_tensor(kept) else self.head.project_entries(kept)
        wanted = []
        for group, block, law in zip(groups, blocks, laws, strict=True):
            record = {
                "tokens": tokens[block],
                "kl": law.kl,
                "logprobs": chosen[block] - law.partition,
                "ref_logprobs": chosen[block] - _at(law.shift, tokens[block]) - law.ref_partition,
                "hidden": hidden[block],
            }
            if law.ref_tokens is not None:
                record["changed"] = tokens[block] != law.ref_tokens
                record["log_ratios"] = record["ref_logprobs"] - record["logprobs"]
                if kept is not None and law.ref_kept is not None:
                    before, after = _mass(law.ref_kept, tokens[block]), _mass(kept, tokens)[block]
                    record["log_ratios"] = before.log() - after.log()
            if rows is not None:
                record["score_rows"] = rows[block]
            targets = self._record(group, record, probs[block], whole=kept is None)
            wanted += [(block, target, (group.rows, group.position)) for target in targets]
        return tokens, wanted

    def _draw(self, sampler, blocks, laws, probs, keys):
        """A token for every row, and the laws that they come from where these are not the whole ones.

        Anchored groups draw from what their law gives the tokens that the reference keeps.
        """
        if all(law.ref_kept is None for law in laws):
            return sampler.draw(probs, keys)
        tokens, kept = [], []
        for block, law in zip(blocks, laws, strict=True):
            drawn, left = sampler.draw(probs[block], keys[block], law.ref_kept)
            tokens.append(drawn)
            kept.append(left)
        return torch.cat(tokens), Entries.join(kept) if isinstance(kept[0], Entries) else torch.cat(kept)

    def _keep_reference(self, groups, blocks, probs):
        """p̄ and Wᵀp of the reference's laws where they are wanted, all rows in one product, before they are steered."""
        wanted = [group.job.request.keep.fisher == "reference" for group in groups]
        if not any(wanted):
            return
        expected = self.head.project(probs)
        for group, block in compress(zip(groups, blocks, strict=True), wanted):
            self._keep_mean(group, probs[block])
            group.job.rollouts.fisher_rows[group.rows, group.position] = expected[block]

    def _shifts(self, sampler, groups, blocks, hidden) -> list[torch.Tensor | None]:
        """Wu/τ of each group, (V,) when its rows share it, (B, V) when they do not, None for the reference policy.

        Vectors that rows do not share are multiplied together, whatever their group.
        """
        shifts: list[torch.Tensor | None] = [None] * len(groups)
        temperature, own = sampler.temperature, {}
        for index, (group, block) in enumerate(zip(groups, blocks, strict=True)):
            job, position = group.job, group.position
            if job.shift is not None:
                if position < len(job.shift):
                    shifts[index] = job.shift[position] if temperature == 1.0 else job.shift[position] / temperature
            elif job.request.intervention is not None:
                vectors = job.request.intervention.at(job.numbers[group.rows], position, hidden[block])
                if vectors is not None:
                    own[index] = vectors.to(self.head.dtype)
                    job.rollouts.squares[group.rows, position] = own[index].square().sum(-1)
        if own:
            product = self.head.shift(torch.cat(list(own.values())))
            if temperature != 1.0:
                product.div_(temperature)
            for index, rows in zip(own, product.split([len(vectors) for vectors in own.values()]), strict=True):
                shifts[index] = rows
        return shifts

    def _record(self, group, record, law, whole):
        """Write a group's part of the record; gives the buffers whose rows Wᵀp of its law will fill."""
        keep, out, place = group.job.request.keep, group.job.rollouts, (group.rows, group.position)
        out.lengths[group.rows] = group.position + 1
        out.drawn += len(group.rows)
        for name, value in record.items():
            buffer = getattr(out, name)
            if buffer is not None:
                buffer[place] = value.to(buffer.dtype)
        targets = [out.score_rows] if keep.scores and whole else []
        if keep.fisher == "steered":
            self._keep_mean(group, law)
            if out.fisher_rows is not out.score_rows:
                targets.append(out.fisher_rows)
        return targets

    def _keep_mean(self, group, law):
        """Add the group's share to p̄ of its position, or to the laws that positions pool."""
        request, position = group.job.request, group.position
        mean, pool = law[:, self.head.part].sum(0).div_(len(request.rollouts)), request.keep.pool
        pooled = {position: 1.0} if pool is None else dict(enumerate(pool[position].tolist()))
        for index, weight in pooled.items():
            if weight:
                group.job.rollouts.mean_probs[index].add_(mean, alpha=weight)


def _blocks(groups) -> list[slice]:
    """The part of the batch that each group occupies."""
    blocks, start = [], 0
    for group in groups:
        blocks.append(slice(start, start + len(group.rows)))
        start += len(group.rows)
    return blocks


def _steer(shift, logits, probs, ref_partition, ref_tokens, ref_kept) -> _Laws:
    """Add a shift to the logits of a group and write its law in the place of the reference's, to `probs`."""
    if shift is None:
        return _Laws(None, ref_partition, ref_partition, torch.zeros_like(ref_partition), None)
    _, partition = softmax(logits.add_(shift), out=probs)
    kl = token_kl(ref_partition, partition, probs, shift)
    return _Laws(shift, partition, ref_partition, kl, ref_tokens, ref_kept)


def _reference_draws(sampler, groups, blocks, shifts, probs, keys) -> list[tuple]:
    """For every group that a shift moves: the tokens that the reference's laws draw with the same random numbers, and,
    for anchored ones, the truncated laws that these come from. Neighbouring groups draw together."""
    draws: list[tuple] = []
    for moved, run in groupby(zip(groups, blocks, shifts, strict=True), key=lambda each: each[2] is not None):
        alike = [(group, block) for group, block, _ in run]
        if not moved:
            draws += [(None, None)] * len(alike)
            continue
        start, stop = alike[0][1].start, alike[-1][1].stop
        tokens, kept = sampler.draw(probs[start:stop], keys[start:stop])
        for group, block in alike:
            rows = slice(block.start - start, block.stop - start)
            wanted = group.job.request.anchored and kept is not None
            draws.append((tokens[rows], _rows_of(kept, rows) if wanted else None))
    return draws


def _rows_of(law: torch.Tensor | Entries, rows: slice) -> torch.Tensor | Entries:
    return law.rows_of(rows) if isinstance(law, Entries) else law[rows]


def _at(shift, tokens):
    """How far a shift moved the logits of the chosen tokens, (B,), or 0."""
    return 0.0 if shift is None else shift.expand(len(tokens), -1).gather(-1, tokens[:, None]).squeeze(-1)


def _mass(law: torch.Tensor | Entries, tokens: torch.Tensor) -> torch.Tensor:
    """What a law gives the chosen tokens, (B,)."""
    return law.at(tokens) if isinstance(law, Entries) else law.gather(-1, tokens[:, None]).squeeze(-1)
