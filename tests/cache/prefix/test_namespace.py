"""Two namespaces are one only when every field is equal; no way of joining fields confuses them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.prefix import (
    DeviceOnly,
    KeyUnits,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    WriteThrough,
)
from kvmover.cache.prefix.tree_config import Tiers

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


A, B = PrefixNamespace(salt="tenant a"), PrefixNamespace(salt="tenant b")


def hosted() -> PrefixTree:
    return PrefixTree(1, tiers=WriteThrough())


@pytest.mark.parametrize("given", [A, PrefixNamespace()], ids=["of a tenant", "of everybody"])
def test_a_key_of_another_namespace_than_the_call_says_is_refused(given: PrefixNamespace) -> None:
    tree = hosted()
    key = tree.key([1, 2, 3], given)
    tree.insert(key, [10, 11, 12])
    for call in (
        lambda: tree.match(key, namespace=B),
        lambda: tree.insert(key, [20, 21, 22], namespace=B),
        lambda: tree.begin_fetch(key, 0, [1, 2, 3], namespace=B),
    ):
        with pytest.raises(PrefixError, match="the key is of another namespace than the call"):
            call()
    assert tree.match(key, namespace=given).tokens == tree.match(key).tokens == 3
    assert tree.match([1, 2, 3], namespace=B).full_tokens == 0


def test_what_storage_brings_for_a_tenant_is_seen_by_that_tenant_alone() -> None:
    tree = hosted()
    tree.end(tree.begin_fetch([1, 2, 3], 0, [10, 11, 12], namespace=A))
    assert [tree.match([1, 2, 3], namespace=each).best_tokens for each in (A, B, PrefixNamespace())] == [3, 0, 0]


@pytest.mark.parametrize("units", list(KeyUnits))
@pytest.mark.parametrize("tiers", [DeviceOnly(), WriteThrough()])
def test_a_key_that_was_hashed_names_the_nodes_made_of_it_as_the_tree_would(units: KeyUnits, tiers: Tiers) -> None:
    tree, other = (PrefixTree(2, units=units, tiers=tiers) for _ in range(2))
    salted = PrefixNamespace(salt="s")
    for tokens in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]):
        key, pages = tree.key(tokens, salted), (len(tokens) - int(units) + 1) // 2
        names = key.page_hashes(tree.config.page_words)
        mine = tree.insert(key, range(100 * len(tokens), 100 * len(tokens) + pages))
        theirs = other.insert(tokens, range(100 * len(tokens), 100 * len(tokens) + pages), namespace=salted)
        assert tree.page_hashes(mine.node) == names[:pages] == other.page_hashes(theirs.node)
        assert key.page_hashes(1) != names, "each size of a page has hashes of its own"
    tree.check()
