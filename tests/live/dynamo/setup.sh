#!/usr/bin/env bash
# Make .orchestrators/NAME, a referee of kvmover: `setup.sh NAME [FOLDER]`, NAME: indexer, Dynamo's indexer of KV events in
# the wheel of its runtime, 0.3 GB; kvcr, NVIDIA's KVCR with the NIXL that it names, 0.3 GB. Of what each names as its
# dependencies only what it imports. Where it can't be had it says why and leaves nothing: what needs it is skipped.
set -euo pipefail

name=$1
case $name in
  indexer) wheels=("ai-dynamo-runtime==1.6.1") needs=("pydantic>=2.10.6,<=2.13.5" "uvloop>=0.21") try=(-m dynamo.indexer --help) ;;
  kvcr) wheels=("kvcr==0.1.1" "nixl==1.5.0" "nixl-cu13==1.5.0") needs=("msgspec<1,>=0.21" "pyzmq<28,>=25" numpy) try=(-c "import kvcr") ;;
  *) echo "setup.sh: no referee is called $name" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$0")/../../.." && pwd)
home=${2:-$root/.orchestrators/$name}
here="${wheels[*]} ${needs[*]} $(sha256sum < "$0")"
[[ -f $home/.ready && $(cat "$home/.ready") == "$here" ]] && exit 0

without() {
  rm -rf "$home"
  echo "$name: $1; what needs it is skipped" >&2
  exit 0
}
echo "$name: ${wheels[0]} into ${home#"$root"/}, 0.3 GB"
rm -rf "$home"
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -m venv "$home"
"$home/bin/python" -m pip -qq install --no-deps "${wheels[@]}" 2> /dev/null ||
  without "no wheel of ${wheels[*]} for this machine and Python, or no way to it"
"$home/bin/python" -m pip -qq install "${needs[@]}" 2> /dev/null || without "no ${needs[*]}"
said=$("$home/bin/python" "${try[@]}" 2>&1) || without "it does not start here: ${said##*$'\n'}"
echo "$here" > "$home/.ready"
