"""What a resumable run consists of: saved whole, or not at all; restored bit for bit.

``manifest``, ``pins``, ``retention`` and ``lease`` import without torch.
"""
