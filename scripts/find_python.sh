#!/usr/bin/env bash
# Prints the working CPython interpreters this project runs on, newest first, one path a minor version.
# Looks on PATH, in pyenv's folder and in the usual places. A name that does not run (a pyenv shim whose version is not
# active, say) or that cannot make virtual environments is skipped.
set -euo pipefail

works() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != tuple(map(int, sys.argv[1].split("."))))' "$2" \
    >/dev/null 2>&1
}

found=0
for version in 3.13 3.12 3.11; do
  name="python$version"
  candidates=()
  while IFS= read -r path; do candidates+=("$path"); done < <(type -ap "$name" "python3" 2>/dev/null || true)
  candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/"$name" /usr/local/bin/"$name" /usr/bin/"$name" /opt/python*/bin/"$name")
  for path in "${candidates[@]}"; do
    if [ -x "$path" ] && works "$path" "$version"; then
      # A shim depends on the folder it is called from: print the interpreter behind it.
      "$path" -c 'import sys; print(sys.executable)'
      found=1
      break
    fi
  done
done

if [ "$found" = 0 ]; then
  echo "No working python3.11, 3.12 or 3.13 with the venv module was found." \
    "On Debian: apt-get install python3 python3-venv" >&2
  exit 1
fi
