"""`misvo serve`: steered answers behind the API that every client speaks, on one `Session`.

    from misvo.server import Config, create_app
    app = create_app(policy, rewards={"sentiment": "sentiment"}, config=Config(keys=("secret",)))

`create_app` gives an ASGI application for uvicorn, gunicorn or Ray Serve. Routes are thin: what they ask for becomes
an `Order` (orders.py), the `Core` (core.py) takes a place for it and hands it to the engine's thread
(engine_thread.py), which steps a session; what happens comes back as events of a `Job` (jobs.py).
"""

import importlib
from typing import TYPE_CHECKING

from misvo.errors import MisvoError
from misvo.server.config import Config, Limits

if TYPE_CHECKING:
    from misvo.server.app import create_app as create_app

__all__ = ["Config", "Limits", "create_app"]


if not TYPE_CHECKING:

    def __getattr__(name):
        if name != "create_app":
            raise AttributeError(f"module 'misvo.server' has no attribute {name!r}")
        try:
            return importlib.import_module("misvo.server.app").create_app
        except ImportError as error:
            if error.name is not None and error.name.split(".")[0] in ("fastapi", "starlette", "uvicorn", "pydantic"):
                raise MisvoError("the server needs fastapi and uvicorn: pip install 'misvo[server]'") from error
            raise
