"""The embedded model, loaded once for many scripts: each calls `Policy.from_pretrained` as its reader would."""

from contextlib import contextmanager

import misvo


@contextmanager
def one_policy(policy):
    """Inside, `Policy.from_pretrained("smollm2-135m")` without options gives this policy, which that very call made."""
    usual = misvo.Policy.from_pretrained.__func__

    def from_pretrained(cls, name, **options):
        return policy if name == "smollm2-135m" and not options else usual(cls, name, **options)

    misvo.Policy.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        misvo.Policy.from_pretrained = classmethod(usual)
