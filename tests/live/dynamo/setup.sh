#!/usr/bin/env bash
# Make .orchestrators/indexer: Dynamo's runtime, whose indexer of KV events is the referee of ours. Its wheel and the two
# it imports, 0.3 GB, without the rest of Dynamo. `setup.sh [FOLDER]`. Where it can't be had it says why and leaves
# nothing: what needs it is skipped.
set -euo pipefail

version=1.6.1
root=$(cd "$(dirname "$0")/../../.." && pwd)
home=${1:-$root/.orchestrators/indexer}
here=$(sha256sum < "$0")
[[ -f $home/.ready && $(cat "$home/.ready") == "$here" ]] && exit 0

without() {
  rm -rf "$home"
  echo "indexer: $1; what needs it is skipped" >&2
  exit 0
}
echo "indexer: Dynamo $version into ${home#"$root"/}, 0.3 GB"
rm -rf "$home"
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -m venv "$home"
"$home/bin/python" -m pip -qq install --no-deps "ai-dynamo-runtime==$version" 2> /dev/null ||
  without "no wheel of ai-dynamo-runtime $version for this machine and Python, or no way to it"
"$home/bin/python" -m pip -qq install "pydantic>=2.10.6,<=2.13.5" "uvloop>=0.21" 2> /dev/null || without "no pydantic or uvloop"
said=$("$home/bin/python" -m dynamo.indexer --help 2>&1) || without "it does not start here: ${said##*$'\n'}"
echo "$here" > "$home/.ready"
