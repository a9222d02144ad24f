"""A kernel that is wrong on purpose: fastaug refuses it.

python -m fastaug.train --kernel examples.cancelling_kernel:kernel

sum p (z - mean z) / (K - 1) equals the pairwise KL in exact arithmetic. In fp32 its terms cancel:
where views nearly agree, which is what training aims at, not one digit is right.
"""

from examples.autograd_kernel import AutogradKernel


class CancellingKernel(AutogradKernel):
    name = "cancelling"

    def pairwise_kl(self, z, lp):
        terms = lp.exp() * (z - z.mean(1, keepdim=True))
        return terms.sum((1, 2)) / max(z.shape[1] - 1, 1)


kernel = CancellingKernel()
