"""Every test here runs over both cores of the tree."""

from tests.cache.prefix.conftest import used_core as used_core
