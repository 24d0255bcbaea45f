"""Attention of rows that have a prompt in common: its keys and values are kept once, and read once for all rows.

A row of a batch looks at the prompt and at tokens of its own. Over the prompt all rows that have it in common ask
together, as the queries of one sequence; over its own tokens each row asks alone. The two are joined by their
log-sum-exps: with o the outcome and l the log-sum-exp of each part, (e^l₁ o₁ + e^l₂ o₂) / (e^l₁ + e^l₂) is attention
over both.

Products of very few queries round otherwise than those of many, so queries are filled up to whole `QUERIES`: then the
outcome of a row does not depend on how many rows ask beside it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # what sdpa calls, with its log-sum-exp
QUERIES = 16
Picked = torch.Tensor | slice | None  # rows of a batch; None for all of them


@dataclass(frozen=True)
class Part:
    """What some rows of a batch have in common."""

    rows: Picked  # a row has one part at most
    keys: torch.Tensor  # (1, groups, tokens, size)
    values: torch.Tensor


class RowKeys(torch.Tensor):
    """Keys of the rows of a batch that bring what attention must know to `scaled_dot_product_attention`: the mask of
    each row and the parts that rows have in common. They are plain keys to anything else.

    Attention layers that see no mask leave grouped heads grouped; the mask is added here, behind their back.
    """

    @classmethod
    def of(cls, keys, mask, parts=()):
        """Keys (rows, groups, columns, size), their mask (rows, 1, 1, columns), 0 or −∞, and parts."""
        made = keys.as_subclass(cls)
        made.mask, made.parts, made.attended = mask, parts, False
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is not scaled_dot_product_attention:
                return func(*args, **kwargs)
            query, keys, values, *rest = args
            if rest or kwargs.get("attn_mask") is not None:
                raise TypeError("keys that bring their mask met a second mask")
            keys.attended, plain = True, keys.as_subclass(torch.Tensor)
            if keys.parts:
                return attend(query, plain, values, keys.mask, keys.parts, kwargs.get("scale"))
            return func(query, plain, values, **{**kwargs, "attn_mask": keys.mask.to(query.dtype)})


def attend(query, keys, values, mask, parts, scale=None):
    """Attention over a row's own keys, where the mask allows, and over the part that it has; (rows, heads, 1, size)."""
    mask = mask if mask.dtype == query.dtype else mask.to(query.dtype)
    outcome, total = flash(query, keys, values, attn_mask=mask, scale=scale)  # total: (rows, heads, 1)
    if not parts:
        return outcome
    (rows, heads, _, size), groups = query.shape, keys.shape[1]
    shape = rows, groups, heads // groups, size
    query, one, one_total = query.reshape(shape), outcome.reshape(shape), total.reshape(shape[:-1])
    if parts[0].rows is None:
        return _joined(one, one_total, *_common(query, parts[0], scale)).reshape(outcome.shape)
    other, other_total = torch.zeros_like(one), torch.full_like(one_total, -torch.inf)  # of a row that has no part
    for part in parts:
        other[part.rows], other_total[part.rows] = _common(query[part.rows], part, scale)
    return _joined(one, one_total, other, other_total).reshape(outcome.shape)


def _common(query, part, scale):
    """Attention of all rows (rows, groups, heads of a group, size) over a part, as queries of one sequence: heads of a
    group ask the same keys. Gives the outcome and its log-sum-exps, as views."""
    rows, groups, heads, size = query.shape
    count = rows * heads
    asked = query.transpose(0, 1).reshape(1, groups, count, size)
    if missing := -count % QUERIES:
        asked = pad(asked, (0, 0, 0, missing))
    outcome, total = flash(asked, part.keys, part.values, scale=scale)
    if missing:
        outcome, total = outcome[:, :, :count], total[:, :, :count]
    return outcome.view(groups, rows, heads, size).transpose(0, 1), total.view(groups, rows, heads).transpose(0, 1)


def _joined(one, one_total, other, other_total):
    """Attention over two sets of keys, from that over each and their log-sum-exps."""
    # A softmax of two numbers is the same whatever stands beside them; a sigmoid of an array's last numbers is not.
    weight = torch.stack([one_total, other_total], -1).softmax(-1)[..., 1:]
    return ((other - one) * weight).add_(one).to(one.dtype)
