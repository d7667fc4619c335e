# Sourced by host.sh and controller.sh. Everything in it may be run again.
# shellcheck shell=bash
source_dir=${VMCKPT_SOURCE:-/vmckpt}
# shellcheck source=scripts/install
source "$source_dir/scripts/install"

# In a host of the lab, which shares /usr with its machine and has no systemd, files are all there is to try.
rehearsal=${VMCKPT_REHEARSAL:-}

packages() {
    [ -n "$rehearsal" ] || install_packages "$@"
}

tell_systemd() {
    [ -n "$rehearsal" ] || systemctl "$@"
}

# Put lines between two marks of ours in a file, in place of those that are there; stdin: the lines.
keep_block() {
    local file=$1 begin="# vmckpt: begin" end="# vmckpt: end" rest
    touch "$file"
    rest=$(sed "/^$begin\$/,/^$end\$/d" "$file")
    { [ -z "$rest" ] || echo "$rest"; echo "$begin"; cat; echo "$end"; } >"$file.new"
    cat "$file.new" >"$file"
    rm "$file.new"
}

# Names for addresses: subnet, then hosts in their order.
name_hosts() {
    local subnet=$1 number=11 name
    shift
    {
        echo "198.18.$subnet.2 controller witness"
        for name in "$@"; do
            echo "198.18.$subnet.$number $name"
            number=$((number + 1))
        done
    } | keep_block /etc/hosts
}

# A bridge `guests` over the card with nobody's address on it, as the lab's hosts have one.
bridge_guests() {
    local address=$1 card
    ip link show guests >/dev/null 2>&1 || ip link add guests type bridge
    ip link set guests up
    [ -z "$address" ] || ip address replace "$address" dev guests
    for card in /sys/class/net/*; do
        card=${card##*/}
        case $card in eth* | en*) ;; *) continue ;; esac
        # The one that vagrant has left alone.
        [ -n "$(ip -4 -o address show dev "$card")" ] || [ -e "/sys/class/net/$card/brport" ] ||
            ip link set "$card" master guests up
    done
}
