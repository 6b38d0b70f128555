#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the environment, or finds it made: requirements/install.sh VENV [PYTHON [PART...]]; install.py says what the parts are.
set -euo pipefail
python=${2:-python3}
# A name that is not there, and a stub of a version manager, print their own reason.
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2> /dev/null || {
  "$python" -V >&2 || true
  echo "error: '$python' is no Python 3 that runs here. To do: name one of 3.11 to 3.13, e.g. make gate PYTHON=python3.11" >&2
  exit 5
}
exec "$python" "$(dirname "$0")/install.py" "$1" "${@:3}"
