"""Typed options of a TransformersEngine; unknown ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvmover.config import Settings
from kvmover.engines.common import RANK_DEFAULTS, RANK_KEYS, RankOptions, read_options


class TransformersOptions(RankOptions, frozen=True, forbid_unknown_fields=True):
    """The options of an engine of one rank, and `chunk_tokens`: tokens of a prefill that are computed, then sent."""

    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = 512


def parse(said: Mapping[str, Any]) -> tuple[TransformersOptions, Settings]:
    """Returns the options, and the settings of this process with those of `RANK_KEYS` over them.

    Raises ConfigError with the unknown or invalid key.
    """
    return read_options(said, TransformersOptions, RANK_KEYS, "the options of TransformersEngine", RANK_DEFAULTS)
