#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Debian packages into the image: apt.sh PACKAGE... The list of what came, with versions, stays in the image.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
[ "$#" -gt 0 ] || { echo "apt.sh: name the packages (pins.toml, cpu.packages)" >&2; exit 2; }
apt-get update --quiet --quiet
apt-get install --quiet --quiet --yes --no-install-recommends "$@"
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log
mkdir -p /opt/image
dpkg-query --show --showformat '${Package} ${Version}\n' > /opt/image/packages.txt
