"""What misvo raises. Each message is one sentence that names what was wrong and what to do about it."""


class MisvoError(ValueError):
    """Bad input or an unusable model, reward or file; the command line prints it and exits with code 2."""


class RewardError(MisvoError):
    """A reward failed; `result` keeps what the run had until then (None when nothing was decoded yet)."""

    result = None
