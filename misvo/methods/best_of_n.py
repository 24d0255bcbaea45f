"""Best-of-n: K·N independent samples of the reference policy; the run returns the best. No update, no vectors."""

from misvo.methods.base import Prefixes, Proposal, Update


class BestOfN:
    sequential = False  # no step waits for another, so all of them may decode at once
    steers = False
    starts_at_reference = True
    wants_prefixes: Prefixes = "never"
    vectors = None
    intervention = None

    def __init__(self, context):
        pass

    def propose(self, step):
        return Proposal()

    def update(self, step, rollouts, scores):
        return Update()
