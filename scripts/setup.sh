#!/usr/bin/env bash
# Makes the virtual environment FOLDER with INTERPRETER and installs the project into it; returns at once when nothing changed.
# Usage: scripts/setup.sh FOLDER [INTERPRETER]      (INTERPRETER: a name or path; default: the newest that works)
# On a machine with an NVIDIA GPU the extra `gpu` is installed too. An interrupted install is repeated by the next call.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="$1"
interpreter="${2:-}"
extras="data,dev"
if nvidia-smi -L >/dev/null 2>&1; then extras="$extras,gpu"; fi

# Two calls at once must not install into one folder.
exec 9>".setup.lock"
flock 9

wanted="$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -c1-16) $extras $interpreter"
stamp="$folder/installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$folder/bin/python" -c '' 2>/dev/null; then exit 0; fi

if [ -z "$interpreter" ]; then interpreter="$(scripts/find_python.sh | sed -n 1p)"; fi
echo "== Setting up $folder: $("$interpreter" --version) ($interpreter), extras $extras"
if ! "$folder/bin/python" -c '' 2>/dev/null; then
  if [ -n "$(ls -A "$folder" 2>/dev/null)" ] && [ ! -f "$folder/pyvenv.cfg" ]; then
    echo "$folder is no virtual environment and not empty; remove it or name another folder" >&2
    exit 1
  fi
  rm -rf "$folder"
  "$interpreter" -m venv "$folder"
fi
rm -f "$stamp"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
"$folder/bin/python" -c 'import jax; print("== Installed: jax", jax.__version__, "on", jax.devices()[0].device_kind)'
echo "$wanted" >"$stamp"
