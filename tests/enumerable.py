"""An enumerable policy of misvo.theory dressed as a policy that the decoding engine runs: the body is a table."""

import copy

import torch

from misvo.head import Head
from misvo.model import Prefix
from misvo.own_sampler import OwnSampler


class HistoryCache:
    """What a transformer's cache is to its rows: here, the index of the prefix that each row has sampled."""

    def __init__(self):
        self.layers, self.slots, self.columns = [], None, None
        self.prefix = torch.zeros(1, dtype=torch.long)

    def reorder_cache(self, rows):
        self.prefix = self.prefix.index_select(0, rows)


class EnumerablePolicy:
    name, ends, own_sampler = "enumerable", (), OwnSampler()

    def __init__(self, tabular):
        self.tabular = tabular
        self.head = Head(torch.tensor(tabular.head), torch.tensor(tabular.bias))
        self.eos_tokens = torch.tensor([], dtype=torch.long)
        self.hidden = [torch.tensor(table) for table in tabular.hidden]

    def prefill(self, tokens, max_new_tokens):
        return Prefix(tokens, HistoryCache(), self.hidden[0])

    def replicate(self, prefix, rows, room):
        return copy.copy(prefix.cache)

    def body_step(self, tokens, cache, depths):
        cache.prefix = cache.prefix * self.tabular.vocabulary + tokens
        return self.hidden[int(depths[0])][cache.prefix]
