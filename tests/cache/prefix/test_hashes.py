"""Page hashes equal SGLang's, do not depend on how a sequence is cut, and refuse what they cannot name."""

from __future__ import annotations

import struct
from array import array
from hashlib import sha256

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.prefix import packed_rows
from kvmover.cache.prefix.hashes import (
    PrefixNamespace,
    _words,
    as_int64,
    as_int64s,
    chain,
    chain_bigrams,
    chain_bytes,
    chain_in_python,
)
from kvmover.errors import KvmoverError

TOKENS = [1, 2, 3, 4, 5, 6, 7, 4294967295]

#: What SGLang 0.5.23's native extension (`mem_cache/cpp_utils/hash_binding.cpp`) answers for TOKENS.
SGLANG_PAGES_OF_4 = [
    "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
    "8e05bb0bda6419b08711bd289fa2445f6a48ba2d85859f30d59d93a94e7ae841",
]
SGLANG_PAGES_OF_2_AFTER_A_PARENT = [
    "5ea9f47da47b7d02e3d4b8c38c62df97aecd079de270b35458bfd7e0d6aace14",
    "ea271eac604ceaf1e1e2271b74834d87cd1c49018009879c941469c8377c1e5c",
    "744f082193600aeb1b99f77a0d49e60f6e1e7dc110cbfcf5a021b83c44dfd965",
    "15783ead8120eb634c7b2672e0aaa080432f9866a6353fb6af3004c72ee47de7",
]
SGLANG_BIGRAM_PAGES_OF_3 = [
    "928a7f8cab7207fc7ba8ba57c48d7e2b6cb8e80a3f6e6b64b775ef1687c77767",
    "f0901962fe1123a1aa7ae9bff1408716d4f4bb95d87ac7490ba2d5af1e67c81c",
]


def hexes(pages: list[bytes]) -> list[str]:
    return [page.hex() for page in pages]


def test_hashes_are_those_of_sglang() -> None:
    assert hexes(chain(b"", TOKENS, 4)) == SGLANG_PAGES_OF_4
    assert hexes(chain(bytes(range(32)), TOKENS, 2)) == SGLANG_PAGES_OF_2_AFTER_A_PARENT
    assert hexes(chain_bigrams(b"", TOKENS, 3)) == SGLANG_BIGRAM_PAGES_OF_3


def test_the_number_that_routers_see_is_the_first_eight_bytes_signed() -> None:
    pages = [bytes.fromhex(text) for text in SGLANG_PAGES_OF_4]
    assert [as_int64(page) for page in pages] == [
        struct.unpack(">q", bytes.fromhex(text)[:8])[0] for text in SGLANG_PAGES_OF_4
    ]
    assert as_int64(pages[0]) < 0
    assert as_int64s(pages) == tuple(map(as_int64, pages))
    assert as_int64s([]) == ()


@pytest.mark.parametrize(
    "buffer",
    [
        TOKENS[:7],
        tuple(TOKENS[:7]),
        array("i", TOKENS[:7]),
        array("q", TOKENS[:7]),
        memoryview(array("I", TOKENS[:7])),
        np.array(TOKENS[:7], np.int32),
        np.array(TOKENS[:7], np.uint32),
        np.array(TOKENS[:7], np.int64),
        np.array(TOKENS[:7], ">i4"),
        np.array([t for token in TOKENS[:7] for t in (token, 99)], np.int32)[::2],
    ],
    ids=lambda buffer: getattr(buffer, "typecode", str(getattr(buffer, "dtype", type(buffer).__name__))),
)
def test_any_buffer_of_integers_gives_the_same_hashes(buffer: object) -> None:
    assert hexes(chain(b"", buffer, 3)) == hexes(
        [
            first := sha256(struct.pack("<3I", 1, 2, 3)).digest(),
            sha256(first + struct.pack("<3I", 4, 5, 6)).digest(),
        ]
    )


SEQUENCES = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(SEQUENCES, st.integers(1, 7), st.data())
def test_no_cut_changes_a_hash(tokens: list[int], page_tokens: int, data: st.DataObject) -> None:
    whole = chain(b"", tokens, page_tokens)
    assert len(whole) == len(tokens) // page_tokens
    cut = data.draw(st.integers(0, len(whole)))
    left = chain(b"", tokens[: cut * page_tokens], page_tokens)
    right = chain(left[-1] if left else b"", tokens[cut * page_tokens :], page_tokens)
    assert left + right == whole


@given(SEQUENCES, st.integers(1, 7), st.data())
def test_no_cut_changes_a_hash_of_bigrams(tokens: list[int], page_tokens: int, data: st.DataObject) -> None:
    whole = chain_bigrams(b"", tokens, page_tokens)
    assert len(whole) == max(0, len(tokens) - 1) // page_tokens
    cut = data.draw(st.integers(0, len(whole)))
    left = chain_bigrams(b"", tokens[: cut * page_tokens + 1], page_tokens)
    right = chain_bigrams(left[-1] if left else b"", tokens[cut * page_tokens :], page_tokens)
    assert left + right == whole


def test_equal_tokens_of_two_namespaces_share_no_hash() -> None:
    tenants = [PrefixNamespace().digest, PrefixNamespace(salt="a").digest, PrefixNamespace(salt="b").digest]
    pages = [page for parent in tenants for page in chain(parent, range(32), 4)]
    assert len(set(pages)) == 3 * 8


def test_hashing_leaves_the_tokens_alone() -> None:
    tokens = np.arange(12, dtype=np.int32)
    tokens.setflags(write=False)
    chain(b"", tokens, 4)
    assert tokens.tolist() == list(range(12))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -2, 3], "unsigned 32-bit number, got -2"),
        (np.array([-1], np.int32), "got -1"),
        ([1, 2**32], "got 4294967296"),
        ([2**70], "shape"),
        ([1.5, 2.0], "float64"),
        ([[1, 2], [3, 4]], "shape \\(2, 2\\)"),
        (np.array([True]), "bool"),
    ],
)
def test_tokens_without_a_name_are_refused_with_their_value(tokens: object, message: str) -> None:
    with pytest.raises(KvmoverError, match=message):
        chain(b"", tokens, 1)


def test_a_page_of_no_tokens_and_a_parent_that_is_no_hash_are_refused() -> None:
    with pytest.raises(KvmoverError, match="at least one token, got 0"):
        chain(b"", [1], 0)
    with pytest.raises(KvmoverError, match="32 bytes or none, got 31"):
        chain_bigrams(bytes(31), [1], 1)


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 127, 128, 255, 256, 65535, 65536]), max_size=40))
def test_words_are_packed_as_msgspec_does(words: list[int]) -> None:
    row = array("I", words).tobytes()
    for step in (1, 2):
        assert packed_rows.pack_words(row, step) == packed_rows.pack_words_in_python(row, step)
    assert packed_rows.unpacked(packed_rows.packed(words)) == tuple(words)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, -1, -32, -33, -128, -129, 2**31, -(2**31)])))
def test_names_are_packed_as_msgspec_does(names: list[int]) -> None:
    row = b"".join(name.to_bytes(8, "big", signed=True) + bytes(24) for name in names)
    assert packed_rows.pack_hashes(row) == packed_rows.pack_hashes_in_python(row) == msgspec.msgpack.encode(names)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_long_rows_are_joined_without_being_read(count: int) -> None:
    some = packed_rows.packed(range(count))
    assert packed_rows.joined([some, packed_rows.packed([7]), some]) == packed_rows.packed(
        [*range(count), 7, *range(count)]
    )
    assert packed_rows.pack_words(array("I", range(count)).tobytes(), 1) == bytes(memoryview(some))


def test_words_of_32_bits_are_not_copied() -> None:
    for dtype in (np.int32, np.uint32):
        tokens = np.arange(8, dtype=dtype)
        assert np.shares_memory(_words(tokens), tokens)


def test_a_page_without_its_last_byte_has_no_hash_in_python_either() -> None:
    assert len(chain_in_python(b"", bytes(15), 8)) == len(chain_bytes(b"", bytes(15), 8)) == 32
