"""An enumerable policy of misvo.theory dressed as a policy that the decoding engine runs: the body is a table."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from misvo import cache as kv
from misvo.head import Head
from misvo.model import Prefix
from misvo.own_sampler import OwnSampler


def history_cache(index: int = 0) -> DynamicCache:
    """A cache of transformers' own whose only state is the index of the prefix that each row has sampled."""
    layer = LinearAttentionLayer()
    layer.conv_states[0] = torch.tensor([index])
    layer.is_conv_states_initialized[0], layer.device = True, torch.device("cpu")
    cache = DynamicCache()
    cache.layers = [layer]
    return cache


class EnumerablePolicy:
    name, ends, own_sampler = "enumerable", (), OwnSampler()

    def __init__(self, tabular):
        self.tabular = tabular
        self.head = Head(torch.tensor(tabular.head), torch.tensor(tabular.bias))
        self.eos_tokens = torch.tensor([], dtype=torch.long)
        self.hidden = [torch.tensor(table) for table in tabular.hidden]

    def prefill(self, tokens, max_new_tokens):
        return Prefix(0, history_cache(), self.hidden[0])

    def extend(self, prompt, prefix, tokens):
        index = 0
        for token in tokens:
            index = index * self.tabular.vocabulary + token
        return Prefix(len(tokens), history_cache(index), self.hidden[len(tokens)][index : index + 1])

    def replicate(self, prefix, rows, room, common=None):
        return kv.replicate(prefix.cache, rows, room)

    def body_step(self, tokens, cache, depths):
        states = cache.layers[0].conv_states
        states[0] = states[0] * self.tabular.vocabulary + tokens
        table = int(depths[0]) + 1
        # behind the last token there is no state any more: nobody looks at it
        return self.hidden[table][states[0]] if table < len(self.hidden) else self.hidden[0].expand(len(tokens), -1)
