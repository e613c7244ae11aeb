"""The releases of SGLang that these adapters were tested with."""

from kvmover.engines.common.release import Tested

SGLANG = Tested("SGLang", "sglang", ("0.5.23",), "kvmover.engines.sglang")
