"""NVIDIA DALI: decode every image once, make its K views on the device. DALI is imported only here.

One definition of each pipeline serves CPU and GPU; `device` ("cpu" or "gpu") is where it works.
"""
