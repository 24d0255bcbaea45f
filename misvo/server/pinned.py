"""A scorer that a client names: only at hosts that the operator allows, at an address that is looked up once.

A name that stands for a private, loopback or link-local address is refused, unless that address is allowed by itself.
The connection goes to the address that was checked, so a name that changes its mind in between (DNS rebinding) changes
nothing; redirects are not followed and proxies not asked.
"""

import functools
import http.client
import ipaddress
import socket
import ssl
import urllib.request
from urllib.parse import urlsplit

from misvo.rewards.remote import NoRedirect, Remote
from misvo.server.errors import ApiError

LARGEST_ANSWER = 1 << 20  # bytes
CHUNK = 256  # responses in a request: their beginnings are not scored, so a step is one of these
REFUSED = "this server does not let requests name a scorer at this address."


class PinnedRemote(Remote):
    def __init__(self, url: str, address: str, timeout: float):
        super().__init__(
            url, timeout=timeout, attempts=1, backoff=0, batch_size=CHUNK, concurrency=1, largest=LARGEST_ANSWER
        )
        self.host = urlsplit(url).netloc
        handlers = (urllib.request.ProxyHandler({}), NoRedirect, _Plain(address), _Encrypted(address))
        self._open = urllib.request.build_opener(*handlers).open

    @classmethod
    def allowed(cls, url: str, hosts: tuple[str, ...], timeout: float) -> "PinnedRemote":
        """The scorer at an address that may be asked; looks the name up, so not in the event loop."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            raise ApiError(400, "a scorer is written as https://HOST/PATH.", param="misvo.reward") from None
        if parts.username is not None or not _is_named(host, port, hosts):
            raise ApiError(400, REFUSED, param="misvo.reward", code="host_not_allowed")
        return cls(url, _address(host, port, hosts), timeout)


def _is_named(host: str, port: int, hosts: tuple[str, ...]) -> bool:
    """HOST allows the usual ports, HOST:PORT that port."""
    bracketed = f"[{host}]" if ":" in host else host
    return bool(host) and (f"{bracketed}:{port}" in hosts or (port in (80, 443) and bracketed in hosts))


def _address(host: str, port: int, hosts: tuple[str, ...]) -> str:
    """The first address that a name stands for; all of them have to be such as may be asked."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        raise ApiError(400, "the host of this scorer is not known.", param="misvo.reward") from None
    named = {urlsplit(f"//{entry}").hostname for entry in hosts}
    for address in found:
        public = ipaddress.ip_address(address.partition("%")[0]).is_global
        if not public and address not in named:
            raise ApiError(400, REFUSED, param="misvo.reward", code="host_not_allowed")
    return found[0]


class _PlainConnection(http.client.HTTPConnection):
    """Connects to an address, whatever its host's name stands for by now."""

    def __init__(self, address: str, host: str, **options):
        super().__init__(host, **options)
        self.address = address

    def connect(self):
        self.sock = socket.create_connection((self.address, self.port), self.timeout)


class _EncryptedConnection(_PlainConnection):
    """The same, and the certificate has to be the name's."""

    default_port = http.client.HTTPS_PORT

    def connect(self):
        super().connect()
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, address: str):
        super().__init__()
        self._connect = functools.partial(_PlainConnection, address)

    def http_open(self, request):
        return self.do_open(self._connect, request)


class _Encrypted(urllib.request.HTTPSHandler):
    def __init__(self, address: str):
        super().__init__()
        self._connect = functools.partial(_EncryptedConnection, address)

    def https_open(self, request):
        return self.do_open(self._connect, request)
