"""Builds the hooks that tests load; see tests/support/cpp_libraries.py."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

from torch_commhook import include_paths

setup(
    name="test_hooks",
    ext_modules=[
        CppExtension(
            name,
            [f"{name}.cpp"],
            include_dirs=include_paths(),
            define_macros=[("USE_C10D", None), ("USE_DISTRIBUTED", None), ("USE_C10D_GLOO", None)],
            extra_compile_args=["-O0", "-g0", "-fvisibility=hidden"],
            py_limited_api=True,
        )
        for name in ("comm_hooks", "autograd_hooks", "no_hooks", "wrong_hooks", "old_hooks")
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
