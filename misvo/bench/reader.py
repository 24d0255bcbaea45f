"""What a reader sees of a response beside its reward: coherence, fluency, and a reward that no method was given.

The encoder, the judge and the held-out reward load once, as soon as a session has something to do: what is missing is
said before hours of work and not behind them.
"""

from dataclasses import dataclass
from functools import cached_property

from misvo import metrics, tasks
from misvo.prompts import Prompt
from misvo.rewards import score


@dataclass(frozen=True)
class Text:
    """A response as text and tokens."""

    text: str
    tokens: list[int]


class Reader:
    def __init__(self, encoder: str, judge: str | None = None, held_out: str | None = None):
        self._encoder, self._judge, self._held_out = encoder, judge, held_out

    @cached_property
    def _named_encoder(self):
        return metrics.load_encoder(self._encoder)

    @property
    def encoder_name(self) -> str:
        """The encoder that is used; `auto` has to load one to know."""
        return self._named_encoder[0] if self._encoder == "auto" else self._encoder

    @property
    def encoder(self):
        return self._named_encoder[1]

    @cached_property
    def judge(self):
        if self._judge is None:
            return None
        from misvo.judge import Judge

        return Judge.from_pretrained(self._judge)

    @cached_property
    def held_out(self):
        return None if self._held_out is None else tasks.load_reward(self._held_out)

    def load(self) -> "Reader":
        """Have everything ready; MisvoError where something is not installed."""
        _ = self.encoder, self.judge, self.held_out
        return self

    def read(self, prompt: Prompt, columns: dict, responses: list[Text]) -> list[dict]:
        """Figures of responses to one prompt: coherence, fluency and held_out, None where nobody was asked."""
        texts = [response.text for response in responses]
        blank: list[float | None] = [None] * len(texts)
        close = blank if self.encoder is None else [metrics.coherence(self.encoder, prompt, text) for text in texts]
        fluent = blank if self.judge is None else self.judge.fluency([prompt] * len(texts), texts)
        rewards = blank
        if self.held_out is not None:
            rewards = list(score(self.held_out, prompt, texts, [response.tokens for response in responses], columns))
        return [
            {"coherence": one, "fluency": two, "held_out": three}
            for one, two, three in zip(close, fluent, rewards, strict=True)
        ]
