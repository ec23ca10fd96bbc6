"""Converts between Python values and JSON by their annotations, and derives JSON schemas.

A `Codec` is built once per annotation. It owns no I/O; `_signature.py` uses it for the parameters and the
result of a handler.
"""

from __future__ import annotations

import base64
import binascii
import collections.abc
import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal, InvalidOperation
from typing import Any, Union
from uuid import UUID

from ._errors import DecodeError

Json = Any
Schema = dict[str, Any]


@dataclasses.dataclass
class Codec:
    """How values of one type are written to JSON and read from it."""

    encode: Callable[[Any], Json]
    decode: Callable[[Json], Any]
    schema: Schema
    #: Whether `encode` returns its argument unchanged.
    is_plain: bool = False


def codec_for(annotation: Any, definitions: Schema | None = None) -> Codec:
    """The codec for an annotation. `definitions` collects the schemas of named types."""
    return _Builder(definitions if definitions is not None else {}).build(annotation)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


def _json_type(value: Json) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _mismatch(expected: str, value: Json) -> DecodeError:
    return DecodeError(f"expected {expected}, got {_json_type(value)}")


def _same(value: Any) -> Any:
    return value


def _expect(expected: str, *accepted: type) -> Callable[[Json], Any]:
    def decode(value: Json) -> Any:
        if type(value) in accepted:
            return value
        raise _mismatch(expected, value)

    return decode


def _decode_float(value: Json) -> float:
    if type(value) is float or type(value) is int:
        return float(value)
    raise _mismatch("number", value)


def _from_text(expected: str, parse: Callable[[str], Any]) -> Callable[[Json], Any]:
    def decode(value: Json) -> Any:
        if not isinstance(value, str):
            raise _mismatch(expected, value)
        try:
            return parse(value)
        except (ValueError, InvalidOperation, binascii.Error):
            raise DecodeError(f"{value[:60]!r} is not {expected}") from None

    return decode


def _parse_datetime(text: str) -> datetime:
    if len(text) <= len("2030-01-02"):
        raise ValueError("a date without a time")
    # Python 3.10 reads neither `Z` nor fractions of other lengths than three and six digits.
    if text.endswith(("Z", "z")):
        text = text[:-1] + "+00:00"
    if sys.version_info < (3, 11) and "." in text:
        head, _, tail = text.partition(".")
        digits = len(tail) - len(tail.lstrip("0123456789"))
        text = f"{head}.{tail[:digits][:6].ljust(6, '0')}{tail[digits:]}"
    return datetime.fromisoformat(text)


def _decode_timedelta(value: Json) -> timedelta:
    return timedelta(seconds=_decode_float(value))


def _decode_any(value: Json) -> Any:
    return value


def _encode_any(value: Any) -> Json:
    """Encodes a value without an annotation by its own type."""
    kind = type(value)
    if kind in (str, int, float, bool) or value is None:
        return value
    if kind is dict:
        return {str(key): _encode_any(item) for key, item in value.items()}
    if kind in (list, tuple, set, frozenset):
        return [_encode_any(item) for item in value]
    return _codec_of_value_type(kind).encode(value)


def _codec_of_value_type(kind: type) -> Codec:
    if kind is object:  # as an annotation it means any value
        raise TypeError("`object` cannot be converted to JSON")
    known = _value_codecs.get(kind)
    if known is None:
        known = _value_codecs[kind] = codec_for(kind)
    return known


_value_codecs: dict[type, Codec] = {}

_SIMPLE: dict[Any, Codec] = {
    Any: Codec(_encode_any, _decode_any, {}),
    object: Codec(_encode_any, _decode_any, {}),
    None: Codec(_same, _expect("null", type(None)), {"type": "null"}, True),
    type(None): Codec(_same, _expect("null", type(None)), {"type": "null"}, True),
    bool: Codec(_same, _expect("boolean", bool), {"type": "boolean"}, True),
    int: Codec(_same, _expect("integer", int), {"type": "integer"}, True),
    float: Codec(_same, _decode_float, {"type": "number"}, True),
    str: Codec(_same, _expect("string", str), {"type": "string"}, True),
    dict: Codec(_encode_any, _expect("object", dict), {"type": "object"}),
    list: Codec(_encode_any, _expect("array", list), {"type": "array"}),
    bytes: Codec(
        lambda value: base64.b64encode(value).decode(),
        _from_text("base64", lambda text: base64.b64decode(text, validate=True)),
        {"type": "string", "contentEncoding": "base64"},
    ),
    datetime: Codec(
        lambda value: (value if value.tzinfo else value.astimezone(timezone.utc)).isoformat(),
        _from_text("a date and time", _parse_datetime),
        {"type": "string", "format": "date-time"},
    ),
    date: Codec(date.isoformat, _from_text("a date", date.fromisoformat), {"type": "string", "format": "date"}),
    time: Codec(time.isoformat, _from_text("a time", time.fromisoformat), {"type": "string", "format": "time"}),
    timedelta: Codec(timedelta.total_seconds, _decode_timedelta, {"type": "number"}),
    UUID: Codec(str, _from_text("a UUID", UUID), {"type": "string", "format": "uuid"}),
    Decimal: Codec(str, _from_text("a decimal number", Decimal), {"type": "string"}),
}


class _Builder:
    def __init__(self, definitions: Schema) -> None:
        self.definitions = definitions
        self.named: dict[Any, Codec] = {}

    def build(self, kind: Any) -> Codec:
        if isinstance(kind, str):
            raise TypeError(f"the annotation `{kind}` cannot be resolved; define its type at module level")
        try:
            if kind in _SIMPLE:
                return _SIMPLE[kind]
        except TypeError:  # not hashable, for example Literal[[]]
            pass
        if isinstance(kind, typing.NewType):
            return self.build(kind.__supertype__)
        if isinstance(kind, typing.TypeVar):
            return self.build(kind.__bound__) if kind.__bound__ else _SIMPLE[Any]
        if hasattr(kind, "__value__") and type(kind).__name__ == "TypeAliasType":
            return self.build(kind.__value__)
        origin = typing.get_origin(kind)
        if origin is not None:
            return self.generic(kind, origin, typing.get_args(kind))
        return self.named_type(kind)

    def generic(self, kind: Any, origin: Any, args: tuple[Any, ...]) -> Codec:
        if origin is typing.Annotated:
            return self.build(args[0])
        if getattr(origin, "__name__", "") in ("Required", "NotRequired", "ReadOnly", "Final"):
            return self.build(args[0])
        if origin is typing.Literal:
            return _literal(args)
        if origin is Union or origin is types.UnionType:
            return self.union(args)
        if isinstance(origin, type):
            if issubclass(origin, tuple):
                return self.fixed_tuple(args)
            if issubclass(origin, (set, frozenset, collections.abc.Set)):
                target = frozenset if issubclass(origin, frozenset) else set
                return _sequence(self.build(args[0]), target, {"uniqueItems": True})
            if issubclass(origin, collections.abc.Mapping):
                return self.mapping(args)
            if issubclass(origin, (list, collections.abc.Iterable)):
                return _sequence(self.build(args[0]), list, {})
        return self.named_type(origin)

    def mapping(self, args: tuple[Any, ...]) -> Codec:
        key, item = self.build(args[0]), self.build(args[1])
        if key.schema.get("type") not in (None, "string"):
            raise TypeError(f"the keys of a mapping must be strings in JSON, not `{_name(args[0])}`")

        def decode(value: Json) -> Any:
            if type(value) is not dict:
                raise _mismatch("object", value)
            decoded = {}
            for name, entry in value.items():
                try:
                    decoded[key.decode(name)] = item.decode(entry)
                except DecodeError as error:
                    raise error.inside(name) from None
            return decoded

        def encode(value: Any) -> Json:
            return {key.encode(name): item.encode(entry) for name, entry in value.items()}

        plain = key.is_plain and item.is_plain
        schema = {"type": "object", "additionalProperties": item.schema or True}
        return Codec(_same if plain else encode, decode, schema, plain)

    def fixed_tuple(self, args: tuple[Any, ...]) -> Codec:
        if len(args) == 2 and args[1] is Ellipsis:
            return _sequence(self.build(args[0]), tuple, {})
        items = [self.build(argument) for argument in args]

        def decode(value: Json) -> Any:
            if type(value) is not list or len(value) != len(items):
                raise DecodeError(f"expected an array of {len(items)} items")
            return tuple(_decode_items(items, value))

        schema = {
            "type": "array",
            "prefixItems": [item.schema for item in items],
            "minItems": len(items),
            "maxItems": len(items),
        }
        return Codec(lambda value: [c.encode(v) for c, v in zip(items, value, strict=True)], decode, schema)

    def union(self, args: tuple[Any, ...]) -> Codec:
        has_none = type(None) in args
        members = [(argument, self.build(argument)) for argument in args if argument is not type(None)]
        if has_none and len(members) == 1:
            return _optional(members[0][1])
        expected = " or ".join(_name(argument) for argument in args)

        def encode(value: Any) -> Json:
            if value is None:
                return None
            # The exact type first: a datetime is also a date.
            for argument, member in members:
                if type(value) is argument:
                    return member.encode(value)
            for argument, member in members:
                if _is_instance(value, argument):
                    return member.encode(value)
            return _encode_any(value)

        def decode(value: Json) -> Any:
            if value is None and has_none:
                return None
            for _, member in members:
                try:
                    return member.decode(value)
                except DecodeError:
                    continue
            raise _mismatch(expected, value)

        schemas = [member.schema for _, member in members] + ([{"type": "null"}] if has_none else [])
        return Codec(encode, decode, {"anyOf": schemas})

    def named_type(self, kind: Any) -> Codec:
        if kind in self.named:
            return self.named[kind]
        if not isinstance(kind, type):
            raise TypeError(f"the annotation `{kind}` is not supported; use Any and convert the value yourself")
        if issubclass(kind, enum.Enum):
            return self.enum(kind)
        if typing.is_typeddict(kind):
            return self.record(
                kind, typing.get_type_hints(kind), getattr(kind, "__required_keys__", ()), as_dict=True
            )
        if dataclasses.is_dataclass(kind):
            fields = [field for field in dataclasses.fields(kind) if field.init]
            hints = typing.get_type_hints(kind)
            required = {
                field.name
                for field in fields
                if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            }
            return self.record(kind, {field.name: hints[field.name] for field in fields}, required)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            hints = typing.get_type_hints(kind)
            defaults = getattr(kind, "_field_defaults", {})
            required = {name for name in kind._fields if name not in defaults}
            return self.record(kind, {name: hints.get(name, Any) for name in kind._fields}, required)
        if hasattr(kind, "model_validate") and hasattr(kind, "model_dump"):
            return self.pydantic(kind)
        for simple in (bool, int, float, str, dict, list):
            if issubclass(kind, simple):
                return _subclass(kind, simple)
        if issubclass(kind, (tuple, set, frozenset)):
            return _sequence(_SIMPLE[Any], kind, {})
        raise TypeError(
            f"`{_name(kind)}` cannot be converted to JSON; use a dataclass, a TypedDict, a pydantic model or a "
            "standard type"
        )

    def enum(self, kind: type[enum.Enum]) -> Codec:
        values = {_json_scalar(member.value, f"`{_name(kind)}.{member.name}`"): member for member in kind}

        def decode(value: Json) -> Any:
            try:
                return values[value]
            except (KeyError, TypeError):
                raise DecodeError(f"{value!r} is not one of {', '.join(map(repr, values))}") from None

        return Codec(lambda member: member.value, decode, {"enum": list(values)})

    def record(self, kind: Any, hints: dict[str, Any], required: Any, as_dict: bool = False) -> Codec:
        """A dataclass, a named tuple or a TypedDict: an object with known fields."""
        name = self.definition_name(kind)
        # Registered before its fields are built, because a field may contain the same type.
        codec = self.named[kind] = Codec(_same, _same, {"$ref": f"#/$defs/{name}"})
        self.definitions[name] = {}
        fields = {field: self.build(hint) for field, hint in hints.items()}

        def decode(value: Json) -> Any:
            if type(value) is not dict:
                raise _mismatch("object", value)
            decoded = {}
            for field, member in fields.items():
                if field in value:
                    try:
                        decoded[field] = member.decode(value[field])
                    except DecodeError as error:
                        raise error.inside(field) from None
                elif field in required:
                    raise DecodeError("the field is missing", (field,))
            try:
                return decoded if as_dict else kind(**decoded)
            except (TypeError, ValueError) as error:
                raise DecodeError(f"{_name(kind)} refuses the value: {error}") from None

        def encode_object(value: Any) -> Json:
            return {field: member.encode(getattr(value, field)) for field, member in fields.items()}

        def encode_dict(value: Any) -> Json:
            return {field: fields[field].encode(entry) for field, entry in value.items() if field in fields}

        codec.encode = encode_dict if as_dict else encode_object
        codec.decode = decode
        self.definitions[name].update(
            {
                "type": "object",
                "properties": {field: member.schema for field, member in fields.items()},
                "required": sorted(required),
            }
        )
        return codec

    def pydantic(self, kind: Any) -> Codec:
        name = self.definition_name(kind)
        schema = kind.model_json_schema(ref_template="#/$defs/{model}")
        for other, definition in schema.pop("$defs", {}).items():
            self.definitions.setdefault(other, definition)
        self.definitions[name] = schema

        def decode(value: Json) -> Any:
            try:
                # As JSON: a strict model accepts a string for a datetime only there.
                return kind.model_validate_json(json.dumps(value))
            except ValueError as error:
                details: list[Any] = getattr(error, "errors", list)()
                if not details:
                    raise DecodeError(f"{name} refuses the value") from None
                path = tuple(f"[{part}]" if isinstance(part, int) else str(part) for part in details[0]["loc"])
                raise DecodeError(str(details[0]["msg"]), path) from None

        # By alias, because that is how the model is read.
        codec = Codec(lambda value: value.model_dump(mode="json", by_alias=True), decode, {"$ref": f"#/$defs/{name}"})
        self.named[kind] = codec
        return codec

    def definition_name(self, kind: Any) -> str:
        name, number = _name(kind), 2
        while name in self.definitions:
            name, number = f"{_name(kind)}{number}", number + 1
        return name


def _decode_items(codecs: list[Codec], values: list[Json]) -> list[Any]:
    decoded = []
    for index, (member, value) in enumerate(zip(codecs, values, strict=True)):
        try:
            decoded.append(member.decode(value))
        except DecodeError as error:
            raise error.inside(f"[{index}]") from None
    return decoded


def _sequence(item: Codec, target: Any, extra: Schema) -> Codec:
    def decode(value: Json) -> Any:
        if type(value) is not list:
            raise _mismatch("array", value)
        return target(_decode_items([item] * len(value), value))

    def encode(value: Any) -> Json:
        return [item.encode(entry) for entry in value]

    return Codec(encode, decode, {"type": "array", "items": item.schema or True, **extra})


def _subclass(kind: Any, simple: Any) -> Codec:
    base = _SIMPLE[simple]
    return Codec(lambda value: base.encode(simple(value)), lambda value: kind(base.decode(value)), base.schema)


def _optional(member: Codec) -> Codec:
    def encode(value: Any) -> Json:
        return None if value is None else member.encode(value)

    def decode(value: Json) -> Any:
        return None if value is None else member.decode(value)

    return Codec(
        _same if member.is_plain else encode,
        decode,
        {"anyOf": [member.schema, {"type": "null"}]},
        member.is_plain,
    )


def _json_scalar(value: Any, what: str) -> Any:
    """A value of an enum or a Literal, which is compared with the value in JSON."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (str, int)) and not isinstance(value, enum.Enum):
        return value
    raise TypeError(f"{what} is not a string or a number in JSON; give it a value that is one")


def _literal(values: tuple[Any, ...]) -> Codec:
    for known in values:
        _json_scalar(known, f"`{known!r}`")

    def decode(value: Json) -> Any:
        for known in values:
            if known == value and type(known) is type(value):
                return known
        raise DecodeError(f"{value!r} is not one of {', '.join(map(repr, values))}")

    return Codec(_same, decode, {"enum": list(values)}, True)


def _is_instance(value: Any, annotation: Any) -> bool:
    kind = typing.get_origin(annotation) or annotation
    if kind is typing.Literal:
        return value in typing.get_args(annotation)
    if kind in (Any, object):
        return True
    if typing.is_typeddict(kind):
        return isinstance(value, dict)
    if kind in (int, float):
        return type(value) is kind
    return isinstance(kind, type) and isinstance(value, kind)
