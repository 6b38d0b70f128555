#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Debian root folder where no image registry is reachable: debootstrap.sh SUITE FOLDER. Needs root.
# The folder appears only when it is complete: an interrupted run leaves FOLDER.partial, which the next run removes.
set -euo pipefail
suite=$1
folder=$2
partial=$folder.partial
rm -rf --one-file-system "$partial"
# DEBIAN_MIRROR: only where debootstrap's own default cannot be reached.
debootstrap --variant=minbase "$suite" "$partial" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
rm -rf "$partial"/var/cache/apt/archives/*.deb "$partial"/var/lib/apt/lists/* "$partial"/debootstrap
mv "$partial" "$folder"
