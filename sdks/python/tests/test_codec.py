"""Payloads: encoding, decoding and schemas."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple, Optional, TypedDict, Union
from uuid import UUID

import pytest

from longshore import DecodeError, Longshore, SyncContext, ValidationError
from longshore._codec import codec_for


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: int = 0


class Address(TypedDict):
    street: str


class Partial(Address, total=False):
    number: int


@dataclass
class Item:
    name: str
    price: Decimal
    parts: list[Item] = field(default_factory=list)


@dataclass
class Order:
    id: UUID
    at: datetime
    items: list[Item]
    colour: Colour = Colour.RED
    to: Partial | None = None


ORDER = Order(
    UUID("01990000-0000-7000-8000-000000000001"),
    datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc),
    [Item("ship", Decimal("1.10"), [Item("mast", Decimal("0.3"))])],
    Colour.BLUE,
    {"street": "Pier", "number": 7},
)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (str, "é"),
        (int, 7),
        (float, 1.5),
        (bool, True),
        (type(None), None),
        (bytes, b"\x00\xff"),
        (date, date(2030, 1, 2)),
        (timedelta, timedelta(seconds=90)),
        (Optional[int], None),  # noqa: UP045
        (Union[int, str], "7"),  # noqa: UP007
        (int | Colour | None, Colour.RED),
        (Literal["a", 1], 1),
        (list[Colour], [Colour.RED, Colour.BLUE]),
        (dict[str, Decimal], {"a": Decimal("2.50")}),
        (dict[UUID, int], {ORDER.id: 1}),
        (tuple[int, str], (1, "b")),
        (tuple[int, ...], (1, 2, 3)),
        (set[int], {1, 2}),
        (frozenset[str], frozenset({"a"})),
        (Point, Point(1, 2)),
        (Order, ORDER),
        (Any, {"a": [1, None]}),
        (date | datetime | None, datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)),
        (datetime | date | None, date(2030, 1, 2)),
    ],
)
def test_a_value_survives_the_way_through_json(annotation: Any, value: Any) -> None:
    codec = codec_for(annotation)
    decoded = codec.decode(json.loads(json.dumps(codec.encode(value))))
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, "7", "expected integer, got string"),
        (int, True, "expected integer, got boolean"),
        (float, "x", "expected number, got string"),
        (list[int], [1, "x"], "[1]: expected integer, got string"),
        (dict[str, int], {"a": None}, "a: expected integer, got null"),
        (Colour, "green", "'green' is not one of 'red', 'blue'"),
        (UUID, "nope", "'nope' is not a UUID"),
        (datetime, "yesterday", "'yesterday' is not a date and time"),
        (Order, {"id": str(ORDER.id), "at": "2030-01-01T00:00:00Z"}, "items: the field is missing"),
        (Item, {"name": "x", "price": "1", "parts": [{"name": 2, "price": "1"}]}, "parts[0].name: expected string"),
    ],
)
def test_an_error_names_the_field(annotation: Any, value: Any, message: str) -> None:
    with pytest.raises(DecodeError) as caught:
        codec_for(annotation).decode(value)
    assert message in str(caught.value)


def test_times_of_other_writers_are_read() -> None:
    decode = codec_for(datetime).decode
    assert decode("2030-01-02T03:04:05Z") == datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert decode("2030-01-02T03:04:05.123456789Z").microsecond == 123456


def test_a_pydantic_model_is_encoded_and_validated() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Parcel(pydantic.BaseModel):  # type: ignore[misc,name-defined,unused-ignore]
        weight: float
        at: datetime

    codec = codec_for(Parcel)
    parcel = Parcel(weight=1.5, at=datetime(2030, 1, 1, tzinfo=timezone.utc))
    assert codec.decode(json.loads(json.dumps(codec.encode(parcel)))) == parcel
    with pytest.raises(DecodeError, match="weight"):
        codec.decode({"weight": "heavy", "at": "2030-01-01T00:00:00Z"})


def handler_of(function: Any, **options: Any) -> Any:
    return Longshore("http://127.0.0.1:1").job(**options)(function)


def test_a_pydantic_model_with_aliases_or_strict_types_is_read_again() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Parcel(pydantic.BaseModel):  # type: ignore[misc,name-defined,unused-ignore]
        model_config = pydantic.ConfigDict(strict=True)
        sent_at: datetime = pydantic.Field(alias="sentAt")

    codec = codec_for(Parcel)
    parcel = Parcel(sentAt=datetime(2030, 1, 1, tzinfo=timezone.utc))
    assert codec.decode(json.loads(json.dumps(codec.encode(parcel)))) == parcel


def test_the_payload_is_an_object_of_the_parameters() -> None:
    def ship(order: Order, copies: int = 1, *, ctx: SyncContext, note: str | None = None) -> None: ...

    job = handler_of(ship)
    payload = job.new(ORDER, note="x").payload
    assert payload["order"]["items"][0]["price"] == "1.10"
    assert "copies" not in payload
    assert "ctx" not in payload
    assert job.signature.decode(payload) == {"order": ORDER, "note": "x"}


def test_a_bare_payload_is_the_value_of_the_only_parameter() -> None:
    def ship(order: Order, ctx: SyncContext) -> None: ...

    def count(n: int) -> None: ...

    def two(a: int, b: int) -> None: ...

    job = handler_of(ship, bare=True)
    assert job.signature.decode(job.new(ORDER).payload) == {"order": ORDER}
    assert job.new(ORDER).payload["colour"] == "blue"
    assert job.signature.schema["$ref"] == "#/$defs/Order"
    assert handler_of(count, bare=True).new(7).payload == 7
    with pytest.raises(DecodeError, match=r"payload\.n: expected integer, got string"):
        handler_of(count, bare=True).signature.decode("7")
    with pytest.raises(TypeError, match="exactly one parameter"):
        handler_of(two, bare=True)


def test_unknown_and_missing_fields_are_refused_by_name() -> None:
    def ship(order: int, note: str = "") -> None: ...

    job = handler_of(ship)
    with pytest.raises(DecodeError, match=r"payload\.order: the field is missing"):
        job.signature.decode({"note": "x"})
    with pytest.raises(DecodeError, match=r"payload\.odrer: the handler has no parameter of this name"):
        job.signature.decode({"order": 1, "odrer": 1})
    with pytest.raises(DecodeError, match=r"payload\.order: expected integer, got string"):
        job.signature.decode({"order": "1"})
    with pytest.raises(TypeError, match="order"):
        job.new()


def test_a_value_that_does_not_fit_is_refused_before_it_is_sent() -> None:
    def ship(at: datetime) -> None: ...

    with pytest.raises(ValidationError, match="at: the value does not fit"):
        handler_of(ship).new(at=7)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (str, 7, "value: expected string, got integer; the value does not fit its annotation"),
        (list[int], ["x"], r"value\[0\]: expected integer, got string"),
        (float, float("nan"), "value: the value does not fit its annotation: Out of range"),
        (Any, {"a": object()}, "value: the value does not fit its annotation: `object` cannot be converted"),
        (Item, {"name": "x"}, "value: the value does not fit its annotation"),
    ],
)
def test_what_the_worker_would_refuse_is_refused_at_the_enqueue(annotation: Any, value: Any, message: str) -> None:
    def ship(value: Any) -> None: ...

    ship.__annotations__["value"] = annotation
    with pytest.raises(ValidationError, match=message):
        handler_of(ship).new(value=value)


def test_values_of_subclasses_are_accepted() -> None:
    class Name(str): ...

    class Level(enum.IntEnum):
        HIGH = 3

    def ship(name: str, level: int, more: dict[str, Any]) -> None: ...

    nested = OrderedDict(at=defaultdict(list, days=[date(2030, 1, 2)]))
    payload = handler_of(ship).new(name=Name("ada"), level=Level.HIGH, more=dict(nested)).payload
    assert json.loads(json.dumps(payload)) == {"name": "ada", "level": 3, "more": {"at": {"days": ["2030-01-02"]}}}


def test_an_enum_or_literal_without_a_json_form_is_refused_when_the_job_is_defined() -> None:
    class When(enum.Enum):
        NOW = date(2030, 1, 1)

    def one(when: When) -> None: ...

    def two(when: Literal[b"now"]) -> None: ...

    for function in (one, two):
        function.__annotations__["when"] = When if function is one else Literal[b"now"]
        with pytest.raises(TypeError, match="is not a string or a number in JSON"):
            handler_of(function)


def test_the_schema_describes_the_payload() -> None:
    def ship(order: Order, copies: int = 1) -> None: ...

    schema = handler_of(ship).signature.schema
    assert schema["required"] == ["order"]
    assert schema["properties"]["copies"] == {"type": "integer"}
    assert schema["properties"]["order"] == {"$ref": "#/$defs/Order"}
    assert schema["$defs"]["Item"]["properties"]["parts"]["items"] == {"$ref": "#/$defs/Item"}
    assert schema["additionalProperties"] is False


def test_a_context_of_the_wrong_class_is_refused_with_the_remedy() -> None:
    async def ship(ctx: SyncContext) -> None: ...

    with pytest.raises(TypeError, match="annotate `ctx` with Context instead of SyncContext"):
        handler_of(ship)


def test_a_type_without_a_json_form_is_refused_when_the_job_is_defined() -> None:
    def ship(order: object, file: SyncContext, other: type) -> None: ...

    with pytest.raises(TypeError, match="parameter `other`"):
        handler_of(ship)
