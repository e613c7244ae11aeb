"""The configuration: every setting that an operator may change, in one file and the environment, typed and checked.

>>> from kvmover.config import load
>>> load(environ={"KVMOVER_MOVER_DEADLINE_S": "5"}).settings.mover.deadline_s
5.0
"""

from kvmover.config.errors import ConfigError
from kvmover.config.keys import Key, keys
from kvmover.config.load import Loaded, Option, load
from kvmover.config.settings import Settings

__all__ = ["ConfigError", "Key", "Loaded", "Option", "Settings", "keys", "load"]
