#!/usr/bin/env bash
# The first hour of somebody who knows Slurm and not vitra, in little more than a minute: from a fresh
# environment to a run of an own model that a colleague's job preempts, that goes on by itself, and finishes.
# Every step says what it shows, and is checked; the first that goes wrong ends this.
#
#     sudo slurm/cluster start && .ci/venv test && tests/e2e/first_hour.sh
#
# Or on a cluster of yours, with, in the environment:
#     PARTITION  two of its nodes have to be free, and its jobs requeued when they are preempted (low)
#     COLLEAGUE  the partition whose jobs preempt them (high)
#     WHERE      a directory to be made on a file system that all nodes see (a new one in /var/tmp)
#     WHEEL      what to install (a wheel built from this checkout)
#     PYTHON     makes the environment; has pip, and build where WHEEL is not given (the checkout's .venv)
#     PACKAGES   a site-packages directory from which what vitra needs is borrowed; empty: it is downloaded
set -Eeuo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${PYTHON:-$checkout/.venv/bin/python}
# Downloading torch once more shows nothing and takes minutes.
PACKAGES=${PACKAGES-$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}
PARTITION=${PARTITION:-low} COLLEAGUE=${COLLEAGUE:-high}
WHERE=${WHERE:-$(mktemp -d /var/tmp/first-hour-XXXXXX)}
mkdir -p "$WHERE"
cd "$WHERE"

step() { printf '\n--- %s\n' "$*"; }
fail() {
  printf '\nFAILED after %s s: %s\n(the files are in %s)\n' "$SECONDS" "$*" "$WHERE" >&2
  trap - ERR
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
# Shows a command and what it says, which `expect` then looks at.
show() {
  printf '$ %s\n' "$*"
  "$@" 2>&1 | tee last-output
}
expect() { grep -qE -- "$1" last-output || fail "the last command was expected to say: $1"; }
wait_for() {
  local what=$1 deadline=$((SECONDS + 120))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$deadline" ] || fail "waited 120 s for $what"
    sleep 0.2
  done
}
happened() { grep -qs "\"event\": \"$1\"" runs/*/events.jsonl; }
following='' colleague='' job=''
finish() {
  [ -z "$following" ] || ! kill "$following" 2>/dev/null || wait "$following" || true
  [ -z "$colleague" ] || scancel "$colleague" || true
  # Only where something went wrong on the way is it still there.
  [ -z "$job" ] || scancel "$job" || true
}
trap finish EXIT

step "a fresh environment, and vitra in it"
if [ -z "${WHEEL:-}" ]; then
  "$PYTHON" -m build --wheel --outdir "$WHERE/wheel" "$checkout" >build.log 2>&1 || fail "$(tail -5 build.log)"
  WHEEL=$(echo "$WHERE"/wheel/*.whl)
fi
"$PYTHON" -m venv --without-pip venv
"$PYTHON" -m pip --python venv/bin/python install --quiet --disable-pip-version-check \
  ${PACKAGES:+--no-deps} "$WHEEL"
if [ -n "$PACKAGES" ]; then
  # Only packages are found there: of a path in a .pth no .pth is read, so no editable install counts.
  echo "$PACKAGES" >"$(echo venv/lib/python3*/site-packages)/borrowed.pth"
fi
PATH=$WHERE/venv/bin:$PATH
show vitra --version
expect '^vitra [0-9]+\.[0-9]+'
show vitra --help
for command in doctor init plan submit status logs resume cancel checkpoints export; do
  expect "\b$command\b"
done

step "is this machine ready, and its cluster?"
show vitra doctor
expect '^ok +slurm'

step "a model and a data set of my own: one file, nothing to inherit or to register"
cat >my_policy.py <<'PY'
import time

import numpy as np
import torch
from torch import nn


class Demonstrations:
    meta = {"features": 8}

    def __init__(self, options, seed):
        self.x = np.random.default_rng(seed).normal(size=(2000, 8)).astype("float32")

    def __len__(self):
        return len(self.x)

    def sample(self, index, rng):
        time.sleep(0.001)  # as if it read a video
        noise = rng.generator("noise").normal(scale=0.1)
        return {"x": self.x[index], "y": np.float32(np.tanh(self.x[index]).sum() + noise)}

    def collate(self, samples):
        return {name: torch.tensor(np.stack([s[name] for s in samples])) for name in samples[0]}


class Policy(nn.Module):
    backbone_prefixes = ("body.",)
    shard_classes = checkpoint_classes = (nn.Linear,)

    def __init__(self, options, context):
        super().__init__()
        self.body = nn.Linear(context.data_meta["features"], options["width"])
        self.head = nn.Linear(options["width"], 1)

    def forward(self, batch):
        hidden = nn.functional.dropout(self.body(batch["x"]).tanh(), 0.1, self.training)
        return (self.head(hidden).squeeze(-1).float() - batch["y"]).square().sum()

    def loss_count(self, batch):
        return len(batch["y"])

    def init_parameter(self, name, tensor, generator):
        tensor.normal_(0.0, 0.1, generator=generator)

    def init_buffers(self):
        pass
PY
show vitra init --list
show vitra init --template own-components
# What an editor would be used for: the lines marked CHANGE, the size, and the place.
sed -i -E \
  -e 's/^( *kind: )my_policy\.model:build_model/\1my_policy:Policy/' \
  -e 's/^( *kind: )my_policy\.data:build_data/\1my_policy:Demonstrations/' \
  -e 's/^( *max_steps: ).*/\1600/' -e 's/^( *save_interval: ).*/\1100/' \
  -e "s/^( *nodes: ).*/\12\n  partition: $PARTITION/" -e 's/^( *tasks_per_node: ).*/\11/' \
  -e 's/^( *cpus_per_task: )[0-9]+/\11/' spec.yaml

step "what would it do? Nothing is touched, and nothing is rounded"
show vitra plan spec.yaml
expect 'global batch +32 per device x 2 x 1 accumulation = 64'
show vitra submit spec.yaml --dry-run
expect "^#SBATCH --partition=$PARTITION$"
[ ! -e runs ] || fail "a dry run has made something"

step "a slip of the pen is found before anything is queued"
if show vitra plan spec.yaml -o resources.nods=3; then fail "it was accepted"; fi
expect 'resources\.nods: unknown key; did you mean nodes\?'

step "submit it"
show vitra submit spec.yaml
job=$(sed -n 's/^job \([0-9]*\)$/\1/p' last-output)
expect '^next: vitra status own-'
expect '^ +vitra logs own-\S+ -f'
timeout 180 vitra logs own -f >followed.log 2>&1 &
following=$!
wait_for "the first checkpoint" happened saved
show vitra status own
expect '^state +running'

step "a colleague takes its nodes"
colleague=$(sbatch --parsable --partition="$COLLEAGUE" --exclusive --nodes=2 --time=1 --job-name=colleague \
  --nodelist="$(squeue -h -j "$job" -o %N)" --output=/dev/null --wrap 'sleep 5')
wait_for "the preemption" happened requeued
show vitra status own
expect '^attempt 1 +preempted'
show vitra ps

step "nothing is left to do: it goes on by itself, and the logs follow it to the end"
if ! wait "$following"; then fail "vitra logs -f: $(tail -3 followed.log)"; fi
following=''
(head -6; echo ...; tail -6) <followed.log
grep -q '^\[2/1\]' followed.log || fail "vitra logs -f shows nothing of the second attempt"
vitra logs own >whole.log
diff <(sort followed.log) <(sort whole.log) || fail "vitra logs -f has lost a line, or shown one twice"
show vitra status own
expect '^state +completed'
expect '^step +600 of 600'
expect '^attempt 2 +completed'
venv/bin/python - runs/own-*/metrics.jsonl <<'PY' || fail "a step is missing, or was counted twice"
import json, sys
steps = [json.loads(line)["step"] for line in open(sys.argv[1])]
assert steps == list(range(1, 601)), steps
PY

step "what it has learnt"
show vitra checkpoints own --verify
expect '^step +600 +every byte checked'
show vitra export own --to weights.safetensors
venv/bin/python - <<'PY' || fail "the weights are not those of the model"
from safetensors.numpy import load_file
shapes = {name: tuple(array.shape) for name, array in load_file("weights.safetensors").items()}
assert shapes["head.weight"] == (1, 256), shapes
PY
job=''
printf '\nPreempted, resumed and finished: a first hour of %s s.\n' "$SECONDS"
