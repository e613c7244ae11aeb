#!/usr/bin/env bash
# Lay an orchestrator's Python over the environments of the engines, and print the folder for PYTHONPATH. Its wheels and
# the few modules that those environments lack are installed without what they name as their dependencies, so that
# no other torch comes with them. `orchestrator.sh NAME`: dynamo takes 0.27 GB in .orchestrators, ray 0.42 GB.
set -euo pipefail

name=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
list=$root/tests/engines/orchestrators/$name.txt
home=$root/.orchestrators/$name
here=$(cat "$0" "$list" | sha256sum)
if [[ ! -f $home/.ready || $(cat "$home/.ready") != "$here" ]]; then
  echo "orchestrators: $(grep -m1 == "$list") into ${home#"$root"/}" >&2
  rm -rf "$home"
  "$root/.engines/vllm/bin/python" -m pip -qq install --no-deps --only-binary :all: --target "$home" --requirement "$list" >&2
  echo "$here" > "$home/.ready"
fi
echo "$home"
