"""misvo in IBM's AISteer360: an output control whose logits processor adds vectors that `misvo serve` learns.

AISteer360 wants transformers below 5 and misvo 5.16 or later, so they run in two environments:

    misvo serve --model MODEL                                  # where misvo is installed

    control = Misvo(reward="contains:dark,room", options={"rollouts": 16, "steps": 6, "max_new_tokens": 64})
    pipeline = SteeringPipeline(model_name_or_path=MODEL, controls=[control])
    pipeline.steer()                                           # where AISteer360 is installed, in this folder
    pipeline.generate(input_ids, max_new_tokens=64, do_sample=True)

Vectors are learned for each prompt at its first `generate` and kept. They are added to the logits of the pipeline's own
model, so other controls go on working beside this one. Releases before 0.3 call `generate`, later ones
`get_logits_processors`: both are here.

Written against AISteer360's source (0.3.0, and the base classes before it); its package was not to be had where misvo
is tested, so **this control has not run inside AISteer360**. What it stands on, `vectors_in_generate.py`, is tested
with transformers and a real server, and the control itself with base classes written after AISteer360's
(`tests/test_aisteer360.py`).
"""

from dataclasses import dataclass, field

import torch
from aisteer360.algorithms.core.base_args import BaseArgs
from aisteer360.algorithms.output_control.base import OutputControl
from vectors_in_generate import SteeredLogits, learn


@dataclass
class MisvoArgs(BaseArgs):
    reward: str | dict | list = field(metadata={"help": "What to steer toward, as misvo's server takes it."})
    server: str = field(default="http://127.0.0.1:8000", metadata={"help": "Where `misvo serve` listens."})
    options: dict = field(default_factory=dict, metadata={"help": "Settings of a run: rollouts, steps, seed, …"})
    strength: float = field(default=1.0, metadata={"help": "What multiplies the vectors; 0 is the model as it is."})


class Misvo(OutputControl):
    """Samples from the model as misvo steered it for each prompt; `runtime_kwargs` may set another `strength`."""

    Args = MisvoArgs
    supports_batching = True

    def steer(self, model, tokenizer=None, **_):
        """Keep the model and see that its logits are those of a linear head, which vectors are made for."""
        self.model, self.tokenizer, self.learned = model, tokenizer, {}
        probe = torch.tensor([[0, 1, 2]], device=model.device)
        with torch.no_grad():
            out = model(probe, output_hidden_states=True)
            told = model.get_output_embeddings()(out.hidden_states[-1])
        if not torch.allclose(told, out.logits, rtol=1e-3, atol=1e-3):
            raise ValueError(
                "this model scales or caps its logits behind the head: vectors would not mean the same here."
            )
        return model

    def get_logits_processors(self, input_ids, runtime_kwargs, attention_mask=None, **_) -> list:
        strength = (runtime_kwargs or {}).get("strength", self.strength)
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [tuple(row[mask.bool()].tolist()) for row, mask in zip(input_ids, kept, strict=True)]
        for prompt in prompts:
            if prompt not in self.learned:
                learned = learn(self.server, self.tokenizer, list(prompt), self.reward, **self.options)
                self.learned[prompt] = learned[0].to(self.model.device), learned[1]
        steerings = [self.learned[prompt] for prompt in prompts]
        return [SteeredLogits(self.model, input_ids.shape[1], steerings, strength)]

    def generate(self, input_ids, attention_mask, runtime_kwargs, model, **gen_kwargs) -> torch.Tensor:
        processors = self.get_logits_processors(input_ids, runtime_kwargs, attention_mask)
        return model.generate(
            input_ids=input_ids, attention_mask=attention_mask, logits_processor=processors, **gen_kwargs
        )
