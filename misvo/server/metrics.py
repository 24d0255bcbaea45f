"""Figures for Prometheus, in its text format."""

from collections import Counter

from misvo.server.engine_thread import Tally

KINDS = {"counter": "_total", "gauge": ""}


class Metrics:
    def __init__(self):
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.seconds = 0.0  # that answers took, all together
        self.left = 0  # clients that went away before their answer

    def count(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.seconds += seconds

    def text(self, tally: Tally, taken: int, load: int, kept: int, alive: bool) -> str:
        lines: list[str] = []

        def show(name, kind, about, value):
            full = f"misvo_{name}{KINDS[kind]}"
            lines.extend((f"# HELP {full} {about}", f"# TYPE {full} {kind}", f"{full} {value:.10g}"))

        lines += ["# HELP misvo_requests_total Requests by route and status.", "# TYPE misvo_requests_total counter"]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'misvo_requests_total{{route="{route}",status="{status}"}} {count}')
        show("request_seconds", "counter", "Seconds that answers took.", self.seconds)
        show("clients_left", "counter", "Clients that went away before their answer.", self.left)
        show("queue", "gauge", "Requests that run or wait.", taken)
        show("load_tokens", "gauge", "Tokens that they may decode.", load)
        show("rows_in_flight", "gauge", "Rows that decode together.", tally.rows)
        show("tokens", "counter", "Tokens decoded.", tally.tokens)
        show("tokens_per_second", "gauge", "Tokens decoded per second, of late.", tally.tokens_per_second)
        show("steps", "counter", "Steps of steering.", tally.steps)
        show("kl_nats", "counter", "KL of the mean responses of all steps.", tally.kl)
        show("reward_seconds", "counter", "Seconds that rewards took.", tally.reward_seconds)
        show("kept", "gauge", "Runs and responses that can be looked up.", kept)
        show("engine_restarts", "counter", "How often the engine had to begin anew.", tally.restarts)
        show("engine_alive", "gauge", "1 while the engine's thread lives.", int(alive))
        return "\n".join(lines) + "\n"
