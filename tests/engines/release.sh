#!/usr/bin/env bash
# Lay the Python of another release of an engine over its environment, and print the folder for PYTHONPATH: nothing is
# built, and the environment stays as it is. `release.sh ENGINE VERSION`: vllm 0.31.0 takes 70 MB in .engines/releases.
set -euo pipefail

engine=$1 version=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/.engines/releases/$engine-$version
if [[ ! -f $home/.ready ]]; then
  rm -rf "$home"
  mkdir -p "$home/wheel"
  "$root/.engines/$engine/bin/python" -m pip -qq download --no-deps --only-binary :all: --dest "$home/wheel" "$engine==$version" >&2
  # Compiled parts are of a CUDA build, which nothing here can load.
  "$root/.engines/$engine/bin/python" - "$home" <<'PY'
import sys, zipfile
from pathlib import Path

home = Path(sys.argv[1])
with zipfile.ZipFile(next((home / "wheel").glob("*.whl"))) as wheel:
    wheel.extractall(home, [name for name in wheel.namelist() if not name.endswith(".so")])
PY
  rm -rf "$home/wheel"
  # A release registers models by names that a later transformers has itself: it gets the one that it was built with.
  lay() { "$root/.engines/$engine/bin/python" -m pip -qq install --no-deps --target "$home" "$@" >&2; }
  needs() { sed -nE "s/^Requires-Dist: (($2) ?[(=<>!][^;]*)$/\\1/p" "$home/$1"-*.dist-info/METADATA; }
  if pin=$(needs "$engine" transformers | grep ==); then
    lay "$pin"
    mapfile -t parts < <(needs transformers "tokenizers|huggingface-hub" | sort -u)
    lay "${parts[@]}"
  fi
  touch "$home/.ready"
fi
echo "$home"
