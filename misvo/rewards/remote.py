"""`http:URL`: a scorer in another process, on this machine or another. Batches go out as JSON, rewards come back.

    POST URL    {"prompts": [...], "completions": [...], "any_column": [...]}    ->    {"rewards": [0.5, null, ...]}

Prompts and completions have the form that a reward in Python gets (strings, or lists of messages); null means "could
not score". The token ids stay here: they mean nothing to another model. A batch is cut into chunks of `batch_size`
that are sent side by side, at most `concurrency` at once. What may pass (no connection, a time-out, 429, a 5xx) is
tried again after a wait that doubles from `backoff` seconds on; what will not (another status, an answer that is not
rewards) ends the run at once. Waits have no random part: the same failures take the same time.
"""

import http.client
import ipaddress
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from urllib.parse import parse_qsl, urlsplit

from misvo.errors import MisvoError, RewardError, short

LONGEST_WAIT = 30.0  # seconds between two attempts
LARGEST_ANSWER = 64 << 20  # bytes
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_OPTIONS = {"timeout": float, "attempts": int, "backoff": float, "batch_size": int, "concurrency": int}


class Remote:
    """A reward that asks a scorer at `url`; `headers` are added to each request, for instance for authorisation."""

    def __init__(
        self,
        url,
        *,
        timeout=60.0,
        attempts=6,
        backoff=0.5,
        batch_size=16,
        concurrency=4,
        headers=None,
        largest=LARGEST_ANSWER,  # bytes of an answer
    ):
        self.url, self.timeout, self.attempts, self.backoff = _checked(url), timeout, attempts, backoff
        self.batch_size, self.concurrency, self.largest = batch_size, concurrency, largest
        for name, kind in _OPTIONS.items():
            value = getattr(self, name)
            low = 0 if name == "backoff" else 1 if kind is int else 1e-3
            if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value < 1e9:
                raise MisvoError(f"the option {name} of a remote reward must be at least {low}, not {value!r}.")
        self.headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        self.shown = self.url.partition("?")[0]  # a query may hold a secret
        # A proxy of the environment could not reach a scorer on this machine. Redirects would turn POST into GET.
        proxies = [urllib.request.ProxyHandler({})] if _loopback(urlsplit(self.url).hostname) else []
        self._open = urllib.request.build_opener(NoRedirect, *proxies).open

    @classmethod
    def from_spec(cls, spec: str) -> "Remote":
        """`http://host/path`, `http:host/path` or `http:https://host/path`, with options behind `#`."""
        url, _, options = spec.partition("#")
        if url.startswith(("http:http://", "http:https://")):
            url = url.removeprefix("http:")
        elif url.startswith(("http:", "https:")) and "://" not in url:
            url = url.replace(":", "://", 1)
        given = {}
        for name, value in parse_qsl(options, keep_blank_values=True):
            try:
                given[name] = _OPTIONS[name](value)
            except (KeyError, ValueError):
                known = ", ".join(_OPTIONS)
                raise MisvoError(f"{name}={value!r} is no option of a remote reward: give {known} a number.") from None
        return cls(url, **given)

    def __call__(
        self, prompts, completions, completion_ids=None, trainer_state=None, log_metric=None, log_extra=None, **columns
    ):
        rows = {"prompts": prompts, "completions": completions, **columns}
        starts = range(0, len(completions), self.batch_size)
        bodies = [{name: list(values[i : i + self.batch_size]) for name, values in rows.items()} for i in starts]
        stop = threading.Event()
        pool = ThreadPoolExecutor(min(self.concurrency, len(bodies)) or 1, "misvo-remote")
        try:
            asked = [pool.submit(self._ask, _encode(body), len(body["completions"]), stop) for body in bodies]
            wait(asked, return_when=FIRST_EXCEPTION)
            failed = [future.exception() for future in asked if future.done() and future.exception() is not None]
            for error in sorted(failed, key=lambda error: isinstance(error, _Stopped)):
                raise error
            return [reward for future in asked for reward in future.result()]
        finally:  # also on an interrupt: whoever waits between attempts gives up, nobody waits for what is under way
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, body, count, stop):
        """The rewards of one chunk; a failure stops the others, because the batch is lost without it."""
        try:
            return self._insist(body, count, stop)
        except Exception:
            stop.set()
            raise

    def _insist(self, body, count, stop):
        """The rewards of one chunk, after as many attempts as it takes and is allowed."""
        started, delay = time.monotonic(), self.backoff
        for attempt in range(1, self.attempts + 1):
            if stop.is_set():
                raise _Stopped
            try:
                return _rewards(self._post(body), count, self.shown)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in _PASSING:
                        raise RewardError(_refusal(self.shown, error)) from error
                    reason, asked_for = f"HTTP {error.code} {error.reason}", error.headers.get("Retry-After", "")
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut short
                cause = error.reason if isinstance(error, urllib.error.URLError) else error
                reason, asked_for = short(f"{type(cause).__name__}: {cause}".rstrip(": ")), ""
            patience = max(delay, float(asked_for) if asked_for.isdecimal() else 0.0)
            if attempt < self.attempts:
                stop.wait(min(patience, LONGEST_WAIT))
            delay *= 2
        seconds = time.monotonic() - started
        times = "once" if attempt == 1 else f"{attempt} times"
        raise RewardError(f"the scorer at {self.shown} failed {times} in {seconds:.1f} s, at last with {reason}.")

    def _post(self, body):
        """One request. `timeout` bounds each wait for the network, and the answer as a whole."""
        deadline = time.monotonic() + self.timeout
        request = urllib.request.Request(self.url, body, self.headers, method="POST")
        with self._open(request, timeout=self.timeout) as response:
            answer = bytearray()
            while block := response.read1(1 << 16):
                answer += block
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer trickled in for too long")
                if len(answer) > self.largest:
                    raise RewardError(f"the scorer at {self.shown} answered with more than {self.largest >> 20} MB.")
            missing = response.length  # what the header promised and the connection did not bring
            if missing:
                raise http.client.IncompleteRead(bytes(answer[:0]), missing)
        return bytes(answer)


class _Stopped(Exception):
    """Given up because another chunk failed."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def _checked(url):
    parts = urlsplit(url)
    try:
        port = parts.port  # a property that reads, and may refuse, the number
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or any(c.isspace() for c in url):
        raise MisvoError(f"a remote reward is written as http://HOST:PORT/PATH, not {url!r}.")
    if parts.username is not None:
        raise MisvoError("a remote reward takes no user or password in its address: use headers=, from Python.")
    return url


def _loopback(host):
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _encode(body):
    texts = []
    for name, values in body.items():
        try:
            texts.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise RewardError(f"the column {name!r} cannot be sent to a scorer as JSON: {short(error)}.") from error
    return ("{" + ", ".join(texts) + "}").encode()


def _rewards(answer, count, url):
    try:
        decoded = json.loads(answer)
    except ValueError:
        raise RewardError(f"the scorer at {url} answered with something that is not JSON: {_peek(answer)!r}.") from None
    rewards = decoded.get("rewards") if isinstance(decoded, dict) else None
    if not isinstance(rewards, list):
        raise RewardError(f'the scorer at {url} must answer {{"rewards": [...]}}, not {_peek(answer)!r}.')
    if len(rewards) != count:
        raise RewardError(f"the scorer at {url} gave {len(rewards)} rewards for {count} completions.")
    return rewards


def _refusal(url, error):
    if 300 <= error.code < 400:
        return f"the scorer at {url} is elsewhere (HTTP {error.code}): use {error.headers.get('Location')!r}."
    return (
        f"the scorer at {url} refused the request with HTTP {error.code} {error.reason}: {_peek(error.read(2000))!r}."
    )


def _peek(answer):
    return short(answer.decode(errors="replace"))
