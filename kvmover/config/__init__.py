"""The configuration is every setting, in one file and the environment, typed and checked.

>>> from kvmover.config import load
>>> load(environ={"KVMOVER_MOVER_DEADLINE_S": "5"}).settings.mover.deadline_s
5.0
"""

from kvmover.config.load import Loaded, Option, load
from kvmover.config.settings import ConfigError, SettingKey, Settings, keys

__all__ = ["ConfigError", "Loaded", "Option", "SettingKey", "Settings", "keys", "load"]
