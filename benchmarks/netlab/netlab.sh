#!/bin/bash
# Emulates hosts by network namespaces. Needs root, iproute2, and for a delay a C compiler.
#
#   netlab.sh up HOSTS RATE [DELAY_US]   rate in both directions, as of tc; delay in one direction
#   netlab.sh exec HOST COMMAND...       hosts 0, 1, ... have the addresses 10.77.0.1, 10.77.0.2, ...
#   netlab.sh down
#
# Token buckets limit the rate. A bridge connects the hosts, or wire.c with a delay, since not every
# kernel has netem.
set -e

inside() { ip netns exec "$@"; }

# The burst exceeds a segment that the kernel splits later.
limit() { inside "$1" tc qdisc replace dev "$2" root tbf rate "$3" burst 128kb latency 200ms; }

up() {
  local rate=$2 delay=${3:-0} ports=() bridge=()
  down # of an interrupted run
  ip netns add nlab_switch
  if [ "$delay" = 0 ]; then
    bridge=(master bridge)
    inside nlab_switch ip link add bridge up type bridge
  fi
  for ((i = 0; i < $1; i++)); do
    local host=nlab_h$i
    ip netns add $host
    ip link add eth0 address 02:77:00:00:00:0$((i + 1)) netns $host type veth \
      peer name port$i netns nlab_switch
    inside $host ip link set lo up
    inside $host ip link set eth0 addrgenmode none up
    inside $host ip addr add 10.77.0.$((i + 1))/24 dev eth0
    # The default may be bbr, which paces by itself.
    inside $host ip route replace 10.77.0.0/24 dev eth0 proto kernel scope link \
      src 10.77.0.$((i + 1)) congctl cubic
    inside nlab_switch ip link set port$i addrgenmode none up "${bridge[@]}"
    # Models take turns: the connections of each are idle for seconds before its next step.
    inside $host sysctl -qw net.ipv4.tcp_slow_start_after_idle=0
    limit $host eth0 "$rate"
    limit nlab_switch port$i "$rate"
    ports+=("port$i")
  done
  [ "$delay" = 0 ] && return
  local wire=${TMPDIR:-/tmp}/netlab_wire
  cc -O2 -o "$wire" "$(dirname "$0")/wire.c"
  inside nlab_switch "$wire" "$delay" "${ports[@]}" </dev/null &>/dev/null &
  sleep 0.5
}

down() {
  for name in $(ip netns list | awk '/^nlab_/ {print $1}'); do
    ip netns pids "$name" | xargs -r kill
    ip netns del "$name"
  done
}

case "$1" in
  up | down) "$@" ;;
  exec) inside "nlab_h$2" "${@:3}" ;;
esac
