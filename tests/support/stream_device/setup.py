"""Builds the device of stream_devices.py; see tests/support/cpp_libraries.py."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    name="stream_device",
    ext_modules=[
        CppExtension(
            "stream_device",
            ["device.cpp", "group.cpp"],
            define_macros=[("USE_C10D", None), ("USE_DISTRIBUTED", None), ("USE_C10D_GLOO", None)],
            extra_compile_args=["-O0", "-g0", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
