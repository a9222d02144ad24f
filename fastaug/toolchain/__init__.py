"""Compilers and drivers for kernels, shared by views and loss kernels."""
