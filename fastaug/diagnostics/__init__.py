"""Checks of the machine, the installed packages and the kernels: the work of fastaug.doctor."""
