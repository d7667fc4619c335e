# Sourced by host.sh and controller.sh. All functions can be run repeatedly.
# shellcheck shell=bash
source_dir=${VMCKPT_SOURCE:-/vmckpt}
# shellcheck source=scripts/install
source "$source_dir/scripts/install"

# A lab host shares /usr with its machine and has no systemd, so only files can be tested on it.
rehearsal=${VMCKPT_REHEARSAL:-}

packages() {
    [ -n "$rehearsal" ] || install_packages "$@"
}

tell_systemd() {
    [ -n "$rehearsal" ] || systemctl "$@"
}

# Replace the lines between vmckpt's two markers in a file with the lines from stdin.
keep_block() {
    local file=$1 begin="# vmckpt: begin" end="# vmckpt: end" rest
    touch "$file"
    rest=$(sed "/^$begin\$/,/^$end\$/d" "$file")
    { [ -z "$rest" ] || echo "$rest"; echo "$begin"; cat; echo "$end"; } >"$file.new"
    cat "$file.new" >"$file"
    rm "$file.new"
}

# Write the hosts' names to /etc/hosts. Arguments: the subnet, then the hosts in order.
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

# Create the bridge `guests` on the network card that has no address, as on the lab's hosts.
bridge_guests() {
    local address=$1 card
    ip link show guests >/dev/null 2>&1 || ip link add guests type bridge
    ip link set guests up
    [ -z "$address" ] || ip address replace "$address" dev guests
    for card in /sys/class/net/*; do
        card=${card##*/}
        case $card in eth* | en*) ;; *) continue ;; esac
        # Vagrant gives this card no address.
        [ -n "$(ip -4 -o address show dev "$card")" ] || [ -e "/sys/class/net/$card/brport" ] ||
            ip link set "$card" master guests up
    done
}
