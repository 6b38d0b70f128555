#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make this host an agent of a queue. As root, in root's clone of the default branch; asks again when started again.
#
#   set-up.sh [--dry-run]
#
# It asks what a host must know, shows every command, and runs them once you agree. What the answers mean:
# docs/how-to/set-up-agents.md.
set -euo pipefail
agent="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"
clone="$(cd "$agent/../.." && pwd)"
etc=/etc/buildkite-agent
repository='' queue='' registry='' history='' cache='' key='' agreed=''

refuse() {
  printf 'error: %s\n  to do: %s\n' "$2" "$3" >&2
  exit "$1"
}

# VARIABLE QUESTION DEFAULT
ask() {
  printf '%s [%s]: ' "$2" "$3"
  IFS= read -r answer || refuse 2 "no answer to: $2" "answer every question, an empty line for the default"
  # The settings are a file of lines, which systemd reads.
  [[ "$answer" != *[\"\'\\\$\`]* ]] || refuse 2 "a quote, backslash or dollar in: $answer" "leave it out"
  printf -v "$1" %s "${answer:-$3}"
  [ -t 0 ] || echo
}

setting() {
  [ -z "$2" ] || printf "sed -i '/^%s=/d' %s/host.env\necho '%s=%s' >> %s/host.env\n" "$1" "$etc" "$1" "$2" "$etc"
}

case "${1-}" in
  '' | --dry-run) ;;
  *) refuse 2 "unknown option $1" "set-up.sh [--dry-run]" ;;
esac
[ -n "${1-}" ] || [ "$(id -u)" = 0 ] || refuse 5 "only root may set a host up" "sudo $0, or $0 --dry-run"

ask repository "clone of the repository that the agent serves" "$clone"
ask queue "queue" amd-cpu
queues="$(python3 -c 'import sys, yaml; print(*yaml.safe_load(open(sys.argv[1]))["queues"])' "$repository/ci/agents.yaml")" ||
  refuse 5 "cannot read the queues of $repository/ci/agents.yaml" "install python3-yaml, or name another clone"
[[ " $queues " == *" $queue "* ]] || refuse 3 "no queue $queue in $repository/ci/agents.yaml" "one of: $queues"
ask registry "registry that images come from, empty for none" ""
needs=(buildkite-agent git)
case "$queue" in
  *-gate)
    needs+=(make)
    ask history "file of judged builds" /var/lib/buildkite-agent/history/history.sqlite
    ;;
  *-release)
    needs+=(make ssh-keygen)
    ask key "key that signs releases" "$etc/release_key"
    ;;
  *-image) needs+=(make docker buildah debootstrap) ;;
  *)
    needs+=(docker)
    ask cache "folder of models that jobs share, empty for none" ""
    ;;
esac
token="${BUILDKITE_AGENT_TOKEN:-}"
if [ -z "$token" ] && [ -z "${1-}" ] && [ ! -s "$etc/token" ]; then
  read -r -s -p "token of the cluster: " token && echo
fi

# One command a line: `bash -e` goes on after a failure to the left of `&&`.
commands() {
  echo "ln -sfn $agent/hilgate.sysusers.conf /etc/sysusers.d/hilgate.conf"
  echo systemd-sysusers
  echo "ln -sfn $agent/hilgate.tmpfiles.conf /etc/tmpfiles.d/hilgate.conf"
  echo "systemd-tmpfiles --create"
  echo "ln -sfn $agent/buildkite-agent.cfg $etc/buildkite-agent.cfg"
  echo "ln -sfn $agent/buildkite-agent@.service $agent/hilgate-reap.service $agent/hilgate-reap.timer /etc/systemd/system/"
  # shellcheck disable=SC2016  # the token is in no command line
  [ -z "$token" ] || echo "install -m 600 /dev/stdin $etc/token"' <<< "$TOKEN"'
  echo "[ -e $etc/host.env ] || install -m 600 /dev/null $etc/host.env"
  [ "$repository" = "$clone" ] || setting HILGATE_REPOSITORY "$repository"
  setting HILGATE_REGISTRY "$registry"
  setting HILGATE_HISTORY "$history"
  setting HILGATE_CACHE "$cache"
  setting HILGATE_RELEASE_KEY "$key"
  [ -z "$cache" ] || echo "install -d -o buildkite-agent $cache"
  if [[ "$queue" == *-image ]]; then
    echo "install -d /etc/systemd/system/buildkite-agent@$queue.service.d"
    printf '%s\n' "printf '[Service]\nUser=root\n' > /etc/systemd/system/buildkite-agent@$queue.service.d/root.conf"
  fi
  [[ " ${needs[*]} " != *" make "* ]] || echo "make -C $clone setup"
  echo "systemctl daemon-reload"
  echo "systemctl enable --now hilgate-reap.timer buildkite-agent@$queue"
}

missing=()
for program in "${needs[@]}"; do
  command -v "$program" > /dev/null || missing+=("$program")
done
commands
[ -z "${1-}" ] || exit 0
[ "${#missing[@]}" = 0 ] || refuse 5 "this host lacks ${missing[*]}" "install them, then start again"
ask agreed "run these commands?" no
[ "$agreed" = yes ] || refuse 2 "nothing was done" "answer yes"
TOKEN="$token" bash -euxo pipefail -c "$(commands)"
