"""Networks: images [N, 3, H, W] -> logits [N, C] in fp32."""
