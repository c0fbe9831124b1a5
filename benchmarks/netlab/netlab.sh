#!/bin/bash
# Emulates hosts by network namespaces whose links have a bandwidth and a delay. Needs root,
# iproute2, and for a delay a C compiler.
#
#   netlab.sh up HOSTS RATE [DELAY_US]   rate in both directions, as of tc; delay in one direction
#   netlab.sh exec HOST COMMAND...       hosts 0, 1, ... have the addresses 10.77.0.1, 10.77.0.2, ...
#   netlab.sh down
#
# Token buckets limit the rate. A bridge connects the hosts, or wire.c if there is a delay, since
# not every kernel has netem.
set -e
folder=$(cd "$(dirname "$0")" && pwd)
run=${TMPDIR:-/tmp}/netlab

inside() { ip netns exec "$@"; }

# The burst exceeds a segment that the kernel splits later.
limit() { inside "$1" tc qdisc replace dev "$2" root tbf rate "$3" burst 128kb latency 200ms; }

up() {
  local rate=$2 delay=${3:-0} ports=()
  ip netns add nlab_switch
  [ "$delay" != 0 ] || inside nlab_switch ip link add bridge type bridge
  [ "$delay" != 0 ] || inside nlab_switch ip link set bridge up
  for ((i = 0; i < $1; i++)); do
    local host=nlab_h$i
    ip netns add $host
    ip link add nlab$i netns $host type veth peer name port$i netns nlab_switch
    inside $host ip link set nlab$i name eth0
    inside $host ip link set lo up
    inside $host ip link set eth0 address 02:77:00:00:00:0$((i + 1)) addrgenmode none up
    inside $host ip addr add 10.77.0.$((i + 1))/24 dev eth0
    # The default may be bbr, which paces by itself.
    inside $host ip route replace 10.77.0.0/24 dev eth0 proto kernel scope link \
      src 10.77.0.$((i + 1)) congctl cubic
    inside nlab_switch ip link set port$i addrgenmode none up
    [ "$delay" != 0 ] || inside nlab_switch ip link set port$i master bridge
    limit $host eth0 "$rate"
    limit nlab_switch port$i "$rate"
    ports+=("port$i")
  done
  [ "$delay" != 0 ] || return 0
  mkdir -p "$run"
  cc -O2 -o "$run/wire" "$folder/wire.c"
  ip netns exec nlab_switch "$run/wire" "$delay" "${ports[@]}" </dev/null &>"$run/log" &
  echo $! >"$run/pid"
  sleep 0.5
}

down() {
  [ ! -f "$run/pid" ] || kill "$(cat "$run/pid")" 2>/dev/null || true
  rm -f "$run/pid"
  for name in $(ip netns list | awk '/^nlab_/ {print $1}'); do ip netns del "$name"; done
}

case "$1" in
  up | down) "$@" ;;
  exec) inside "nlab_h$2" "${@:3}" ;;
  *) sed -n 2,12p "$0" ;;
esac
