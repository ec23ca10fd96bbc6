"""What a handler accepts and returns: the payload is a JSON object of the function's parameters."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from typing import Any

from ._codec import Codec, Json, Schema, codec_for
from ._enqueue import to_json
from ._errors import DecodeError, PayloadMismatch, ValidationError

#: Types whose values are the same after a conversion to JSON and back. Not float, because of NaN.
_SCALARS = frozenset((str, int, bool, type(None)))


class Signature:
    """Encodes the arguments of a call as a payload, and decodes a payload to keyword arguments."""

    def __init__(
        self, function: Callable[..., Any], context_types: tuple[type, ...], *, is_bare: bool = False
    ) -> None:
        self.function = function
        name = getattr(function, "__qualname__", repr(function))
        signature = inspect.signature(function)
        hints = _hints(function)
        self.context_parameter: str | None = None
        self.context_type: type | None = None
        self.definitions: Schema = {}
        self.parameters: dict[str, Codec] = {}
        self.required: set[str] = set()
        self.extra: Codec | None = None
        kept = []
        for parameter in signature.parameters.values():
            hint = hints.get(parameter.name, Any)
            if isinstance(hint, type) and issubclass(hint, context_types):
                self.context_parameter, self.context_type = parameter.name, hint
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise TypeError(f"{name}: `*{parameter.name}` is not supported; use a parameter of type list")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise TypeError(f"{name}: `{parameter.name}` is positional only; remove the `/`")
            kept.append(parameter)
            try:
                codec = codec_for(hint, self.definitions)
            except TypeError as error:
                raise TypeError(f"{name}: parameter `{parameter.name}`: {error}") from None
            if parameter.kind is parameter.VAR_KEYWORD:
                self.extra = codec
                continue
            self.parameters[parameter.name] = codec
            if parameter.default is parameter.empty:
                self.required.add(parameter.name)
        self.signature = signature.replace(parameters=kept)
        #: The only parameter, if its value is the whole payload.
        self.bare_parameter: str | None = None
        if is_bare:
            if len(self.parameters) != 1 or self.extra is not None:
                raise TypeError(f"{name}: bare=True needs exactly one parameter in addition to the context")
            [self.bare_parameter] = self.parameters
        try:
            self.result = codec_for(hints.get("return", Any))
        except TypeError as error:
            raise TypeError(f"{name}: the type of the result: {error}") from None

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Json:
        """The payload for a call with these arguments. Omitted arguments stay omitted."""
        if args or kwargs.keys() - self.parameters.keys() or self.required - kwargs.keys():
            try:
                arguments = dict(self.signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                name = getattr(self.function, "__name__", "the job")
                raise TypeError(f"{name}: {error}") from None
            if self.extra is not None:
                for parameter in self.signature.parameters.values():
                    if parameter.kind is parameter.VAR_KEYWORD:
                        arguments.update(arguments.pop(parameter.name, {}))
        else:
            arguments = kwargs
        payload = {}
        for name, value in arguments.items():
            codec = self.parameters.get(name, self.extra)
            assert codec is not None, "bind refuses unknown arguments"
            try:
                payload[name] = codec.encode(value)
                # What the worker will read. A value that it would refuse is refused here.
                is_same = codec.is_plain and type(value) in _SCALARS
                codec.decode(value if is_same else json.loads(to_json(payload[name])))
            except DecodeError as error:
                path = DecodeError(error.problem, (name, *error.path))
                raise ValidationError(f"{path}; the value does not fit its annotation") from None
            except (TypeError, ValueError, AttributeError) as error:
                raise ValidationError(f"{name}: the value does not fit its annotation: {error}") from None
        return payload if self.bare_parameter is None else payload.get(self.bare_parameter)

    def decode(self, payload: Json) -> dict[str, Any]:
        """The keyword arguments for a payload."""
        if self.bare_parameter is not None:
            payload = {self.bare_parameter: payload}
        if type(payload) is not dict:
            raise PayloadMismatch("expected an object with the parameters of the handler", ("payload",))
        decoded = {}
        for name, value in payload.items():
            codec = self.parameters.get(name, self.extra)
            if codec is None:
                raise PayloadMismatch("the handler has no parameter of this name", ("payload", name))
            try:
                decoded[name] = codec.decode(value)
            except DecodeError as error:
                raise PayloadMismatch(error.problem, ("payload", name, *error.path)) from None
        if len(decoded) < len(self.parameters):
            for name in self.required - decoded.keys():
                raise PayloadMismatch("the field is missing", ("payload", name))
        return decoded

    @property
    def schema(self) -> Schema:
        """The JSON schema of the payload."""
        schema: Schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        if self.bare_parameter is not None:
            schema.update(self.parameters[self.bare_parameter].schema)
        else:
            schema.update(
                {
                    "type": "object",
                    "properties": {name: codec.schema for name, codec in self.parameters.items()},
                    "required": sorted(self.required),
                    "additionalProperties": (self.extra.schema or True) if self.extra else False,
                }
            )
        if self.definitions:
            schema["$defs"] = self.definitions
        return schema


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"{name}: an annotation cannot be resolved: {error}; import it at module level") from None
