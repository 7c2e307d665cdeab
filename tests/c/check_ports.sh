#!/bin/sh
# Build and run the C tests with Clang and for aarch64 (under qemu, with GCC and Clang), and compile
# the C core for macOS and musl with zig. Usage: check_ports.sh BUILD_FOLDER [PYTHON_WITH_ZIGLANG]
# A missing tool is reported and skipped; with CHECK_PORTS_STRICT=1 it is an error.
set -eu
root=$(pwd) build=$1 zig_python=${2:-}
case $zig_python in
*/*) zig_python=$(cd "$(dirname "$zig_python")" && pwd)/$(basename "$zig_python") ;;
esac
flags="-std=c11 -D_GNU_SOURCE -Wall -Wextra -Wconversion -Werror -ffp-contract=off -pthread -I$root/csrc"
missing=0
mkdir -p "$build"

has() {
    for tool in "$@"; do
        if ! command -v "$tool" >/dev/null; then
            echo "check-ports: $tool is missing; skipped: $what"
            missing=1
            return 1
        fi
    done
}

# run_tests NAME COMPILE_COMMAND [RUN_PREFIX]
run_tests() {
    folder=$build/$1
    mkdir -p "$folder"
    # shellcheck disable=SC2086
    (cd "$folder" && $2 $flags -c "$root"/csrc/*.c "$root"/tests/c/*.c)
    objects=$(ls "$folder"/*.o | grep -v -e /test_ -e /kernel_hashes.o)
    for program in test_core kernel_hashes; do
        case $program in
        test_core) tests=$(ls "$folder"/test_*.o) ;;
        *) tests=$folder/$program.o ;;
        esac
        # shellcheck disable=SC2086
        $2 -pthread $tests $objects -o "$folder/$program" -lm
        printf '%s: ' "$1"
        # qemu reports every signal that ends a child process, which the tests expect.
        # shellcheck disable=SC2086
        if ! ${3:-} "$folder/$program" 2>"$folder/errors"; then
            cat "$folder/errors" >&2
            exit 1
        fi
    done
}

what="C tests with Clang"
if has clang; then
    run_tests clang "clang -O3"
    # Clang compiles without the libraries of its sanitizers, so check that it can link them.
    if echo 'int main(void) { return 0; }' | clang -xc -fsanitize=address,undefined - -o "$build/empty" 2>/dev/null; then
        run_tests clang-sanitized "clang -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    fi
fi

what="C tests on aarch64"
if has aarch64-linux-gnu-gcc qemu-aarch64; then
    emulator="qemu-aarch64 -L /usr/aarch64-linux-gnu"
    run_tests aarch64 "aarch64-linux-gnu-gcc -O3" "$emulator"
    # Clang uses the libraries of the GCC above.
    if command -v clang >/dev/null; then
        run_tests aarch64-clang "clang --target=aarch64-linux-gnu -O3" "$emulator"
    fi
fi

what="compilation for macOS and musl"
if [ -n "$zig_python" ] && "$zig_python" -m ziglang version >/dev/null 2>&1; then
    for target in aarch64-macos aarch64-linux-musl x86_64-linux-musl; do
        mkdir -p "$build/$target"
        # shellcheck disable=SC2086
        (cd "$build/$target" && "$zig_python" -m ziglang cc -target $target -O2 $flags -c "$root"/csrc/*.c)
        echo "$target: $(ls csrc/*.c | wc -l) units compile without warnings"
    done
else
    echo "check-ports: ziglang is missing; skipped: $what"
    missing=1
fi

if [ "$missing" = 1 ] && [ "${CHECK_PORTS_STRICT:-0}" = 1 ]; then
    echo "check-ports: a tool is missing, and CHECK_PORTS_STRICT=1" >&2
    exit 1
fi
