"""`misvo.steer` and `misvo.steer_many`: one prompt or many on a session of their own, until they are done."""

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from misvo.errors import MisvoError
from misvo.options import Options
from misvo.policy import Policy
from misvo.progress import Progress
from misvo.prompts import Prompt
from misvo.result import Result
from misvo.rewards import AnyReward, as_reward
from misvo.session import Handle, Session
from misvo.settings import Settings, shows_settings

OnStep = Callable[[int, dict], None]  # (index of the prompt, the new trace row)


@shows_settings
def steer(
    policy: Policy | str,
    prompt: Prompt,
    reward: AnyReward,
    *,
    reward_weights: Sequence[float] | None = None,
    settings: Settings | None = None,
    columns: dict | None = None,
    on_step: OnStep | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Result:
    """Optimise steering vectors for one prompt and return the best response seen.

    `policy` is a `Policy`, or a name or folder that `Policy.from_pretrained` takes. `prompt` is a string, a list of
    chat messages (an assistant's last one is continued) or a list of token ids.

    `options` are `preset`, "auto" (no tuning: the default) or "paper" (Algorithm 1 as printed), and any field of
    `misvo.Settings`; `settings` is such an object in their place. A list of rewards is their sum with
    `reward_weights`. `columns` is a dict handed to the reward beside prompts and completions; `on_step(index, row)` is
    called with each new trace row. `progress` shows a line with steps, rewards, KL and time left on standard error:
    True does, False does not, None does in a terminal or a notebook when a run takes more than some seconds.

    A trace row has: step, mean, max and best reward, unscored (how many rewards were None), norm of u and sequence
    KL of the policy that was sampled (kl, kl_per_position), tokens, seconds by stage, a note where something was odd;
    parts (means of the parts of a sum and of numbers that the reward logged) and extra (texts that it logged).

    Where a run fails or somebody presses Ctrl-C, the MisvoError or KeyboardInterrupt has a `result`: what the run
    had until then, with the vectors of its last update.
    """
    rows = None if columns is None else [columns]
    try:
        return steer_many(
            policy,
            [prompt],
            reward,
            reward_weights=reward_weights,
            settings=settings,
            columns=rows,
            on_step=on_step,
            progress=progress,
            **options,
        )[0]
    except (KeyboardInterrupt, MisvoError) as error:
        vars(error).setdefault("result", vars(error).get("results", [None])[0])  # a RewardError has its own
        raise


@shows_settings
def steer_many(
    policy: Policy | str,
    prompts: Sequence[Prompt],
    reward: AnyReward,
    *,
    reward_weights: Sequence[float] | None = None,
    settings: Settings | None = None,
    columns: Sequence[dict] | None = None,
    on_step: OnStep | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> list[Result]:
    """Steer many prompts in one batch; each gets the result that `steer` would give it alone.

    A reward that fails ends its own prompt; when the others are done, its error is raised with their `results`. A
    KeyboardInterrupt has the `results` of all, as far as they had come.
    """
    if settings is not None and options:
        raise MisvoError(f"settings were given as an object, so {next(iter(options))!r} belongs into it.")
    settings = settings or Settings.from_preset(**options)
    if isinstance(prompts, str):
        raise MisvoError("steer_many takes a list of prompts: use steer for a single one.")
    if isinstance(columns, Mapping):
        raise MisvoError("columns of steer_many are a list with a dict for each prompt, such as [{'answer': 4}].")
    if columns is not None and len(columns) != len(prompts):
        raise MisvoError(f"there are {len(prompts)} prompts but {len(columns)} rows of columns.")
    if reward_weights is not None or isinstance(reward, list | tuple):
        reward = as_reward(reward, reward_weights)
    with Session(policy) as session:
        handles = [
            session.add(prompt, reward, settings, columns[index] if columns else None)
            for index, prompt in enumerate(prompts)
        ]
        try:
            with Progress(settings, len(handles), progress) as bar:
                _drive(session, handles, bar, on_step)
        except (KeyboardInterrupt, MisvoError) as error:
            for handle in handles:
                handle.run.settle()
            vars(error)["results"] = [handle.result for handle in handles]
            raise
    for handle in handles:
        if handle.error is not None:
            vars(handle.error)["results"] = [other.result if other.state == "done" else None for other in handles]
            raise handle.error
    return [handle.result for handle in handles]


def _drive(session: Session, handles: list[Handle], bar: Progress, on_step: OnStep | None) -> None:
    """Step until all prompts are done, and tell of it."""
    while session.busy:
        events = session.step()
        bar.tick()
        for event in events:
            bar.update(index := handles.index(event.handle), event.row)
            if on_step is not None and event.row is not None:
                on_step(index, event.row)
