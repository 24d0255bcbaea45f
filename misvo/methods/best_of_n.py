"""Best-of-n: K·N independent samples of the reference policy; the loop returns the best. No update, no vectors."""


class BestOfN:
    sequential = False  # no step waits for another, so all of them may decode at once
    starts_at_reference = True

    def __init__(self, head, stream, sampler, settings):
        self.vectors = None

    def propose(self, step):
        return {"keep_scores": False}

    def update(self, step, rollouts, rewards):
        return {}

    def intervention(self):
        return None
