"""`misvo serve` and `misvo studio`: the options of a server, and its page in a browser.

Imports neither torch nor fastapi by itself.
"""

import inspect
import os
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from misvo import cli_options
from misvo.cli_process import import_transformers, quiet_libraries
from misvo.errors import MisvoError
from misvo.rewards.specs import EMBEDDED
from misvo.server.config import Config, Limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULTS, LIMITS = Config(), Limits()
SIMPLE = {name: name for name, entry in EMBEDDED.items() if entry.argument is None}  # rewards of a studio without any


@dataclass(frozen=True)
class Studio:
    """What `misvo studio` says beside the options of a server."""

    folders: tuple[Path, ...] = ()  # of finished runs
    has_model: bool = True
    opens: bool = False  # a browser


def _listen(
    studio: Studio | None,
    *,
    model: Annotated[str, typer.Option(help="An embedded model, a Hugging Face id or a folder.")] = "smollm2-135m",
    reward: Annotated[
        list[str],
        typer.Option(help="`NAME=SPEC`: what clients may ask for by NAME; again for more. `misvo list rewards`."),
    ] = [],  # noqa: B006
    host: Annotated[str, typer.Option(help="Address to listen at. 0.0.0.0 is every one that this machine has.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8000,
    api_key: Annotated[
        list[str], typer.Option(help="A key that clients have to send. Others see it in `ps`: rather use a file.")
    ] = [],  # noqa: B006
    api_key_file: Annotated[Path | None, typer.Option(help="A file with a key on each line.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model. [default: its name]")] = None,
    default_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer where a client does not say.")
    ] = DEFAULTS.default_tokens,
    queue: Annotated[int, typer.Option(min=1, help="Requests that run or wait; one more gets 503.")] = LIMITS.queue,
    max_load: Annotated[int, typer.Option(min=1, help="Tokens (K·N·T) that all of them may decode.")] = LIMITS.load,
    client_queue: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of one client that run or wait; one more gets 429. [default: no limit]"),
    ] = None,
    client_load: Annotated[
        int | None, typer.Option(min=1, help="Tokens (K·N·T) that those of one client may decode. [default: no limit]")
    ] = None,
    max_request: Annotated[
        int, typer.Option(min=1, help="Tokens (K·N·T) that one request may decode.")
    ] = LIMITS.request,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = LIMITS.prompt_tokens,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = LIMITS.body,
    max_upload: Annotated[int, typer.Option(min=1, help="Bytes of a steering that is sent.")] = LIMITS.upload,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows decoded at once. [default: what fits memory]")
    ] = None,
    reward_seconds: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a reward may take for the responses of a step.")
    ] = DEFAULTS.reward_seconds,
    allow_reward_host: Annotated[
        list[str], typer.Option(help="`HOST` or `HOST:PORT` of scorers that requests may name by a URL.")
    ] = [],  # noqa: B006
    allow_origin: Annotated[
        list[str], typer.Option(help="An origin whose pages may call this server, such as `https://example.org`.")
    ] = [],  # noqa: B006
    allow_host: Annotated[
        list[str],
        typer.Option(help="A name of this server in Host headers. [default: on loopback its names, else any]"),
    ] = [],  # noqa: B006
    steerings: Annotated[
        Path | None, typer.Option(help="Folder for saved steerings. [default: they live in memory]")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="A model that judges fluency, for the panel.")] = None,
    keep_seconds: Annotated[
        float, typer.Option(min=0, help="How long finished runs can be looked up.")
    ] = DEFAULTS.keep_seconds,
    keep_runs: Annotated[int, typer.Option(min=0, help="How many of them.")] = DEFAULTS.keep_runs,
    keep_alive: Annotated[
        float, typer.Option(min=0.01, help="Seconds between two comments in a silent stream.")
    ] = DEFAULTS.keep_alive,
    grace: Annotated[
        float, typer.Option(min=1, help="Seconds for running requests to end when the server is stopped.")
    ] = DEFAULTS.grace,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="A line for each request, with its path.")] = (
        False
    ),
    **options,
) -> None:
    """Check everything, load the model, and answer until a signal comes."""
    rewards = dict(map(_named, reward))
    if studio is not None and not rewards:
        rewards = SIMPLE
    keys = (*api_key, *(_keys(api_key_file) if api_key_file is not None else ()))
    if not all(key.strip() and key.isascii() and len(key.split()) == 1 for key in keys):
        raise MisvoError("an API key is one word of plain letters, digits and signs.")
    if host not in LOOPBACK and not keys:
        typer.echo(f"misvo: everybody who reaches {host} may use this server: --api-key-file closes it.", err=True)
    limits = Limits(
        queue=queue,
        load=max_load,
        client_queue=client_queue,
        client_load=client_load,
        request=max_request,
        prompt_tokens=max_prompt_tokens,
        body=max_body,
        upload=max_upload,
    )
    config = Config(
        limits=limits,
        name=name or (Path(model).resolve().name if os.path.isdir(model) else model),
        default_tokens=default_tokens,
        keys=keys,
        hosts=tuple(allow_host) or (("127.0.0.1", "localhost", "[::1]") if host in LOOPBACK else ()),
        origins=tuple(allow_origin),
        reward_hosts=tuple(host.lower() for host in allow_reward_host),
        runs=studio.folders if studio is not None else (),
        steerings=steerings,
        judge=judge,
        keep_seconds=keep_seconds,
        keep_runs=keep_runs,
        keep_alive=keep_alive,
        reward_seconds=reward_seconds,
        grace=grace,
        max_rows=max_rows,
        log_requests=log_requests,
    )
    quiet_libraries(decoding=True)
    import_transformers()
    from misvo import Policy, view
    from misvo.server import create_app

    if studio is not None and not studio.has_model:
        app = create_app(None, rewards, config)
    else:
        with view.loading(model):
            app = create_app(Policy.from_pretrained(model, **cli_options.to_load(options)), rewards, config)
    from misvo.server import serve as web

    def started(port: int) -> None:
        shown = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if studio is None:
            typer.echo(f"misvo: {config.name} at {shown}/v1 (what it takes: /docs; the studio: /)", err=True)
            return
        typer.echo(f"misvo: the studio is at {shown}/ (Ctrl-C ends it)", err=True)
        if studio.opens:  # a browser that runs in the terminal would hold the server up
            threading.Thread(target=webbrowser.open, args=(f"{shown}/",), daemon=True).start()

    web.run(app, host, port, grace, started)


def _as_listen(command):
    """A command `f(..., **options)` whose signature names every option of a server."""
    given = [p for p in inspect.signature(_listen).parameters.values() if p.name not in ("studio", "options")]
    return cli_options.accepts(command, [*given, *cli_options.load_parameters()])


@_as_listen
def serve(**options):
    """Answer for a model at an address that the `openai` client, curl and browsers can ask.

    Example: `misvo serve --reward sentiment=sentiment --reward brief=length:20 --port 8000`
    """
    _listen(None, **options)


@_as_listen
def studio(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Finished runs to show: what `misvo steer --save` wrote.")
    ] = None,
    view: Annotated[
        bool, typer.Option("--view", help="Show FOLDERS alone, without a model: nothing is sampled.")
    ] = False,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser at the page.")] = True,
    **options,
):
    """The server with its page in a browser: steer, watch the model move, and see where.

    Without `--reward` it has those that need no argument; kinds such as `words:20-40` can be chosen on the page.

    Example: `misvo studio`, or `misvo studio --view run` for a finished one
    """
    if view and not folders:
        raise MisvoError("--view shows finished runs: give their folders, as in `misvo studio --view run`.")
    _listen(Studio(tuple(folders or ()), not view, browser), **options)


def _named(text: str) -> tuple[str, str]:
    """`NAME=SPEC`, or a spec that is a name by itself."""
    name, sign, spec = text.partition("=")
    if not sign and name.isidentifier():
        return name, name
    if not sign or not name or not spec:
        raise MisvoError(f"write --reward as NAME=SPEC, such as brief=length:20, not {text!r}.")
    return name, spec


def _keys(path: Path) -> list[str]:
    try:
        keys = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise MisvoError(f"the keys in {path} could not be read: {error}") from error
    if not keys:
        raise MisvoError(f"{path} holds no key.")
    return keys
