"""The sampler that a model came with: what its generation_config says, as far as it can be said exactly.

A sampler is part of the policy that is steered, so only what is a function of the next token's law (and of the
position) can be taken over. Penalties on what was said before, beams and watermarks are not; where a configuration
names one of those, it is left out, and `left_out` says so.
"""

from dataclasses import dataclass

# Where a model says nothing of how to sample from it. Temperature 1 lets small models babble, and nobody reads that.
USUAL = {"temperature": 0.7, "top_p": 0.9}
# What these are where a configuration names some of them only, in the words of transformers.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
# What transformers would apply and this cannot, and the value that does nothing.
NOT_TAKEN_OVER = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "num_beams": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "watermarking_config": None,
    "dola_layers": None,
}


@dataclass(frozen=True)
class OwnSampler:
    """What `Settings` take where they say None, and the names of what was left out."""

    temperature: float = USUAL["temperature"]
    top_p: float = USUAL["top_p"]
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, generation_config) -> "OwnSampler":
        """From the generation_config of a model, or from None."""
        named = {name: getattr(generation_config, name, None) for name in NEUTRAL}
        named = {name: value for name, value in named.items() if value is not None}
        if named.get("temperature") == 0:  # how some configurations say greedy; nothing can be learned from one answer
            del named["temperature"]
        stop = getattr(generation_config, "stop_strings", None) or ()
        return cls(
            **({**NEUTRAL, **named} if named else USUAL),
            min_new_tokens=getattr(generation_config, "min_new_tokens", None) or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            left_out=tuple(
                name
                for name, idle in NOT_TAKEN_OVER.items()
                if getattr(generation_config, name, None) not in (None, idle, [], {})
            ),
        )

    def resolve(self, wanted: dict) -> dict:
        """`wanted` with the model's own values in the place of None."""
        own = vars(self)
        return {name: own[name] if value is None and name in own else value for name, value in wanted.items()}

    @property
    def note(self) -> str | None:
        """One sentence about what was left out, where something was."""
        if not self.left_out:
            return None
        names = " and ".join(self.left_out)
        return f"the model's generation_config sets {names}, which steering cannot express: sampling goes without."
