"""What a call holds at its peak, as torch counts it."""

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated_bytes(call) -> int:
    """The most that torch had allocated at once during a call, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    changes = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
