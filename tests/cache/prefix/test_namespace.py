"""Two namespaces are one only when every field is equal; no way of joining fields confuses them."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.prefix.hashes import PrefixNamespace

TEXT = st.text(max_size=3)
NAMESPACES = st.builds(PrefixNamespace, TEXT, TEXT, TEXT, st.lists(TEXT, max_size=3).map(tuple))


def test_the_namespace_of_all_defaults_has_no_digest() -> None:
    assert PrefixNamespace().digest == b""
    assert PrefixNamespace(extra=("",)).digest != b""


def test_a_digest_is_32_bytes_and_the_same_in_every_process() -> None:
    namespace = PrefixNamespace("llama", "lora-7", "tenant", ("image", "a"))
    assert namespace.digest.hex() == "5a8b0fa360f8e44a7eab4a42e232916023b0af6da3fe9af767e3974006216de5"
    code = (
        "from kvmover.cache.prefix.hashes import PrefixNamespace\n"
        "print(PrefixNamespace('llama', 'lora-7', 'tenant', ('image', 'a')).digest.hex())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == namespace.digest.hex()


@given(NAMESPACES, NAMESPACES)
def test_digests_are_equal_exactly_when_all_fields_are(left: PrefixNamespace, right: PrefixNamespace) -> None:
    assert (left.digest == right.digest) == (left == right)


def test_text_moved_from_one_field_to_the_next_is_another_namespace() -> None:
    """An adapter that is appended to a key cannot be told from a longer key (fact sheet, open question 2)."""
    family = [
        PrefixNamespace("ab", "c"),
        PrefixNamespace("a", "bc"),
        PrefixNamespace("abc"),
        PrefixNamespace("", "abc"),
        PrefixNamespace("", "", "abc"),
        PrefixNamespace(extra=("abc",)),
        PrefixNamespace(extra=("ab", "c")),
        PrefixNamespace(extra=("a", "bc")),
        PrefixNamespace(extra=("abc", "")),
    ]
    assert len({each.digest for each in family}) == len(family)


def test_a_salt_that_is_no_valid_unicode_has_a_digest_of_its_own() -> None:
    assert len({PrefixNamespace(salt=salt).digest for salt in ("\ud800", "\ud801", "?")}) == 3
