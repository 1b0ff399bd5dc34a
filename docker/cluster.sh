#!/usr/bin/env bash
# One service of compose.yaml: cluster.sh head | node | s3. All are of one image.
set -euo pipefail
shared=/etc/vitra-cluster

if [ "$1" = s3 ]; then
  printf '{"identities": [{"name": "laptop", "credentials": [{"accessKey": "%s", "secretKey": "%s"}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}' \
    "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY" >/run/identities.json
  exec weed server -dir=/data -ip=s3 -ip.bind=0.0.0.0 -master.telemetry=false -master.volumeSizeLimitMB=256 \
    -volume.max=50 -filer -s3 -s3.port=8333 -s3.config=/run/identities.json -s3.port.iceberg=0 -s3.port.lance=0
fi

# Every host of a cluster has the same key, which the head makes at its first start.
if [ "$1" = head ] && [ ! -s "$shared/munge.key" ]; then
  (umask 077 && head -c 1024 /dev/urandom >"$shared/munge.key.new")
  mv "$shared/munge.key.new" "$shared/munge.key"
fi
until [ -s "$shared/munge.key" ]; do sleep 0.2; done
install -o munge -g munge -m 400 "$shared/munge.key" /etc/munge/munge.key
install -d -o munge -g munge -m 755 /run/munge
install -d -o munge -g munge -m 700 /var/lib/munge /var/log/munge
setpriv --reuid munge --regid munge --init-groups munged

case $1 in
  head)
    install -d -o slurm -g slurm -m 700 /var/spool/slurmctld
    exec slurmctld -D
    ;;
  node)
    install -d -m 755 /var/spool/slurmd
    exec slurmd -D
    ;;
esac
