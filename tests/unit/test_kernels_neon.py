"""The kernels of ARM machines, on an emulated one: each makes the same bits as AVX2's.

Needs `apt install g++-aarch64-linux-gnu qemu-user-static`, and a minute.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.structure.source_tree import PACKAGE
from tests.unit.kernel_cases import native, needs_native

DIGESTS = Path(__file__).with_name("kernel_digests.cpp")
COMPILER, EMULATOR, LIBRARIES = (
    "aarch64-linux-gnu-g++",
    "qemu-aarch64-static",
    "/usr/aarch64-linux-gnu",
)

needed = ("cmake", "c++", COMPILER, EMULATOR)


@pytest.mark.exhaustive
@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with AVX2")
@pytest.mark.skipif(not all(map(shutil.which, needed)), reason="no cross compiler or emulator")
def test_kernels_of_arm_make_the_same_bits(tmp_path):
    def told(*command):
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        return ran.stdout.splitlines()

    def digests(compiler):
        told(compiler, "-std=c++17", "-O1", DIGESTS, "-o", tmp_path / compiler, "-ldl")
        return tmp_path / compiler

    cross = ("NAME=Linux", "PROCESSOR=aarch64")
    cross = (*(f"-DCMAKE_SYSTEM_{each}" for each in cross), f"-DCMAKE_CXX_COMPILER={COMPILER}")
    told("cmake", "-S", PACKAGE / "kernels" / "csrc", "-B", tmp_path / "arm", *cross)
    told("cmake", "--build", tmp_path / "arm")
    emulated = (EMULATOR, "-L", LIBRARIES, digests(COMPILER), tmp_path / "arm" / "_native.so")
    expected = told(digests("c++"), native._find(), "avx2")
    assert len(expected) == 224
    assert told(*emulated, "baseline") == expected
