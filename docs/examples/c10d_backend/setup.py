"""Builds and installs the example: `pip install --no-build-isolation .`"""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    name="store-demo",
    version="1.0",
    py_modules=["store_demo"],
    # With kernels it would be CUDAExtension("_store_demo", ["store_demo.cc", "kernels.cu"]), and
    # the back end registered for devices=["cuda"], too.
    ext_modules=[CppExtension("_store_demo", ["store_demo.cc"])],
    cmdclass={"build_ext": BuildExtension},
    entry_points={"torch.backends": ["store_demo = store_demo:register"]},
)
