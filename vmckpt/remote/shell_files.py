"""Shell functions for files on hosts in directories that another user may own.

The other user can replace any name in such a directory, at any moment, with a symbolic link, a FIFO
or another file. So a directory is entered level by level; afterwards, names are relative to it, and
tools get an open file as /proc/self/fd/4. Agents use `util.host_files` for the same purpose; these
functions are for hosts without an agent.
"""

# enter DIRECTORY: make it the current directory. A symbolic link in the path is followed only if no
# user other than root and the login user can have created the link. Status 1: refused, with the
# reason on stderr; 2: the directory does not exist.
# reach FILE: enter its directory, and set $name to its name there; FILE may itself be such a link.
_ENTER = r"""
me=$(id -u)
state() { LC_ALL=C stat -c '%d:%i %u %F' -- "$1" 2>/dev/null; }
# Set $to to the target of the link with that name.
target() {
    case $(state "./$1") in
    *" 0 symbolic link" | *" $me symbolic link") ;;
    *) echo "$1 is a symbolic link of another user, or not a directory" >&2; return 1 ;;
    esac
    case $(LC_ALL=C stat -c '%u %A' .) in
    0\ d????-??-? | "$me "d????-??-? | *[tT]) ;;
    *) echo "other users can replace the symbolic link $1" >&2; return 1 ;;
    esac
    to=$(readlink -- "./$1"; echo .)
    to=${to%??}
}
enter() {
    cd / || return 1
    rest=${1#/}; turns=0
    while [ -n "$rest" ]; do
        one=${rest%%/*}
        case $rest in */*) rest=${rest#*/} ;; *) rest= ;; esac
        case $one in '' | .) continue ;; esac
        found=$(state "./$one") || { [ -x . ] && return 2; echo "$1: no access" >&2; return 1; }
        case $found in
        *" directory")
            cd -P -- "./$one" 2>/dev/null && [ "$(state .)" = "$found" ] || {
                echo "$1: $one cannot be entered" >&2
                return 1
            }
            ;;
        *)
            turns=$((turns + 1))
            [ "$turns" -le 40 ] || { echo "$1 has too many links in its path" >&2; return 1; }
            target "$one" || return 1
            case $to in /*) cd / ;; esac
            rest=$to/$rest
            ;;
        esac
    done
}
reach() {
    path=$1; links=0
    while :; do
        enter "${path%/*}" || return
        name=${path##*/}
        [ -L "./$name" ] || return 0
        links=$((links + 1))
        [ "$links" -le 40 ] || { echo "$1 has too many links in its path" >&2; return 1; }
        target "$name" || return 1
        case $to in /*) path=$to ;; *) at=$(pwd -P; echo .); path=${at%??}/$to ;; esac
    done
}
"""
# hold NAME: open a regular file in the current directory as descriptor 4, for reading and writing.
# Opening with <> does not block on a FIFO. The second check detects a file replaced meanwhile.
_HOLD = r"""
hold() {
    [ -f "./$1" ] && [ ! -L "./$1" ] || { echo "$1 is not a regular file" >&2; return 1; }
    exec 4<>"./$1" || return 1
    [ -f /proc/self/fd/4 ] &&
        [ "$(stat -c %d:%i -- "./$1")" = "$(stat -L -c %d:%i /proc/self/fd/4)" ] || {
        echo "$1 was replaced meanwhile" >&2
        return 1
    }
}
"""
FILES = _ENTER + _HOLD

# ours FILE: succeeds if no user other than root and the login user can have installed the
# executable.
PROGRAMS = r"""
ours() {
    case $1 in /*) ;; *) return 1 ;; esac
    real=$(readlink -f -- "$1") || return 1
    set -- "$1" "$real"
    for at in "$@"; do
        while [ "$at" != / ]; do
            at=$(dirname -- "$at"); set -- "$@" "$at"
        done
    done
    # find prints each path that belongs to another user or is writable for others. In a sticky
    # directory, others cannot replace our files.
    me=$(id -u)
    [ -z "$(find "$@" -maxdepth 0 ! -uid 0 ! -uid "$me" 2>&1
        find -L "$@" -maxdepth 0 \( ! -uid 0 ! -uid "$me" -o \
            \( -perm -0002 -o -perm -0020 ! -gid 0 \) ! \( -type d -perm -1000 \) \) 2>&1)" ]
}
"""
