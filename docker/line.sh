# Holds what eth0 of this network namespace sends to $UPLINK (as tc writes rates: 10mbit), until it is stopped.
set -eu
trap 'exit 0' TERM INT
# A queue of 200 ms, as home routers have.
tc qdisc replace dev eth0 root tbf rate "${UPLINK:?}" burst 16kb latency 200ms
tc qdisc show dev eth0
while :; do
    sleep 3600 &
    wait $!
done
