"""The base of all bodies: what is not known is refused by name, nothing is converted, and text is text in UTF-8."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """A field that is null is one that is not given, as in OpenAI's API; an unknown one is refused all the same."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in given.items() if value is not None or name not in known}


class Body(Strict):
    """The whole body of a request."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        try:
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("the body holds half a surrogate pair: it is not text in UTF-8") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        except (ValueError, TypeError):
            raise ValueError("the body holds a number that is not finite") from None
        return given
