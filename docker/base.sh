#!/bin/sh
# Two stand-in base images, for a machine that reaches Debian's and Python's package registries but no image registry:
#
#   stretto-base:clean   Debian 12 with its Python 3.11, in place of python:3.11-slim-bookworm. Ends in the final image.
#   stretto-base:build   the same, and this machine's CA certificates and pip settings. Used while building only.
#
#   docker/base.sh [FOLDER]      FOLDER keeps the unpacked Debian, so that a second call is quick; else a temporary one.
#
# Wanted: root, debootstrap, docker. The image is then built with
#   docker build --network host --build-arg BASE=stretto-base:clean --build-arg BUILD_BASE=stretto-base:build ...
set -eu

MIRROR="${MIRROR:-http://deb.debian.org/debian}"
LARGEST_MB=1000 # folders with wheels that pip's settings name are taken along up to this size

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
keep="${1:-$work}"

fail() {
    echo "docker/base.sh: $*" >&2
    exit 1
}

[ "$(id -u)" -eq 0 ] || fail "debootstrap needs root, and this is uid $(id -u)"
for tool in debootstrap docker; do
    command -v "$tool" >/dev/null || fail "$tool is missing. On Debian: apt-get install -y debootstrap docker.io"
done

# ---------------------------------------------------------------- the clean one

root="$keep/debian"
if [ ! -e "$root/.complete" ]; then
    rm -rf "$root"
    mkdir -p "$keep"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "$MIRROR" \
        >"$keep/debootstrap.log" 2>&1 || { tail -20 "$keep/debootstrap.log" >&2; fail "debootstrap failed"; }
    # What debootstrap took from this machine, and what nobody needs in an image.
    rm -rf "$root"/etc/resolv.conf "$root"/etc/hostname "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
        "$root"/var/log/*.log "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/*
    touch "$root/.complete"
fi
tar -C "$root" --exclude=./.complete --exclude='./dev/*' --exclude='./proc/*' -c . |
    docker import --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8' --change 'CMD ["python3"]' \
        - stretto-base:clean >/dev/null

# ---------------------------------------------------------------- the one to build with

context="$work/context"
mkdir -p "$context/files"

take() { # a file or folder of this machine, to the same place
    [ -e "$1" ] && [ ! -e "$context/files$1" ] || return 0
    mkdir -p "$context/files$(dirname "$1")"
    cp -a -L "$1" "$context/files$1"
}

take /etc/ssl/certs/ca-certificates.crt
take /usr/local/share/ca-certificates
settings=""
for file in /etc/pip.conf /etc/xdg/pip/pip.conf "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
    if [ -e "$file" ]; then
        case "$file" in
        "$HOME"/*) # the build runs as root, whoever calls this
            target="$context/files/root/.config/pip/pip.conf"
            ;;
        *) target="$context/files$file" ;;
        esac
        mkdir -p "$(dirname "$target")"
        # Package indexes on this machine's disk stay there: they may be of any size, and lead to files elsewhere.
        sed -E '/index-url/ s|file://[^ ]+||g' "$file" >"$target"
        settings="$settings $(cat "$target")"
    fi
done
# Values of the environment go into the image's environment: pip settings, and where programs look for certificates.
env | grep -E '^(PIP_[A-Z_]+|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)=' \
    >"$work/environment" || true
settings="$settings $(cat "$work/environment")"
# Files and folders that the settings name, such as constraints and find-links.
for word in $(printf '%s' "$settings" | tr '=,' '  '); do
    path="${word#file://}"
    case "$path" in
    /*)
        [ -e "$path" ] || continue
        size="$(du -sm "$path" | cut -f1)"
        if [ "$size" -gt "$LARGEST_MB" ]; then
            echo "docker/base.sh: $path has $size MB and stays outside; pip takes from elsewhere what it would find there"
        else
            take "$path"
        fi
        ;;
    esac
done

{
    echo "FROM stretto-base:clean"
    echo "COPY files /"
    sed -E 's/^([A-Za-z_]+)=(.*)$/ENV \1="\2"/' "$work/environment"
} >"$context/Dockerfile"
DOCKER_BUILDKIT=0 docker build --quiet -t stretto-base:build "$context" >/dev/null

docker image ls stretto-base --format '{{.Repository}}:{{.Tag}} {{.Size}}'
