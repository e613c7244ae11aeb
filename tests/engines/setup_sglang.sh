#!/usr/bin/env bash
# Build the environment that tests/engines/sglang runs in: SGLang from PyPI, and of what it names as its dependencies only
# what its cache, controller and transfer code import on a machine without a GPU. `setup_sglang.sh [FOLDER]`
set -euo pipefail

SGLANG=0.5.23
root=$(cd "$(dirname "$0")/../.." && pwd)
home=${1:-$root/.engines/sglang}
stamp=$home/.ready
here=$(cat "$0" "$root/constraints-cpu.txt" | sha256sum)
[[ -f $stamp && $(cat "$stamp") == "$here" ]] && exit 0

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[[ -x $home/bin/python ]] || "$python" -m venv "$home"
echo "engines: SGLang $SGLANG into ${home#"$root"/}"
# pip lists everything that SGLang names and that is left out, each time: told only where it fails.
install() {
  "$home/bin/python" -m pip -qq install "$@" 2> "$home/pip.log" || { cat "$home/pip.log"; exit 1; }
}
install "setuptools>=77"
# torch first, so that nothing else chooses its build.
install torch --constraint "$root/constraints-cpu.txt"
install --no-deps "sglang==$SGLANG" compressed-tensors==0.18.0 nixl nixl-cu13
install triton==3.7.0 transformers==5.19.0 apache-tvm-ffi==0.1.11 sentencepiece==0.2.1 openai==2.8.0 \
  numpy orjson psutil pybase64 requests packaging pillow starlette msgspec pydantic pydantic_core pyzmq tqdm ipython \
  aiohttp dill loguru gguf partial_json_parser ninja
# And what kvmover and the tests need.
install xxhash rich typer pytest pytest-timeout
echo "$here" > "$stamp"
