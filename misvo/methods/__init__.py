"""The methods, one small file each. A method is asked in turns, and never sees text, files or batches:

    method = METHODS[name](head, stream, sampler, settings)
    method.propose(step)                   -> what to decode at this step (fields of misvo.rollouts.Request)
    method.update(step, rollouts, rewards) -> extra columns for the trace; changes the method's vectors
    method.vectors                         -> u (T, d), or None where the method has no vectors to keep
    method.sequential                      -> whether a step waits for the update of the step before it
    method.starts_at_reference             -> whether the first step samples from the reference policy
    method.intervention()                  -> what it ended with, for the meter: u, a function of states, or None

`rewards` is a float64 tensor (K,) in which NaN stands for a response that could not be scored.
"""

from misvo.methods.aisp import Aisp
from misvo.methods.best_of_n import BestOfN
from misvo.methods.misvo import Misvo
from misvo.methods.re_control import ReControl

METHODS = {
    "misvo": Misvo,
    "best-of-n": BestOfN,
    "aisp": Aisp,
    "re-control": ReControl,
}
