"""`MisvoLM`: a steered model in EleutherAI's lm-evaluation-harness.

    python -m misvo.integrations.lm_eval run --model misvo --tasks TASK \\
        --model_args pretrained=smollm2-135m,reward=words:20-40,rollouts=8,steps=4

Responses of `generate_until` tasks are steered toward the reward, one run for each request. Log-likelihoods are those
of the model as it is: a steering belongs to one prompt and one reward, and multiple-choice tasks have neither. Without
a reward, responses too are the model's own, as `--model hf` gives them, which makes the baseline.

`model_args` are a reward as on the command line of misvo, settings of `misvo.steer` by name, `columns=a+b` (fields of a
task's documents that the reward is handed) with `oracle=true` or `oracle=false`, and arguments of lm-eval's `hf` model.
A harness asks for greedy responses by default; steering samples, with what a task says of a sampler where it samples
too, else as the model came.
"""

import logging
from collections import Counter

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from misvo.calls import steer_many
from misvo.errors import MisvoError
from misvo.options import SettingsOptions
from misvo.policy import Policy
from misvo.rewards import load
from misvo.settings import LOAD_OPTIONS, SAMPLER, Settings

logger = logging.getLogger("lm-eval")
# Arguments of lm-eval's model that mean something when the model is loaded already.
OF_HFLM = (
    "add_bos_token",
    "batch_size",
    "chat_template_args",
    "enable_thinking",
    "logits_cache",
    "max_batch_size",
    "max_length",
    "mixed_precision_dtype",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "truncation",
)
TOGETHER = 16  # prompts that are steered in one batch, where batch_size does not say


@register_model("misvo")
class MisvoLM(HFLM):
    """lm-eval's `hf` model with steered responses."""

    def __init__(self, pretrained="smollm2-135m", reward=None, columns=None, oracle=None, preset="auto", **others):
        names = SettingsOptions.__annotations__
        self.options = {name: others.pop(name) for name in list(others) if name in names}
        Settings.from_preset(preset, **self.options)  # a wrong name or value is refused before the model loads
        self.options["preset"] = preset
        self.columns = columns.split("+") if isinstance(columns, str) else list(columns or [])
        if self.columns and oracle is None:
            raise MisvoError(
                f"the reward is handed {' and '.join(self.columns)}: say oracle=true where a task's answer is among "
                "these, since its scores are then those of a model that knows the answer, else oracle=false."
            )
        self.reward_spec, self.oracle = reward, bool(oracle)
        self.reward = None if reward is None else load(reward) if isinstance(reward, str) else reward
        loading = {name: others.pop(name) for name in LOAD_OPTIONS if name in others}
        for name in others:
            if name not in OF_HFLM:
                raise MisvoError(
                    f"{name} is no setting of misvo, no option of loading and no argument of lm-eval's hf."
                )
        self.policy = pretrained if isinstance(pretrained, Policy) else Policy.from_pretrained(pretrained, **loading)
        super().__init__(pretrained=self.policy.model, tokenizer=self.policy.tokenizer, **others)
        self.pretrained = self.policy.name
        if isinstance(self.think_end_token, int):
            raise MisvoError("think_end_token is the text that ends thinking, such as </think>, not a token id.")
        if self.oracle:
            logger.warning("The reward is handed the answers (oracle=true): these are no scores of the model alone.")

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """A response for each request: the best of a run that steers toward the reward."""
        if self.reward is None:
            return super().generate_until(requests, disable_tqdm)
        jobs = [_Job(index, request) for index, request in enumerate(requests)]
        seen: Counter = Counter()
        for job in jobs:  # a request that is repeated wants another answer, so it has another seed
            job.seed, seen[job.key] = seen[job.key], seen[job.key] + 1
        answers = [""] * len(jobs)
        together = TOGETHER if self.batch_size in ("auto", 1) else int(self.batch_size)
        groups: dict[str, list[_Job]] = {}
        for job in jobs:
            groups.setdefault(job.group, []).append(job)
        with tqdm(total=len(jobs), disable=disable_tqdm, desc="Steering generate_until requests") as bar:
            for group in groups.values():
                for start in range(0, len(group), together):
                    batch = group[start : start + together]
                    for job, answer in zip(batch, self._answers(batch), strict=True):
                        answers[job.index] = answer
                        self.cache_hook.add_partial("generate_until", job.arguments, answer)
                        bar.update(1)
        return answers

    def _answers(self, batch) -> list[str]:
        """The responses to requests that are sampled alike."""
        asked = normalize_gen_kwargs(batch[0].arguments[1], self.max_gen_toks)
        until, length = [text for text in asked.pop("until", None) or [] if text], asked.pop("max_gen_toks")
        options = {**_sampler(asked), "max_new_tokens": length, "stop": tuple(until), **self.options}
        options["seed"] = self.options.get("seed", 0) + batch[0].seed
        room = self.max_length - options["max_new_tokens"]
        prompts = [self.tok_encode(job.arguments[0], left_truncate_len=room) for job in batch]
        rows = [{name: _field(job.document, name) for name in self.columns} for job in batch]
        results = steer_many(self.policy, prompts, self.reward, columns=rows, progress=False, **options)
        return [postprocess_generated_text(result.text, until, self.think_end_token) for result in results]

    def get_model_info(self) -> dict:
        """What lm-eval writes beside its scores: how responses came about, in words that cannot be missed."""
        told = {} if self.reward is None else {**self.options, "reward": str(self.reward_spec), "columns": self.columns}
        steered = {**told, "oracle": self.oracle, "loglikelihoods": "of the model as it is, not steered"}
        return {**super().get_model_info(), "misvo": steered}


class _Job:
    """One request of the harness."""

    def __init__(self, index: int, request):
        self.index, self.arguments, self.document = index, request.args, request.doc
        self.seed = 0  # how many requests before it asked the same
        self.key = (request.task_name, request.doc_id, self.arguments[0])

    @property
    def group(self) -> str:
        """What is the same for requests that can be steered in one batch."""
        return repr((sorted(self.arguments[1].items(), key=str), self.seed))


def _sampler(asked: dict) -> dict:
    """What a task says of the sampler, where it samples; what else it says must be something that misvo has."""
    samples = asked.pop("do_sample")
    told = {name: asked.pop(name) for name in SAMPLER if name in asked}
    if asked:
        raise MisvoError(f"the task sets {' and '.join(asked)}, which a steered model does not have.")
    return told if samples else {}


def _field(document: dict, name: str):
    if name not in document:
        raise MisvoError(f"the documents have no field {name!r}: they have {', '.join(document)}.")
    return document[name]


def main() -> None:
    """lm-eval's own command line with `misvo` among its models, for releases that do not look for it themselves."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
