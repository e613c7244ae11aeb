"""The releases of vLLM that the connector was tested with: vLLM calls the interface experimental itself."""

from kvmover.engines.common.release import Tested

VLLM = Tested("vLLM", "vllm", ("0.33.0",), "kvmover.engines.vllm")
