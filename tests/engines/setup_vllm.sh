#!/usr/bin/env bash
# Build the environment that tests/engines/vllm runs in: vLLM from PyPI, and of what it names as its dependencies only what
# its scheduler, cache manager and connectors import on a machine without a GPU. `setup_vllm.sh [FOLDER]`
set -euo pipefail

VLLM=0.33.0
root=$(cd "$(dirname "$0")/../.." && pwd)
home=${1:-$root/.engines/vllm}
stamp=$home/.ready
here=$(cat "$0" "$root/constraints-cpu.txt" | sha256sum)
[[ -f $stamp && $(cat "$stamp") == "$here" ]] && exit 0

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[[ -x $home/bin/python ]] || "$python" -m venv "$home"
echo "engines: vLLM $VLLM into ${home#"$root"/}"
# pip lists everything that vLLM names and that is left out, each time: told only where it fails.
install() {
  "$home/bin/python" -m pip -qq install "$@" 2> "$home/pip.log" || { cat "$home/pip.log"; exit 1; }
}
install "setuptools>=77"
# torch first, so that nothing else chooses its build.
install torch --constraint "$root/constraints-cpu.txt"
install --no-deps "vllm==$VLLM" compressed-tensors==0.20.0 mistral_common==1.13.1 nixl nixl-cu13
install triton==3.7.0 transformers==5.19.0 numpy packaging psutil pyzmq urllib3 regex cbor2 aiohttp requests \
  openai-harmony "openai>=2.25" pillow pybase64 cachetools cloudpickle msgspec prometheus-client \
  prometheus-fastapi-instrumentator einops pydantic fastapi protobuf py-cpuinfo diskcache tiktoken pyyaml blake3 \
  setproctitle gguf tqdm six ijson opentelemetry-api sentencepiece partial-json-parser lark opencv-python-headless \
  xxhash depyf watchfiles python-json-logger uvloop xgrammar llguidance
# And what kvmover and the tests need.
install rich typer pytest pytest-timeout
echo "$here" > "$stamp"
