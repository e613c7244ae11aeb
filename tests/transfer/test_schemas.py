"""Every number and every length that a peer may say has a bound in its schema, whatever message or card it is in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec.inspect as schemas

from kvmover.layout.fleet import Fleet
from kvmover.sharing import HostProcess
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Card, Place, Rank
from kvmover.transport import Memory

#: What the length of the whole note or card bounds, or 64 bits of a number that is compared with another and no more.
WHOLE = {
    "Hello.card",
    "Registered.transport",
    "Want.pages[]",
    "Offered.pages[]",
    "Chunk.digest",
    "Staged.digest",
    "Card.body",
    "Rank.transport",
}

#: Values that check themselves, or that a card is checked for, and the tests that show it.
CHECKED = {"Place", "PoolSpec", "Memory", "HostProcess"}


def unbounded(kind: Any, where: str) -> Iterator[str]:
    """Fields whose schema lets them be of any size."""
    match kind:
        case schemas.IntType(ge=ge, gt=gt, le=le, lt=lt):
            if (ge is None and gt is None) or (le is None and lt is None):
                yield where
        case schemas.StrType(max_length=None) | schemas.BytesType(max_length=None):
            yield where
        case schemas.VarTupleType(item_type=item, max_length=most):
            if most is None:
                yield where
            yield from unbounded(item, f"{where}[]")
        case schemas.TupleType(item_types=items):
            for number, item in enumerate(items):
                yield from unbounded(item, f"{where}[{number}]")
        case schemas.UnionType(types=types):
            for each in types:
                yield from unbounded(each, where)
        case schemas.StructType(cls=cls) | schemas.DataclassType(cls=cls):
            if cls.__name__ not in CHECKED:
                for field in kind.fields:
                    yield from unbounded(field.type, f"{cls.__name__}.{field.name}")
        case schemas.StrType() | schemas.BytesType() | schemas.BoolType() | schemas.EnumType() | schemas.NoneType():
            pass
        case _:
            raise AssertionError(f"{where} is {kind}, which this test does not know")


def test_each_field_of_each_message_and_card_has_a_bound_of_its_own():
    kinds = [*wire.AnyMessage.__args__, Card, Rank]
    found = [where for kind in kinds for where in unbounded(schemas.type_info(kind), kind.__name__)]
    assert len(kinds) == 18
    assert set(found) == WHOLE


def test_values_that_check_themselves_have_the_fields_that_are_checked():
    """Each is tried beyond its bounds in test_handshake.py and test_hostile_peers.py."""
    assert {field.name for field in fields(Memory)} == {"kind", "address", "nbytes", "device"}
    assert {field.name for field in fields(Fleet)} == {"tp", "pp", "cp", "page_tokens", "cp_order", "pages"}
    assert Place.__struct_fields__ == ("engine", "fleet", "rank", "generation")
    assert {field.name for field in fields(HostProcess)} == {"pid", "started"}  # which is compared, and no more
    assert is_dataclass(Memory)
