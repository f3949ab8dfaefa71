#!/bin/sh
# Install steps of the images, into the python3 of PATH. The Dockerfiles and their test run them.
#
#   cpu-dependencies   torch's CPU build, then what pyproject.toml asks for, in the versions of constraints.txt
#   cpu-package        this package
#   gpu-dependencies   what pyproject.toml asks for and the container lacks; what the container brings stays
#   gpu-package        this package, and proof that torch and what belongs to it are still the container's
set -eu
cd "$(dirname "$0")/.."

TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
BASE_IMAGE=base-image.json # what the container brought, as gpu-dependencies found it
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The dependencies of pyproject.toml, under the constraints of file $1, with the setuptools that is installed.
install_dependencies() {
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        >"$work/requirements.txt"
    python3 -m pip install --no-build-isolation --constraint "$1" --requirement "$work/requirements.txt"
}

install_package() {
    python3 -m pip install --no-build-isolation --no-deps .
}

case "${1:-}" in
cpu-dependencies)
    torch=$(sed -n 's/^torch==\([^ ]*\).*/torch==\1+cpu/p' constraints.txt)
    python3 -m pip install --constraint constraints.txt setuptools
    # From the indexes that pip is configured with, if they have it, else from PyTorch's.
    python3 -m pip install --no-deps "$torch" 2>/dev/null ||
        python3 -m pip install --no-deps --index-url "$TORCH_INDEX" "$torch"
    install_dependencies constraints.txt
    ;;
cpu-package)
    install_package
    python3 -m pip check
    ;;
gpu-dependencies)
    python3 docker/base_image.py record "$BASE_IMAGE"
    python3 docker/base_image.py constraints "$BASE_IMAGE" constraints.txt >"$work/constraints.txt"
    unset PIP_CONSTRAINT # the container's own file also pins what must be newer; ours pins what must stay
    install_dependencies "$work/constraints.txt"
    ;;
gpu-package)
    install_package
    python3 docker/base_image.py verify "$BASE_IMAGE"
    ;;
*)
    echo "usage: install.sh cpu-dependencies|cpu-package|gpu-dependencies|gpu-package" >&2
    exit 2
    ;;
esac
