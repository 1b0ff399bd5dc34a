#!/usr/bin/env bash
# base.sh NAME: makes, without an image registry, an image that stands in for Docker's
# python:3.11-slim-bookworm: Debian with its own Python, from wherever this machine's apt gets it.
# As root. $TMPDIR takes some 500 MB for a moment.
set -euo pipefail
name=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mmdebstrap --quiet --mode=root --variant=minbase \
  --include=ca-certificates,python3,python3-pip,python3-venv \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --customize-hook='rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' \
  --customize-hook='printf "#!/bin/sh\nexit 101\n" >"$1"/usr/sbin/policy-rc.d && chmod 755 "$1"/usr/sbin/policy-rc.d' \
  --customize-hook='ln -s /usr/bin/python3 "$1"/usr/local/bin/python' \
  bookworm "$root/base.tar"
podman import --quiet \
  --change ENV=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --change 'CMD ["python3"]' \
  "$root/base.tar" "$name"
