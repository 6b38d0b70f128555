#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the environment, or finds it made: requirements/install.sh VENV [PYTHON [PART...]]; install.py says what the parts are.
set -euo pipefail
python=${2:-python3}
refuse() {
  echo "error: $1" >&2
  echo "  to do: name a Python that hilgate runs on, 3.11 to 3.13: make gate PYTHON=python3.11" >&2
  exit 5
}
# A name that is not there, and a version manager's stub for one, say so themselves.
"$python" -V > /dev/null || refuse "'$python' does not run"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || refuse "'$python' is $("$python" -V)"
exec "$python" "$(dirname "$0")/install.py" "$1" "${@:3}"
