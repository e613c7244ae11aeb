#!/usr/bin/env bash
# Build the environment of an engine, for tests/engines and tests/live: its wheel and, of what that names as its
# dependencies, only what the engine imports on a machine without a GPU. `setup.sh ENGINE [FOLDER]`, ENGINE: sglang, vllm.
# Each step that is done is skipped the next time; what a broken run left out is fetched by the next.
set -euo pipefail

engine=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
lists=$root/tests/engines/$engine
home=${2:-$root/.engines/$engine}
stamp=$home/.ready
here=$(cat "$0" "$lists"/{alone,needs}.txt "$root"/{constraints-cpu.txt,pyproject.toml} "$root"/tests/live/fixtures/*/pyproject.toml | sha256sum)
[[ -f $stamp && $(cat "$stamp") == "$here" ]] && exit 0

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[[ -x $home/bin/python ]] || "$python" -m venv "$home"
echo "engines: $(grep "^$engine==" "$lists/alone.txt") into ${home#"$root"/}"
# pip lists everything that the engine names and that is left out, each time: told only where it fails.
install() {
  "$home/bin/python" -m pip -qq install "$@" 2> "$home/pip.log" || { cat "$home/pip.log"; exit 1; }
}
install "setuptools>=77"
# torch first, so that nothing else chooses its build.
install torch --constraint "$root/constraints-cpu.txt"
install --no-deps --requirement "$lists/alone.txt"
install --requirement "$lists/needs.txt"
# For servers that take images alone: its operators are of a CUDA build. Nothing calls them, but what tells torch their
# shapes asks for them as it is imported.
[[ -d $home/apart/torchvision ]] || install --no-deps --target "$home/apart" torchvision==0.28.0
: > "$home/apart/torchvision/_meta_registrations.py"
install rich typer xxhash pytest pytest-timeout
# kvmover as it stands in this checkout, and what lets the engine run without a GPU.
install --no-deps --no-build-isolation --editable "$root"
[[ -f $root/tests/live/fixtures/$engine/pyproject.toml ]] && install --no-deps --no-build-isolation --editable "$root/tests/live/fixtures/$engine"
echo "$here" > "$stamp"
