#!/usr/bin/env python3
"""Check that the built kernel libraries keep to what they promise of the machine that loads them.

A symbol of Python outside the limited API of 3.9 is an error: the file name says abi3. Symbols newer than manylinux_2_28
are listed only: they come from the compiler of this machine, and a build for the Hub is made with an older one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kernel_abi_check

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
BUILD = Path(__file__).resolve().parent.parent / "build"


def check(library: Path) -> bool:
    """Print what was found in one library; true where its Python ABI is clean."""
    print(library.relative_to(BUILD))
    binary = kernel_abi_check.ObjectFile(library)
    violations = binary.check_python_abi(PYTHON_ABI)
    for symbol in violations:
        print(f"  error: {symbol.name} is not in the limited API of Python {PYTHON_ABI}")
    if not violations:
        print(f"  Python {PYTHON_ABI} limited API: clean")
    for symbol in binary.check_manylinux(MANYLINUX):
        print(f"  note: newer than {MANYLINUX}: {symbol.name} ({symbol.dep} {symbol.version})")
    return not violations


def main() -> int:
    libraries = sorted(BUILD.glob("*/*.abi3.so"))
    if not libraries:
        print(f"error: no library in {BUILD}: run make build", file=sys.stderr)
        return 1
    clean = [check(library) for library in libraries]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
