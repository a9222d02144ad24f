"""Views of images: plans, RandAugment, the reference renderer and the fused engine."""
