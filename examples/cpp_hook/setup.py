"""Builds a library of hooks. It needs torch and torch_commhook:

python setup.py build_ext --inplace
"""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

from torch_commhook import include_paths

setup(
    name="clipped_mean",
    ext_modules=[
        CppExtension(
            "clipped_mean",
            ["clipped_mean.cpp"],
            include_dirs=include_paths(),
            py_limited_api=True,  # the library uses no Python, so it serves all its versions
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
