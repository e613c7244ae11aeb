#!/usr/bin/env bash
# Make .mooncake: Mooncake's wheel for machines without a GPU, and beside it the small libraries that it takes from the
# machine, where this one lacks them. They are NIXL's, which .venv has: Debian's own, installed, make NIXL's processes
# crash as they end. `mooncake.sh [FOLDER]`. Where it can't be had it says why and leaves nothing: what needs it is skipped.
set -euo pipefail

version=0.3.13.post1
root=$(cd "$(dirname "$0")/../.." && pwd)
home=${1:-$root/.mooncake}
python=$root/.venv/bin/python
here=$({ cat "$0"; "$python" -c 'import nixl_cu13, sys; print(sys.version, nixl_cu13.__file__)' 2>&1; } | sha256sum)
[[ -f $home/.ready && $(cat "$home/.ready") == "$here" ]] && exit 0

without() {
  rm -rf "$home"
  echo "mooncake: $1; what needs it is skipped" >&2
  exit 0
}
echo "mooncake: $version into ${home#"$root"/}, 0.16 GB"
rm -rf "$home"
"$python" -m pip -qq install --no-deps --target "$home" "mooncake-transfer-engine-non-cuda==$version" 2> /dev/null ||
  without "no wheel of $version for this machine and Python, or no way to it"

# The wheel's own libraries are where its programs and modules look for others too.
bundled=$home/mooncake_transfer_engine_non_cuda.libs
nixl=$("$python" -c 'import nixl_cu13, pathlib; print(pathlib.Path(nixl_cu13.__file__).parents[1] / "nixl_cu13.libs")' 2> /dev/null || true)
for name in libibverbs libnuma libcurl; do
  suffix=$([[ $name == libcurl ]] && echo so.4 || echo so.1)
  "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$name.$suffix" 2> /dev/null && continue
  found=("$nixl/$name"-*.so.*)
  [[ -f ${found[0]} ]] || without "this machine has no $name.$suffix, and NIXL's wheel brings none"
  cp "${found[0]}" "$bundled/$name.$suffix"
  # What it needs in turn, under the names that NIXL's wheel gave to them.
  cp -n "$nixl"/libnl-*.so.* "$nixl"/libzstd-*.so.* "$bundled"
done

chmod +x "$home"/mooncake/mooncake_{master,client}
said=$(PYTHONPATH=$home "$python" -c 'import mooncake.store' 2>&1 && "$home/mooncake/mooncake_master" --version 2>&1) ||
  without "it does not load here: ${said##*$'\n'}"
echo "$here" > "$home/.ready"
